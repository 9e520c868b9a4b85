"""`LPT`: longest processing time first, whole trials without interleaving: the classical way.

`make_policy` (`registry.py`) makes this policy for the name `"lpt"`; `PriorityLevels` (`schedule/levels.py`) asks the
policy's selection for a job for each idle device. The policy must keep no state: the selection has all state, because one
policy may serve several schedulers.
"""

from collections import defaultdict
from dataclasses import dataclass

from hydra_tune.schedule.policies.heap import ViewHeap
from hydra_tune.schedule.policies.policy import IncrementalPolicy, JobView, Selection


@dataclass(frozen=True)
class LPT(IncrementalPolicy):
    """A device keeps its job until the job is over, and then takes the longest job that has not begun.

    While a device's job waits for an answer, the device begins another job, and keeps that job from then on; the waiting job
    comes next after that job. Where every eligible job has begun on another device, the idle device takes the longest of them.

    Source:
        Graham, Bounds on Multiprocessing Timing Anomalies (1969), section 5.
    """

    def start(self) -> Selection:
        """Make an empty selection."""
        return _LPTSelection()


class _LPTSelection:
    holds_only_jobs = True

    def __init__(self) -> None:
        self._begun_on: defaultdict[str, ViewHeap] = defaultdict(ViewHeap)  # by last device, the latest turn first
        self._new = ViewHeap()  # jobs without a device, the longest first
        self._begun = ViewHeap()  # all jobs with a device, the longest first

    def add(self, view: JobView) -> None:
        """Add the job to its device's jobs, or to the jobs without a device."""
        if view.last_device is None:
            self._new.add(-view.remaining_seconds, view)
        else:
            self._begun.add(-view.remaining_seconds, view)
            self._begun_on[view.last_device].add(-view.turn, view)

    def remove(self, view: JobView) -> None:
        """Remove the job."""
        if view.last_device is None:
            self._new.remove(view)
        else:
            self._begun.remove(view)
            self._begun_on[view.last_device].remove(view)

    def choose(self, device: str) -> JobView:
        """Choose the device's own job, else the longest job without a device, else the longest of all."""
        # Asked with `in`, because a look-up in the defaultdict would add a heap.
        device_job = self._begun_on[device].first() if device in self._begun_on else None
        view = device_job or self._new.first() or self._begun.first()
        assert view is not None
        return view
