"""`ViewHeap`: a heap of eligible jobs by a number, with lazy removal.

Most policies here, such as `fifo.py` and `lpt.py`, keep the eligible jobs in a `Smallest` or a `ViewHeap`, and take the
first job when asked about an idle device. `lrtf.py` has heaps of its own. A heap takes no lock: one thread at a time
calls its selection. `PriorityLevels` (`schedule/levels.py`) drops an empty `Smallest`, which must keep no state besides
its jobs. The module must import no torch, and reads no clock.
"""

import itertools
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from hydra_tune.schedule.policies.policy import JobView

_Entry = tuple[float, int, int, JobView]
_SPARE = 64  # a heap with fewer dead entries is not worth clearing


class ViewHeap:
    """A heap with lazy removal: a removed entry stays until it reaches the top, or until most entries are dead.

    Memory stays proportional to the number of jobs, apart from `_SPARE` entries. Equal numbers are in the order of submission.
    """

    __slots__ = ("_entries", "_live", "_serial")

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._live: dict[str, _Entry] = {}
        self._serial = itertools.count()  # breaks all ties, because views cannot be compared

    def __len__(self) -> int:
        return len(self._live)

    def add(self, number: float, view: JobView) -> None:
        """Add a job; smaller numbers come first."""
        entry = (number, view.order, next(self._serial), view)
        self._live[view.job] = entry
        heappush(self._entries, entry)

    def remove(self, view: JobView) -> None:
        """Remove a job."""
        del self._live[view.job]
        # Amortized O(1): each rebuild is preceded by at least as many removals as there are live entries.
        if len(self._entries) > 2 * len(self._live) + _SPARE:
            self._entries = list(self._live.values())
            heapify(self._entries)

    def first(self) -> JobView | None:
        """Return the job with the smallest number; None if there is no job."""
        entries, live = self._entries, self._live
        while entries:
            entry = entries[0]
            view = entry[3]
            # Identity, because a job that was removed and added again has an older, dead entry in the heap, too.
            if live.get(view.job) is entry:
                return view
            heappop(entries)
        return None


class Smallest:
    """A selection of the job with the smallest number, on any device.

    Args:
        number: key function over views. Equal numbers are in the order of submission.
    """

    holds_only_jobs = True

    def __init__(self, number: Callable[[JobView], float]) -> None:
        self._number = number
        self._heap = ViewHeap()

    def add(self, view: JobView) -> None:
        """Add the job to the heap."""
        self._heap.add(self._number(view), view)

    def remove(self, view: JobView) -> None:
        """Remove the job from the heap."""
        self._heap.remove(view)

    def choose(self, device: str) -> JobView:  # noqa: ARG002 - every device is served alike
        """Choose the first job of the heap."""
        view = self._heap.first()
        assert view is not None
        return view
