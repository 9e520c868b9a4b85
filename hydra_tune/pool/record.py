"""What the pool knows of a job that is not over: its trial, how it ends, and what it leaves."""

import contextlib
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from hydra_tune.memory.tenant import Tenant
from hydra_tune.observe.eventlog import EventLog
from hydra_tune.pool.checkpoints import TrialKeeper
from hydra_tune.pool.job import OVER, Job, Progress, Result
from hydra_tune.schedule import Unit
from hydra_tune.train.burst import BURST
from hydra_tune.train.capture import Beginning
from hydra_tune.train.drawing import GivenUp
from hydra_tune.train.spread import LaneUnit, Spread
from hydra_tune.train.step import PendingUnit
from hydra_tune.train.trial import Report, Trial

_MOST_REPORTS = 64  # that are handed out of a job under way


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """What a job does after a unit.

    Attributes:
        step: its next unit, a report that waits for an answer, or None at its end; None also where there is `beside`.
        beside: units that are due and may run side by side; None where units come one after the other.
    """

    step: PendingUnit | Report | None = None
    beside: tuple[Unit, ...] | None = None

    @property
    def is_end(self) -> bool:
        """Whether the job is complete."""
        return self.step is None and self.beside is None

    @property
    def units(self) -> tuple[Unit, ...]:
        """All that is due."""
        if self.beside is not None:
            return self.beside
        return (unit_of(self.step),) if isinstance(self.step, PendingUnit) else ()


def unit_of(pending: PendingUnit) -> Unit:
    """A unit as the scheduler sees it."""
    return Unit(kind=pending.kind, shard=pending.shard, seconds=pending.seconds, may_end_early=pending.kind == BURST)


def no_beginning() -> Beginning | None:
    """A trial that begins anew."""
    return None


@dataclass(slots=True)
class Told:
    """A report that a job's driver has been told of.

    Attributes:
        step: of the report; -1: there was none.
        is_answered: whether the driver has answered.
        is_repeated: whether the job waits there once more, having begun again meanwhile.
    """

    step: int = -1
    is_answered: bool = True
    is_repeated: bool = False

    def takes(self, report: Report) -> bool:
        """Whether a job is to wait at a report; not at one that was answered before it began again."""
        self.is_repeated = report.step == self.step
        return report.step > self.step or (self.is_repeated and not self.is_answered)

    def tell(self, report: Report) -> bool:
        """A job waits at a report; whether the driver is to be told."""
        if self.is_repeated:
            return False
        self.step, self.is_answered = report.step, False
        return True


class Record:
    """A job in the pool.

    Args:
        job: its public side.
        on_failure: told by others that bytes of the job could not be kept.
        log: is told of reports; None: nobody is.
        keeper: saves it; None: nobody does.
        begin: gives what its trial goes on from, if anything; called when it is prepared.
        max_retries: how often it may begin again after faults that are not its own.
        faults: those that it has had.
        repeats: the last report that the driver has been told of, for a job that begins again; None: none.
        make_trial: makes its trial, of what `Trial` takes.

    Attributes:
        tenant: the job, for the host's memory.
        trial: once it is being prepared; touched by one thread at a time.
        pending: the unit to run next, where it is the only one.
        spread: batches that run side by side, while they do.
        beside: the units of these that are due, by rank.
        outcome: how the job ends; set once, under the pool's lock.
        error: why it failed.
        host_bytes: host memory it has been given, or host memory and disk together.
        lent_bytes: as much of it as is for batches side by side.
        is_released: whether the scheduler has forgotten it.
        told_of: the last report that the driver has been told of.
        priority: as the scheduler has it.
        wanted_end: how somebody has wanted it to end after it had failed.
        places: device of each shard that is on one.
        loader_error: what it fails with if its loader is interrupted.
        told: the places the scheduler knows of.
        begins_again: whether it is over only to be begun again.
        is_detached: whether its thread waits for the trial's loader, and the device has another worker meanwhile.
        is_abandoned: whether nobody waits for that thread any more.
        has_to_end_burst: whether the scheduler wants the burst under way to end after its present step.
        turn: held by whoever has the trial go on, or saves it while it waits for an answer to a report.
        telling: held from the end of a unit that ran beside others until the scheduler knows that its device is idle: else a
            unit that comes to be due meanwhile, and belongs there, would go to another one.
    """

    def __init__(
        self,
        job: Job,
        on_failure: Callable[[BaseException], None],
        log: EventLog | None = None,
        *,
        keeper: TrialKeeper | None = None,
        begin: Callable[[], Beginning | None] = no_beginning,
        max_retries: int = 0,
        faults: tuple[str, ...] = (),
        repeats: "Told | None" = None,
        make_trial: Callable[..., Trial] = Trial,
    ) -> None:
        self.job = job
        self.keeper = keeper
        self.begin = begin
        self.max_retries = max_retries
        self.faults = faults
        self.told_of = repeats or Told()
        self.priority = 0
        self.wanted_end: str | None = None
        self.make_trial = make_trial
        self.turn = threading.RLock()
        self.telling = threading.Lock()
        self._log = log
        self.tenant = Tenant(on_failure)
        self.trial: Trial | None = None
        self.pending: PendingUnit | None = None
        self.spread: Spread | None = None
        self.beside: dict[int, PendingUnit] = {}
        self.outcome: str | None = None
        self.error: BaseException | None = None
        self.host_bytes = 0
        self.lent_bytes = 0
        self.is_released = False
        self.begins_again = False
        self.is_detached = False
        self.is_abandoned = False
        self.has_to_end_burst = False
        self.loader_error: BaseException | None = None
        self.places: dict[int, str | None] = {}
        self.told: dict[int, str | None] = {}

    @property
    def key(self) -> str:
        """What the scheduler calls the job."""
        return self.job.key

    @property
    def goes_on(self) -> bool:
        """Whether it will want a further unit, as far as is known."""
        return self.outcome is None and not self.job.paused and self.trial is not None

    @property
    def steps_run(self) -> int:
        """Units that its trial has counted so far; those of a burst are its steps."""
        return 0 if self.trial is None else self.trial.units_run

    def is_asked_to_end(self) -> bool:
        """Whether a burst of its steps is to end: asked after each step, without a lock."""
        return self.has_to_end_burst or self.outcome is not None or self.job.paused

    @property
    def is_spread(self) -> bool:
        """Whether units of it run side by side now."""
        return self.spread is not None

    @property
    def remaining_seconds(self) -> float:
        """Seconds of compute to come; 0 before it is being prepared."""
        return 0.0 if self.trial is None else self.trial.remaining_seconds

    def take(self, unit: Unit) -> PendingUnit:
        """A unit that is due, to run it now."""
        if self.spread is not None:
            return self.beside.pop(unit.rank)
        assert self.pending is not None
        pending, self.pending = self.pending, None
        return pending

    def put_back(self, unit: Unit, pending: PendingUnit) -> None:
        """A unit that was taken has not begun, and is due again."""
        if self.spread is not None:
            self.beside[unit.rank] = pending
        else:
            self.pending = pending

    def go_on(self, unit: Unit, device: str, *, report_is_free: bool) -> "Following":
        """What follows a unit that has run on a device; for units that run side by side, what has not been due before."""
        if self.spread is not None:
            found, is_over = self.spread.finished(unit.rank, device)
            if not is_over:
                return self._offer(found)
            self.spread = None
        following = self.advance(report_is_free=report_is_free)
        if not isinstance(following, Spread):
            return Following(step=following)
        self.spread = following
        return self._offer(following.start())

    def _offer(self, found: list[LaneUnit]) -> "Following":
        """Let units be due."""
        self.beside.update({one.rank: one.pending for one in found})
        units = [
            Unit(
                kind=one.pending.kind,
                shard=one.pending.shard,
                seconds=one.pending.seconds,
                rank=one.rank,
                near=one.near,
            )
            for one in found
        ]
        return Following(beside=tuple(units))

    def advance(self, *, report_is_free: bool) -> PendingUnit | Spread | Report | None:
        """The job's next unit, or batches side by side, a report that waits for an answer, or None at its end."""
        try:
            return self._advance(report_is_free=report_is_free)
        except GivenUp as error:
            if self.loader_error is None:
                raise
            raise self.loader_error from error

    def _advance(self, *, report_is_free: bool) -> PendingUnit | Spread | Report | None:
        assert self.trial is not None
        with self.turn:
            following = self.trial.advance()
            while isinstance(following, Report):
                if self._log is not None:
                    step, metrics = following.step, following.metrics
                    self._log.job(self.key, "report", step=step, metrics=metrics, waits=not report_is_free)
                if not report_is_free and self.told_of.takes(following):
                    break
                following = self.trial.advance()
        if isinstance(following, PendingUnit):
            self.pending = following
        return following

    def leave(self, device: str) -> None:
        """A device has gone, and the scheduler has forgotten what was there."""
        for known in (self.places, self.told):
            for shard in [shard for shard, place in known.items() if place == device]:
                known[shard] = None

    def news(self) -> tuple[int, str | None] | None:
        """Shard and place of the next unit, if the scheduler has not been told; it asks about no other shard."""
        if self.pending is None or self.is_released or self.job.state not in ("running", "waiting"):
            return None
        shard = self.pending.shard
        place = self.places.get(shard)
        if self.told.get(shard) == place:
            return None
        self.told[shard] = place
        return shard, place

    def fails_with(self, error: BaseException) -> None:
        """Its loader is about to be interrupted, which is what it fails with then."""
        self.loader_error = error

    def fail(self, error: BaseException) -> None:
        """The job's own code, or a unit of it, has raised."""
        if isinstance(error, GivenUp) and self.loader_error is not None:
            error = self.loader_error
        forget_locals(error)
        if self.outcome in (None, "completed"):
            self.outcome, self.error = "failed", error

    def finish(self, begins_again: "Callable[[Record, Result], bool] | None" = None) -> Result:
        """Give the job's memory back and say what it left; a completed job's weights come to the host.

        Args:
            begins_again: whether it goes on after all, with what it has saved; None: it does not.
        """
        # A thread that hangs in the trial's loader has the turn, and is waited for no longer.
        with contextlib.nullcontext() if self.is_abandoned else self.turn:
            try:
                result = self._finish()
                self.begins_again = begins_again is not None and begins_again(self, result)
            finally:
                if self.keeper is not None and not self.begins_again:
                    self.keeper.close(self.outcome or "failed")
        if self.keeper is not None and self.keeper.has_any:
            result.checkpoint = self.keeper.path
        return result

    def _finish(self) -> Result:
        assert self.outcome is not None
        trial, self.trial, self.pending = self.trial, None, None
        self.spread, self.beside = None, {}
        result = Result(status=self.outcome, error=self.error, faults=self.faults)
        if trial is None:
            return result
        planned = trial.units_planned
        result.metrics, result.history = trial.metrics, trial.history
        result.num_shards, result.units_run = trial.num_shards, trial.units_run
        result.activations = trial.activations
        result.compute_seconds = trial.compute_seconds
        result.optimizer_placement = trial.optimizer_placement
        result.split_batches = trial.split_batches
        if result.status in ("pruned", "cancelled") and planned is not None:
            result.units_saved = max(0, planned - trial.units_run)
        module, optimizer = trial.module, trial.optimizer
        try:
            trial.close(keep=result.status == "completed")
        except Exception as error:  # noqa: BLE001 - the user's data iterator may fail when it is closed
            forget_locals(error)
            result.status, result.error = "failed", error
        finally:
            trial.clock.released()
        if result.status == "completed":
            result.keep(module, optimizer)
        return result

    def progress(self) -> Progress:
        """How far the job is."""
        trial = self.trial
        if trial is None:
            return progress_without_trial(self.job)
        return progress_of(self.job, trial)


def progress_of(job: Job, trial: Trial) -> Progress:
    """Of a job whose trial is under way."""
    counts = trial.progress
    return Progress(
        epoch=counts.epoch,
        epochs=job.task.epochs,
        step=counts.steps,
        num_steps=counts.num_steps,
        remaining_seconds=trial.remaining_seconds if trial.num_shards else None,
        num_shards=trial.num_shards,
        units_run=trial.units_run,
        metrics=dict(trial.metrics),
        history=tuple(trial.history[-_MOST_REPORTS:]),
        compute_seconds=trial.compute_seconds,
    )


def progress_without_trial(job: Job) -> Progress:
    """Of a job that has not begun, or is over."""
    result = job.result() if job.state in OVER else None
    return Progress(
        epoch=job.task.epochs - 1 if job.state == "completed" else 0,
        epochs=job.task.epochs,
        step=0,
        num_steps=None,
        remaining_seconds=0.0 if result else None,
        num_shards=result.num_shards if result else 0,
        units_run=result.units_run if result else 0,
        metrics=result.metrics if result else {},
        history=tuple(result.history[-_MOST_REPORTS:]) if result else (),
        compute_seconds=result.compute_seconds if result else 0.0,
        group_size=result.group_size if result else 1,
    )


def forget_locals(error: BaseException | None) -> None:
    """Let go of what the frames of a traceback hold: a failed unit's tensors would live as long as its error.

    A frame keeps its function even so, and a closure the variables around it, which others may still look up (the unit may run
    once more). So whatever runs a unit is a method, or a `partial` of one, and never a function that has closed over its trial.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
