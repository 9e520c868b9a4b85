"""The pool's private record of a job until the job is over: trial, due units, outcome and result.

`Pool.submit` (`pool/pool.py`) makes a `JobState` as the counterpart of the public `Job`, and `JobDispatcher`
(`dispatcher.py`) makes another, with another key, for a job that begins again. The scheduler refers to the job by
`JobState.key`. The preparer (`preparer.py`) sets the trial. A device's worker (`worker.py`) takes a due unit from the
record, runs the unit, and asks `JobState.go_on` for the next step. When the job ends, the dispatcher, or after a
breakdown `Pool.shutdown`, calls `JobState.finish`, which frees the trial's memory and returns a `Result`. `FusedJob`
(`pool/fusion/fused_job.py`) and `IsolatedPoolClient` (`isolation/parent.py`) keep a `ReportCursor` of their own. The
module must not choose units, or know how groups form.

Note: locks. `outcome`, `pending` and the other facts for the scheduler change under the pool's lock or on the only
thread that advances the trial. A thread that advances or saves the trial holds `turn`; a thread with the pool's lock
must not wait for `turn`, whose holder may be in users' code.
"""

import contextlib
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from hydra_tune.memory.shared.shared_file import SharedFile
from hydra_tune.memory.trial_context import TrialMemoryContext
from hydra_tune.observe.event_log.writer import EventLog
from hydra_tune.pool.checkpointing.writer import TrialCheckpointer
from hydra_tune.pool.devices.next_units import unit_of
from hydra_tune.pool.job import OVER, Job, JobProgress, Result
from hydra_tune.schedule import Unit
from hydra_tune.train.checkpoint.trial_checkpoint import StartCheckpoint
from hydra_tune.train.data.loader_clock import LoaderInterrupt
from hydra_tune.train.loop.batch_units import PendingUnit
from hydra_tune.train.parallel.parallel_step import ParallelStep, ParallelUnit
from hydra_tune.train.single_trial import SingleTrial
from hydra_tune.train.trial import PendingReport, Trial

_MOST_REPORTS = 64  # in `JobProgress.history`, the last ones


@dataclass(frozen=True, slots=True, kw_only=True)
class NextAction:
    """The next step of a job after a unit.

    Attributes:
        step: the next unit, a report waiting for an answer, or None at the job's end; also None where `beside` is
            given.
        beside: due units, free to run side by side; None where the job's units run in sequence.
    """

    step: PendingUnit | PendingReport | None = None
    beside: tuple[Unit, ...] | None = None

    @property
    def is_end(self) -> bool:
        """Whether the job is complete."""
        return self.step is None and self.beside is None

    @property
    def units(self) -> tuple[Unit, ...]:
        """All due units."""
        if self.beside is not None:
            return self.beside
        return (unit_of(self.step),) if isinstance(self.step, PendingUnit) else ()


def no_beginning() -> StartCheckpoint | None:
    """Return no saved state: the trial starts from scratch."""
    return None


@dataclass(slots=True)
class ReportCursor:
    """The last report announced to a job's driver.

    Attributes:
        step: step of the report; -1 before the first report.
        is_answered: whether the driver has answered the report.
        is_repeated: whether the job, after a restart, has come to the same report again.
    """

    step: int = -1
    is_answered: bool = True
    is_repeated: bool = False

    def takes(self, report: PendingReport) -> bool:
        """Decide whether the job waits at a report; a restarted job skips reports answered before the restart."""
        self.is_repeated = report.step == self.step
        return report.step > self.step or (self.is_repeated and not self.is_answered)

    def tell(self, report: PendingReport) -> bool:
        """Note that the job waits at a report, and return whether to announce the report to the driver."""
        if self.is_repeated:
            return False
        self.step, self.is_answered = report.step, False
        return True


class JobState:
    """A job in the pool.

    Args:
        on_failure: called by other jobs' units when bytes of the job could not be kept.
        log: receives the job's reports; None: no log.
        keeper: saves the job; None: the job is not saved.
        begin: returns the saved state to continue from, if any; called when the job is prepared.
        max_retries: how often the job may begin again after faults of the system.
        repeats: for a job that begins again, the last report announced to the driver; None: no report yet.
        make_trial: factory of the job's trial, called with the arguments of `Trial`.
        is_carrier: whether the job is a carrier of fused jobs.

    Attributes:
        tenant: the job's identity in the accounting of host memory.
        trial: the trial, from preparation on; one thread at a time advances the trial, and others only read its figures.
        pending: the next unit, where exactly one unit is due.
        spread: batches running side by side, while there are any.
        beside: due units of `spread`, by rank.
        outcome: how the job ends; set under the pool's lock, and kept, except that an error replaces "completed", and the
            shutdown after a breakdown sets "cancelled".
        host_bytes: host memory granted to the job in bytes, or host memory and disk together.
        lent_bytes: the part of `host_bytes` granted for batches side by side.
        shared: files whose host memory the job shares with others, with their bytes; not part of `host_bytes`.
        is_released: whether the scheduler has given the job's `Release`, and so has forgotten the job.
        told_of: the last report announced to the driver.
        priority: the job's priority in the scheduler.
        staggered: whether the scheduler took the job as staggered.
        wanted_end: the end requested by a driver after the job had failed.
        places: for each shard, the device holding the shard, or None.
        loader_error: the error of the job if the job's data loader is interrupted.
        told: for each shard, the place last sent to the scheduler.
        begins_again: whether the job ends only to begin again.
        is_detached: whether the job's thread waits for the trial's loader while another worker serves the device.
        detached_ns: time of the last such wait's beginning, by the clock of `time.perf_counter_ns`.
        is_abandoned: whether the pool has given up waiting for the thread that draws for the job.
        has_to_end_burst: whether the running burst has to end after the present step, for another job or a leaving device.
        turn: lock of the thread that advances, saves or ends the trial.
        telling: lock held from the end of a unit that ran beside others until the scheduler knows that the device is
            idle. Without the lock, a unit that becomes due in between and belongs on the device would go to another
            device.
    """

    def __init__(
        self,
        job: Job,
        on_failure: Callable[[BaseException], None],
        log: EventLog | None = None,
        *,
        keeper: TrialCheckpointer | None = None,
        begin: Callable[[], StartCheckpoint | None] = no_beginning,
        max_retries: int = 0,
        faults: tuple[str, ...] = (),
        repeats: "ReportCursor | None" = None,
        make_trial: Callable[..., Trial] = SingleTrial,
        is_carrier: bool = False,
    ) -> None:
        self.job = job
        self.is_carrier = is_carrier
        self.keeper = keeper
        self.begin = begin
        self.max_retries = max_retries
        self.faults = faults
        self.told_of = repeats or ReportCursor()
        self.priority = 0
        self.staggered = False
        self.wanted_end: str | None = None
        self.make_trial = make_trial
        self.turn = threading.RLock()
        self.telling = threading.Lock()
        self._log = log
        self.tenant = TrialMemoryContext(on_failure, job.name)
        self.trial: Trial | None = None
        self.pending: PendingUnit | None = None
        self.spread: ParallelStep | None = None
        self.beside: dict[int, PendingUnit] = {}
        self.outcome: str | None = None
        self.error: BaseException | None = None
        self.host_bytes = 0
        self.lent_bytes = 0
        self.shared: Mapping[SharedFile, int] = {}
        self.lost_before: frozenset[str] = frozenset()  # devices lost, and their blocks given up, before the last unit
        self.is_released = False
        self.begins_again = False
        self.is_detached = False
        self.detached_ns = 0
        self.is_abandoned = False
        self.has_to_end_burst = False
        self.loader_error: BaseException | None = None
        self.places: dict[int, str | None] = {}
        self.told: dict[int, str | None] = {}

    @property
    def key(self) -> str:
        """The job's name in the scheduler."""
        return self.job.key

    @property
    def goes_on(self) -> bool:
        """Whether the job will want a further unit, as far as is known."""
        return self.outcome is None and not self.job.paused and self.trial is not None

    @property
    def steps_run(self) -> int:
        """Units counted by the trial so far; a burst counts as many units as the burst has steps."""
        return 0 if self.trial is None else self.trial.units_run

    def units_in(self, unit: PendingUnit) -> int:
        """As of the trial."""
        return 1 if self.trial is None else self.trial.units_in(unit)

    def is_asked_to_end(self) -> bool:
        """Return whether the running burst has to end; called after each step, without a lock."""
        return self.has_to_end_burst or self.outcome is not None or self.job.paused

    @property
    def is_spread(self) -> bool:
        """Whether units of the job run side by side now."""
        return self.spread is not None

    @property
    def remaining_seconds(self) -> float:
        """Compute still to come in seconds; 0 without a trial."""
        return 0.0 if self.trial is None else self.trial.remaining_seconds

    def take(self, unit: Unit) -> PendingUnit:
        """Take a due unit, to run the unit now."""
        if self.spread is not None:
            return self.beside.pop(unit.rank)
        assert self.pending is not None
        pending, self.pending = self.pending, None
        return pending

    def put_back(self, unit: Unit, pending: PendingUnit) -> None:
        """Make a taken unit due again, because the unit never began."""
        if self.spread is not None:
            self.beside[unit.rank] = pending
        else:
            self.pending = pending

    def go_on(self, unit: Unit, device: str, *, report_is_free: bool) -> "NextAction":
        """Return the next step after a unit that ran on a device.

        For units side by side, the result holds only the units that become due now.
        """
        if self.spread is not None:
            due_units, is_over = self.spread.finished(unit.rank, device)
            if not is_over:
                return self._offer(due_units)
            self.spread = None
        following = self.advance(report_is_free=report_is_free)
        if not isinstance(following, ParallelStep):
            return NextAction(step=following)
        self.spread = following
        return self._offer(following.start())

    def _offer(self, found: list[ParallelUnit]) -> "NextAction":
        """Enter lane units as due."""
        self.beside.update({lane_unit.rank: lane_unit.pending for lane_unit in found})
        units = (replace(unit_of(each.pending), rank=each.rank, near=each.near) for each in found)
        return NextAction(beside=tuple(units))

    def advance(self, *, report_is_free: bool) -> PendingUnit | ParallelStep | PendingReport | None:
        """Advance the trial to the next unit, spread, or unanswered report; return None at the job's end."""
        try:
            return self._advance(report_is_free=report_is_free)
        except LoaderInterrupt as error:
            if self.loader_error is None:
                raise
            # The watchdog has set the error that says which loader hung, and for how long.
            raise self.loader_error from error

    def _advance(self, *, report_is_free: bool) -> PendingUnit | ParallelStep | PendingReport | None:
        assert self.trial is not None
        with self.turn:
            following = self.trial.advance()
            while isinstance(following, PendingReport) and self._passes(following, is_free=report_is_free):
                following = self.trial.advance()
        if isinstance(following, PendingUnit):
            self.pending = following
        return following

    def passes(self, report: PendingReport) -> bool:
        """Log a report within a burst; return whether the report needs no answer, so that the burst may continue."""
        # A report that may have to wait is logged once the burst has ended.
        return self.job.reports_freely and self._passes(report, is_free=True)

    def _passes(self, report: PendingReport, *, is_free: bool) -> bool:
        """Log a report; return whether it needs no answer, or was answered before a restart."""
        passes = is_free or not self.told_of.takes(report)
        if self._log is not None:
            self._log.job(self.key, "report", step=report.step, metrics=report.metrics, waits=not passes)
        return passes

    def leave(self, device: str) -> None:
        """Forget the job's places on a device that has gone; the scheduler has forgotten the places too."""
        for table in (self.places, self.told):
            for shard in [shard for shard, place in table.items() if place == device]:
                table[shard] = None

    def news(self) -> tuple[int, str | None] | None:
        """Return shard and place of the next unit if unknown to the scheduler.

        The scheduler asks about no other shard.
        """
        if self.pending is None or self.is_released or self.job.state not in ("running", "waiting"):
            return None
        shard = self.pending.shard
        place = self.places.get(shard)
        if self.told.get(shard) == place:
            return None
        self.told[shard] = place
        return shard, place

    def fails_with(self, error: BaseException) -> None:
        """Set the error for the coming interruption of the job's loader."""
        self.loader_error = error

    def fail(self, error: BaseException) -> None:
        """Let the job fail with an error of a unit or of the job's own code."""
        if isinstance(error, LoaderInterrupt) and self.loader_error is not None:
            error = self.loader_error
        forget_locals(error)
        # A job that was pruned or cancelled keeps its outcome, whatever its last unit raises.
        if self.outcome in (None, "completed"):
            self.outcome, self.error = "failed", error

    def finish(self, begins_again: "Callable[[JobState, Result], bool] | None" = None) -> Result:
        """Give the job's memory back and return the result; a completed job's weights move to the host.

        Args:
            begins_again: decides whether the job continues from the last saved state; None: the job ends.
        """
        # An abandoned thread hangs in the trial's loader and holds the turn, possibly for ever: taking the turn here
        # would hang, too.
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
        planned_units = trial.units_planned
        result.metrics, result.history = trial.metrics, trial.history
        result.num_shards, result.units_run = trial.num_shards, trial.units_run
        result.one_shard_bytes = trial.one_shard_bytes
        result.activations = trial.activations
        result.compute_seconds = trial.compute_seconds
        result.optimizer_placement = trial.optimizer_placement
        result.split_batches = trial.split_batches
        if result.status in ("pruned", "cancelled") and planned_units is not None:
            result.units_saved = max(0, planned_units - trial.units_run)
        # Taken before `close`, which drops the trial's references to both.
        module, optimizer = trial.module, trial.optimizer
        try:
            trial.close(keep=result.status == "completed")
        except Exception as error:  # noqa: BLE001 - the user's data iterator may fail when it is closed
            forget_locals(error)
            result.status, result.error = "failed", error
        finally:
            # A thread abandoned in the loader waits for this call before it ends (`DrawClock`).
            trial.clock.released()
        if result.status == "completed":
            result.keep(module, optimizer)
        return result

    def progress(self) -> JobProgress:
        """Progress of the job."""
        trial = self.trial
        if trial is None:
            return progress_without_trial(self.job)
        return progress_of(self.job, trial)


def granted_bytes(records: Iterable[JobState]) -> int:
    """Host memory granted to jobs in bytes; a file shared by several jobs counts once. Under the pool's lock."""
    total, shared = 0, dict[SharedFile, int]()
    for record in records:
        total += record.host_bytes
        shared |= record.shared
    return total + sum(shared.values())


def progress_of(job: Job, trial: Trial) -> JobProgress:
    """Return the progress of a job with a live trial."""
    counts = trial.progress
    return JobProgress(
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


def progress_without_trial(job: Job) -> JobProgress:
    """Return the progress of a job that has not begun or is over."""
    result = job.result() if job.state in OVER else None
    return JobProgress(
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
    """Clear the frames of an error's traceback; otherwise a failed unit's tensors would live as long as the error.

    A cleared frame still keeps the frame's function, and a closure keeps the variables of the enclosing scope, because
    others may still look the variables up (the unit may run once more). Code that runs a unit is therefore a method or
    a `partial` of a method, never a function closing over a trial.
    """
    errors, seen = [error], set[int]()
    while errors:
        error = errors.pop()
        # An error may be its own cause (`raise error from error`).
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        # The frames that `explained` cuts off live as long as the frame that they have called.
        frame = None if error.__traceback__ is None else error.__traceback__.tb_frame.f_back
        while frame is not None:
            with contextlib.suppress(RuntimeError):  # a frame that is running still
                frame.clear()
            frame = frame.f_back
        # Chained errors hold frames, too.
        errors += [error.__cause__, error.__context__]
