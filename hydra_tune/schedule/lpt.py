"""`LPT`: longest processing time first, whole trials. The classical way, without interleaving."""

from collections import defaultdict
from dataclasses import dataclass

from hydra_tune.schedule.heap import ViewHeap
from hydra_tune.schedule.policy import IncrementalPolicy, JobView, Selection


@dataclass(frozen=True)
class LPT(IncrementalPolicy):
    """A device keeps its job until that is over; then it takes the longest job that no device has.

    A device never stands idle for it: while its job waits for an answer it begins another, and keeps that from then on;
    where every eligible job has a device, and that one is busy, the longest of them moves to the one that is idle.

    Source:
        Graham, Bounds on Multiprocessing Timing Anomalies (1969), section 5.
    """

    def start(self) -> Selection:
        """Make an empty selection."""
        return _LPTSelection()


class _LPTSelection:
    def __init__(self) -> None:
        self._begun_on: defaultdict[str, ViewHeap] = defaultdict(ViewHeap)  # the one that ran last first
        self._new = ViewHeap()  # these two by length
        self._begun = ViewHeap()

    def add(self, view: JobView) -> None:
        """Put the job with its device, or with those that have none."""
        if view.last_device is None:
            self._new.add(-view.remaining_seconds, view)
        else:
            self._begun.add(-view.remaining_seconds, view)
            self._begun_on[view.last_device].add(-view.turn, view)

    def remove(self, view: JobView) -> None:
        """Take the job out."""
        if view.last_device is None:
            self._new.remove(view)
        else:
            self._begun.remove(view)
            self._begun_on[view.last_device].remove(view)

    def choose(self, device: str) -> JobView:
        """Choose the device's own job, the longest that no device has, or the longest of others."""
        own = self._begun_on[device].first() if device in self._begun_on else None
        view = own or self._new.first() or self._begun.first()
        assert view is not None
        return view
