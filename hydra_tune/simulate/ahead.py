"""Double buffering on the virtual clock: what `hydra_tune.schedule.ahead` says a device would do next is sent to it."""

from collections.abc import Sequence
from typing import Protocol

from hydra_tune.schedule import Ahead, JobView, Policy, Scheduler
from hydra_tune.simulate.entities import ABSENT, SimDevice, SimJob
from hydra_tune.simulate.transfers import Transfers


class Lookahead(Protocol):
    """Says what a device would do next; any policy with this method can."""

    def choose(self, device: str, candidates: Sequence[JobView], /) -> JobView:
        """Choose among the jobs whose next shard may be sent to `device`."""


class SendsAhead(Ahead):
    """Sends what a device would do next.

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
        super().__init__(policy, scheduler)
        self._views, self._devices, self._jobs, self._transfers = scheduler, devices, jobs, transfers

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
        name = self.choose(device.name, self._following(own, offset))
        if name is None:
            return
        chosen = self._jobs[name]
        shard = chosen.shards[(chosen.position + (chosen is own)) % len(chosen.units)]
        if chosen.places[shard] != device.number and self._transfers.fits_beside(
            device, chosen.trial.shard_bytes[shard]
        ):
            self._transfers.bring(device, chosen, shard, now)

    def _following(self, job: SimJob, offset: float) -> JobView | None:
        """What a policy will see of a job that runs, when its unit is over; None if it does not go on at once."""
        position = job.position + 1
        if position < len(job.units):
            left = job.planned_seconds - job.prefix[position]
        elif job.step + job.steps_under_way < job.milestone:
            position, left = 0, job.planned_seconds - job.steps_under_way * job.step_seconds
        else:
            return None
        place = job.places[job.shards[position]]
        return self._views.view_after(
            job.name,
            unit=job.units[position],
            seconds=job.truth[job.position] * job.steps_under_way,
            remaining_seconds=left + offset,
            shard_device=None if place == ABSENT else self._devices[place].name,
        )
