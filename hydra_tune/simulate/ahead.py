"""What each device would do next, so that its bytes can be sent while it computes: double buffering.

Note: double buffering. The scheduler binds a job to a device when the device is free, not before. While a unit runs, a
selection of the same policy, with a memory of its own, is asked what this device would do next, and those bytes are sent.
It knows the very views that the scheduler's policy was told, less the jobs whose shard another device has in its buffer;
for the question, the job that runs here is added as it will be when its unit is over. The answer binds nothing: when the
unit is over, the scheduler chooses among all eligible jobs, and knows whose shard is here. Only where the policy itself
binds early (`EarlyBinding`) is it known what follows.

Note: staggered admission. The jobs of the front go first here as well. Who they are changes only when a job is admitted
or over, or a device comes or goes; then all that crossed the border change their level at once.
"""

from collections.abc import Sequence
from typing import Protocol

from hydra_tune.schedule import BindsEarly, JobView, Policy, Scheduler
from hydra_tune.schedule.levels import Level, Levels
from hydra_tune.schedule.policy import start_selection
from hydra_tune.simulate.entities import ABSENT, SimDevice, SimJob
from hydra_tune.simulate.transfers import Transfers


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
        jobs: all of them by name.
        transfers: sends.
    """

    def __init__(
        self,
        policy: Policy,
        scheduler: Scheduler,
        devices: list[SimDevice],
        jobs: dict[str, SimJob],
        transfers: Transfers,
    ) -> None:
        self._is_bound = isinstance(start_selection(policy), BindsEarly)
        self._scheduler, self._devices, self._jobs, self._transfers = scheduler, devices, jobs, transfers
        self._front: frozenset[str] = frozenset()
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

    def notice_front(self) -> None:
        """A job was admitted or is over, or a device has come or gone."""
        front = frozenset(self._scheduler.front)
        crossed = [self._jobs[name] for name in sorted(front ^ self._front)]
        views = [job.seen for job in crossed if job.seen is not None and job.claimed_by == ABSENT]
        for view in views:
            self._take(view)
        self._front = front
        for view in views:
            self._put(view)

    def buffer_next(self, device: SimDevice, now: float, offset: float) -> None:
        """A unit has begun to compute: send what its device would do next.

        Args:
            device: where it runs.
            now: the time.
            offset: what is added to every remaining time the scheduler is told.
        """
        own = device.job
        assert own is not None
        if device.bandwidth is None:
            return  # to send takes no time
        self.unclaim_device(device)
        name = self._next_job(device, self._following(own, offset))
        if name is None:
            return
        chosen = self._jobs[name]
        shard = chosen.shards[(chosen.position + (chosen is own)) % len(chosen.units)]
        self._claim(device, chosen)
        if chosen.places[shard] != device.number and self._transfers.fits_beside(
            device, chosen.trial.shard_bytes[shard]
        ):
            self._transfers.bring(device, chosen, shard, now)

    def _next_job(self, device: SimDevice, own: JobView | None) -> str | None:
        """The job that a device, whose buffer is taken for none, would turn to when its unit is over.

        `own` is the job that runs there, as it will be then; None where it cannot follow itself.
        """
        if self._is_bound:
            return self._scheduler.bound_to(device.name)
        if own is None:
            return self._free.choose(device.name).job if self._num_free else None
        level = self._level(own)
        self._free.add(own, level)
        chosen = self._free.choose(device.name).job
        self._free.remove(own, level)
        return chosen

    def _following(self, job: SimJob, offset: float) -> JobView | None:
        """What a policy will see of a job that runs, when its unit is over; None if it does not go on at once."""
        position = job.position + 1
        if position < len(job.units):
            left = job.planned_seconds - job.prefix[position]
        elif job.step + 1 < job.milestone:
            position, left = 0, job.planned_seconds - job.step_seconds
        else:
            return None
        place = job.places[job.shards[position]]
        return self._scheduler.view_after(
            job.name,
            unit=job.units[position],
            seconds=job.truth[job.position],
            remaining_seconds=left + offset,
            shard_device=None if place == ABSENT else self._devices[place].name,
        )

    def _claim(self, device: SimDevice, job: SimJob) -> None:
        """The buffer of a device, which is for no job, is for this one from now on, and no other device's is."""
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
        self._free.add(view, self._level(view))
        self._num_free += 1

    def _take(self, view: JobView) -> None:
        self._free.remove(view, self._level(view))
        self._num_free -= 1

    def _level(self, view: JobView) -> Level:
        return view.priority, view.job in self._front
