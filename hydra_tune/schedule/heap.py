"""`ViewHeap`: eligible jobs by a number, the smallest at hand."""

import itertools
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from hydra_tune.schedule.policy import JobView

_Entry = tuple[float, int, int, JobView]
_SPARE = 64  # below this many dead entries a heap is not worth clearing


class ViewHeap:
    """A heap that forgets lazily: what was removed stays in it until it comes to the top, or until most of it is dead.

    So adding costs a logarithm, the first costs nothing but what it clears away, and memory follows the number of jobs.
    Equal numbers are in the order of submission.
    """

    __slots__ = ("_entries", "_live", "_serial")

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._live: dict[str, _Entry] = {}
        self._serial = itertools.count()  # entries never compare by view, which has no order

    def __len__(self) -> int:
        return len(self._live)

    def add(self, number: float, view: JobView) -> None:
        """Put a job in; smaller numbers first."""
        entry = (number, view.order, next(self._serial), view)
        self._live[view.job] = entry
        heappush(self._entries, entry)

    def remove(self, view: JobView) -> None:
        """Take a job out."""
        del self._live[view.job]
        if len(self._entries) > 2 * len(self._live) + _SPARE:
            self._entries = list(self._live.values())
            heapify(self._entries)

    def first(self) -> JobView | None:
        """The job with the smallest number; None if there is no job."""
        entries, live = self._entries, self._live
        while entries:
            entry = entries[0]
            view = entry[3]
            if live.get(view.job) is entry:
                return view
            heappop(entries)
        return None


class Smallest:
    """A selection that takes the job with the smallest number, on whatever device.

    Args:
        number: what jobs are ordered by, from the view alone. Equal numbers are in the order of submission.
    """

    def __init__(self, number: Callable[[JobView], float]) -> None:
        self._number = number
        self._heap = ViewHeap()

    def add(self, view: JobView) -> None:
        """Put the job in its place."""
        self._heap.add(self._number(view), view)

    def remove(self, view: JobView) -> None:
        """Take the job out."""
        self._heap.remove(view)

    def choose(self, device: str) -> JobView:  # noqa: ARG002 - every device is served alike
        """Choose the first."""
        view = self._heap.first()
        assert view is not None
        return view
