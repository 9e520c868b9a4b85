"""Double buffering on the virtual clock.

While a unit computes, its device prefetches the shard of the next unit, as predicted by `hydra_tune.schedule.ahead`.
`Simulator` (`simulator.py`) calls `SimulatedPrefetcher.buffer_next` as a unit begins to compute, if `Scenario.overlap` is set
and some device has a bandwidth, and tells the prefetcher of every change of a job (`notice`) and of a device. A prefetch may
evict, but never the running unit's shard.
"""

from collections.abc import Sequence
from typing import Protocol

from hydra_tune.schedule import JobView, NextJobPredictor, Policy, Scheduler
from hydra_tune.simulate.engine.entities import ABSENT, SimulatedDeviceState, SimulatedJobState
from hydra_tune.simulate.engine.transfers import ShardTransferSimulator


class Lookahead(Protocol):
    """Predicts a device's next choice; any policy with this method qualifies."""

    def choose(self, device: str, candidates: Sequence[JobView], /) -> JobView:
        """Choose among the jobs whose next shard may be sent to `device`."""


class SimulatedPrefetcher(NextJobPredictor):
    """Prefetches a device's next shard; `policy` makes the selections."""

    def __init__(
        self,
        policy: Policy,
        scheduler: Scheduler,
        devices: list[SimulatedDeviceState],
        jobs: dict[str, SimulatedJobState],
        transfers: ShardTransferSimulator,
    ) -> None:
        super().__init__(policy, scheduler)
        self._views, self._devices, self._jobs, self._transfers = scheduler, devices, jobs, transfers

    def buffer_next(self, device: SimulatedDeviceState, now: float, offset: float) -> None:
        """Prefetch a device's next shard, as a unit begins to compute; `offset` is `Simulator.offset`."""
        running_job = device.job
        assert running_job is not None
        if device.bandwidth is None:
            return  # a load takes no time
        name = self.choose(device.name, self._following(running_job, offset))
        if name is None:
            return
        chosen = self._jobs[name]
        # The running job is still at its present unit: its next unit is a position later, or the first of the next
        # step.
        shard = chosen.shards[(chosen.position + (chosen is running_job)) % len(chosen.units)]
        if chosen.places[shard] != device.number and self._transfers.fits_beside(
            device, chosen.trial.shard_bytes[shard]
        ):
            self._transfers.bring(device, chosen, shard, now)

    def _following(self, job: SimulatedJobState, offset: float) -> JobView | None:
        """Predict the view of a running job after its unit; None if the job does not continue at once."""
        position = job.position + 1
        if position < len(job.units):
            remaining_seconds = job.planned_seconds - job.prefix[position]
        elif job.step + job.steps_under_way < job.milestone:
            position, remaining_seconds = 0, job.planned_seconds - job.steps_under_way * job.step_seconds
        else:
            # A report, a corrected estimate or the end comes first, and decides how the job continues.
            return None
        place = job.places[job.shards[position]]
        return self._views.view_after(
            job.name,
            unit=job.units[position],
            seconds=job.truth[job.position] * job.steps_under_way,
            remaining_seconds=remaining_seconds + offset,
            shard_device=None if place == ABSENT else self._devices[place].name,
        )
