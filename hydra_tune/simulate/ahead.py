"""What each device would do next, so that its bytes can be sent while it computes: double buffering.

Note: double buffering. The scheduler binds a job to a device when the device is free, not before. While a unit runs, a
selection of the same policy, with a memory of its own, is asked what this device would do next, and those bytes are sent.
It knows the very views that the scheduler's policy was told, less the jobs whose shard another device has in its buffer;
for the question, the job that runs here is added as it will be when its unit is over. The answer binds nothing: when the
unit is over, the scheduler chooses among all eligible jobs, and knows whose shard is here. Only where the policy itself
binds early (`EarlyBinding`) is it known what follows.
"""

from collections.abc import Sequence
from typing import Protocol

from hydra_tune.schedule import BindsEarly, JobView, Policy, Scheduler
from hydra_tune.schedule.levels import Level, Levels
from hydra_tune.schedule.policy import start_selection
from hydra_tune.simulate.entities import ABSENT, SimDevice, SimJob


class Lookahead(Protocol):
    """Says what a device would do next; any policy with this method can."""

    def choose(self, device: str, candidates: Sequence[JobView], /) -> JobView:
        """Choose among the jobs whose next shard may be sent to `device`."""


class Ahead:
    """Keeps which eligible job each device's buffer is taken for, and the others in order.

    Args:
        policy: whose selections are asked.
        scheduler: has the views.
        devices: as numbered.
    """

    def __init__(self, policy: Policy, scheduler: Scheduler, devices: list[SimDevice]) -> None:
        self._is_bound = isinstance(start_selection(policy), BindsEarly)
        self._scheduler, self._devices = scheduler, devices
        self._free = Levels(lambda: start_selection(policy))
        self._num_free = 0

    def set_speed(self, device: str, speed: float) -> None:
        """A device is there, has changed its speed, or is lost (0)."""
        self._free.set_speed(device, speed)

    def notice(self, job: SimJob) -> None:
        """The scheduler may have told the policy something else of this job."""
        view = self._scheduler.view(job.name)
        if view is job.seen:
            return
        if job.claimed_by == ABSENT:
            if job.seen is not None:
                self._take(job.seen)
            if view is not None:
                self._put(view)
        job.seen = view

    def next_job(self, device: SimDevice, own: JobView | None) -> str | None:
        """The job that a device would turn to when its unit is over.

        Args:
            device: its buffer is taken for no job.
            own: the job that runs there, as it will be then; None where it cannot follow itself.
        """
        if self._is_bound:
            return self._scheduler.bound_to(device.name)
        if own is None:
            return self._free.choose(device.name).job if self._num_free else None
        self._free.add(own, _level(own))
        chosen = self._free.choose(device.name).job
        self._free.remove(own, _level(own))
        return chosen

    def claim(self, device: SimDevice, job: SimJob) -> None:
        """A device's buffer is for this job from now on, and no other device's is."""
        self.unclaim_device(device)
        if job.claimed_by != ABSENT:
            self._devices[job.claimed_by].buffered = None
        elif job.seen is not None:
            self._take(job.seen)
        job.claimed_by = device.number
        device.buffered = job

    def unclaim_device(self, device: SimDevice) -> None:
        """A device's buffer is for no job."""
        if device.buffered is not None:
            self.unclaim(device.buffered)

    def unclaim(self, job: SimJob) -> None:
        """No device's buffer is for this job."""
        if job.claimed_by == ABSENT:
            return
        self._devices[job.claimed_by].buffered = None
        job.claimed_by = ABSENT
        if job.seen is not None:
            self._put(job.seen)

    def _put(self, view: JobView) -> None:
        self._free.add(view, _level(view))
        self._num_free += 1

    def _take(self, view: JobView) -> None:
        self._free.remove(view, _level(view))
        self._num_free -= 1


def _level(view: JobView) -> Level:
    return view.priority, False  # the simulator knows no staggered admission
