"""Prediction of a device's next unit and of the blocks that the unit needs, asked when a unit begins to compute.

The prediction uses the pool's own scheduler and events, and the next unit is predicted under the pool's lock. While
everything fits and no block comes over a link from another device, no worker asks, and a decision costs only the note
of the jobs concerned. `Worker` (`pool/runtime/worker.py`) passes the question to a `BlockPrefetcher`
(`memory/prefetch.py`), which asks as the unit's compute begins; a rehearsal (`pool/dry_run/executor.py`) does likewise.
`JobDispatcher` (`pool/runtime/dispatcher.py`) makes the `NextUnitPredictor` and notes each decision here. `JobState`
(`pool/runtime/job_state.py`) and `JobPreparer` (`pool/runtime/preparer.py`) convert units by `unit_of`. A wrong
prediction costs a copy, and changes no number of a trial. The module must not choose units or advance a trial.
"""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from hydra_tune.memory.prefetch import UnitMemoryNeeds
from hydra_tune.schedule import Command, Event, JobView, NextJobPredictor, Policy, Release, Run, Scheduler, Unit
from hydra_tune.train.loop.batch_units import PendingUnit, UpcomingUnit
from hydra_tune.train.loop.burst import BURST


def unit_of(due: PendingUnit | UpcomingUnit) -> Unit:
    """Convert a unit of a trial to the scheduler's `Unit`."""
    base, position = due.base or (None, 0)
    return Unit(
        kind=due.kind,
        shard=due.shard,
        seconds=due.seconds,
        may_end_early=due.kind == BURST,
        base=base,
        base_position=position,
    )


class PredictedJob(Protocol):
    """The facts about a job that the prediction needs."""

    @property
    def key(self) -> str:
        """The job's name in the scheduler."""

    @property
    def goes_on(self) -> bool:
        """Whether the job will want a further unit, as far as is known."""

    @property
    def is_spread(self) -> bool:
        """Whether units of the job run side by side now."""

    @property
    def remaining_seconds(self) -> float:
        """Compute still to come in seconds."""

    @property
    def places(self) -> Mapping[int, str | None]:
        """For each shard, the device holding the shard, or None."""

    @property
    def pending(self) -> PendingUnit | None:
        """The next unit, where exactly one unit is due and does not run yet."""


class NextUnitPredictor:
    """Predicts the next unit of each device.

    Args:
        records: live jobs of the pool, by key.
        lock: lock of the pool; the caller of `decided`, `added` or `lost` holds the lock, and `needs` takes the lock.

    Attributes:
        seconds: CPU seconds spent on predictions.
    """

    def __init__(
        self,
        policy: Policy,
        scheduler: Scheduler,
        devices: Iterable[str],
        records: Mapping[str, PredictedJob],
        lock: threading.Condition,
    ) -> None:
        self._scheduler = scheduler
        self._records = records
        self._lock = lock
        self._ahead = NextJobPredictor(policy, scheduler)
        self._concerned: set[str] = set()  # jobs whose view may differ from the one last given to the policy
        self._begun: set[str] = set()
        self._paces: dict[str, float | None] = {}
        self.seconds = 0.0
        for device in devices:
            self.added(device)

    def added(self, device: str) -> None:
        """Add a device; under the lock."""
        # The pool measures no speeds: every device counts as nominal.
        self._ahead.set_speed(device, 1.0)

    def lost(self, device: str) -> None:
        """Remove a device; under the lock."""
        self._ahead.unclaim_device(device)
        self._ahead.set_speed(device, 0.0)

    def decided(self, events: Sequence[Event], commands: Sequence[Command]) -> None:
        """Note the events and commands of a decision; under the lock."""
        # Only notes: decisions are frequent and questions rare, so the selections are updated when a worker asks
        # (`_catch_up`).
        concerned = self._concerned
        for event in events:
            job = getattr(event, "job", None)
            if job is not None:
                concerned.add(job)
            alike = getattr(event, "alike", None)
            if alike is not None:
                self._notice_pace(alike)
        for command in commands:
            concerned.add(command.job)
            if type(command) is Run:
                self._begun.add(command.job)
            elif type(command) is Release:
                self._forget(command.job)

    def needs(self, record: PredictedJob, pending: PendingUnit, device: str) -> list[UnitMemoryNeeds]:
        """Return the needs of the units after a unit that begins to compute, in their order; on the device's worker thread."""
        # Units side by side have no common order. Read without the lock: only this thread touches the job's trial now.
        following = [] if record.is_spread else pending.following()
        due: list[PendingUnit | UpcomingUnit] = []
        if following and (following[0].kind, following[0].shard) == ("update", pending.shard):
            due.append(following.pop(0))  # an update always runs right after its backward
        with self._lock:
            start = time.thread_time()
            unit = self._next_unit(record, pending, following, device)
            self.seconds += time.thread_time() - start
        if unit is not None:
            due.append(unit)
        return [UnitMemoryNeeds(due_unit.blocks(), due_unit.workspace_bytes) for due_unit in due]

    def _next_unit(
        self, record: PredictedJob, pending: PendingUnit, following: Sequence[UpcomingUnit], device: str
    ) -> PendingUnit | UpcomingUnit | None:
        self._catch_up()
        own_view = self._own_view(record, pending, following[0]) if following else None
        job = self._ahead.choose(device, own_view)
        if job is None:
            return None
        if job == record.key:
            return following[0] if following else None
        next_record = self._records.get(job)
        # None also where the job has been given to another device since.
        return None if next_record is None else next_record.pending

    def _own_view(self, record: PredictedJob, pending: PendingUnit, expected: UpcomingUnit) -> JobView | None:
        """View of the running job as of the end of its unit; None if the job does not go on."""
        if not record.goes_on:
            return None
        return self._scheduler.view_after(
            record.key,
            unit=unit_of(expected),
            seconds=pending.seconds,
            remaining_seconds=max(0.0, record.remaining_seconds - pending.seconds),
            shard_device=record.places.get(expected.shard),
        )

    def _notice_pace(self, alike: str) -> None:
        """Note a changed step time: the views of all jobs with the same plan depend on the measured time."""
        step_seconds = self._scheduler.step_seconds(alike)
        if step_seconds != self._paces.get(alike):
            self._paces[alike] = step_seconds
            self._concerned.update(self._scheduler.jobs_alike(alike))

    def _catch_up(self) -> None:
        """Update the selections with everything since the last question."""
        ahead = self._ahead
        for job in self._concerned:
            ahead.notice(job)
        # A job that has begun a unit, on whichever device, needs its buffer for the unit no more.
        for job in self._begun:
            ahead.unclaim(job)
        self._concerned.clear()
        self._begun.clear()
        ahead.notice_front()

    def _forget(self, job: str) -> None:
        self._ahead.notice(job)
        self._ahead.unclaim(job)
        self._concerned.discard(job)
        self._begun.discard(job)
