"""The loop between a study and a pool: ask, build, submit; report, prune or proceed; tell.

`PoolStudy.optimize` (`pool_study.py`) makes and runs an `OptimizeDriver` in each call; `sweep.py` takes `job_name` from
here. One thread, the caller's, touches study, sampler, pruner and callbacks. The driver does around a task the same as
Optuna's own `Study.optimize` around an objective, in the same words and order.

Note: each trial is in `_untold` from the ask, before the objective runs, until the tell, so that an early end finds the trial.
Interrupts are held all the while, and come through in the windows of `let_interrupts_through`, or at the third
(`hydra_tune/interrupts.py`).
"""

import copy
import gc
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from optuna.exceptions import TrialPruned
from optuna.logging import get_logger
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from hydra_tune import Failed, Finished, HydraExecutor, Job, Reported, Result, TrainTask
from hydra_tune.errors import HydraTuneError, TaskError
from hydra_tune.interrupts import hold_interrupts, is_interrupt, let_interrupts_through
from hydra_tune.train.default_dtype import own_default_dtype
from hydra_tune_optuna import optuna_internals
from hydra_tune_optuna.errors import TrialCancelledError
from hydra_tune_optuna.search.checkpoint_gc import StudyCheckpointCollector
from hydra_tune_optuna.search.heartbeat import StudyHeartbeatSender
from hydra_tune_optuna.search.pruner_checks import AdmissionChoice, num_completed
from hydra_tune_optuna.search.resume_study import ResumableTrial, StudyResumer
from hydra_tune_optuna.search.shutdown import give_up, leave
from hydra_tune_optuna.search.values import (
    Values,
    check_result_choice,
    in_words,
    looks_like_a_value,
    reported_values,
    trial_value,
    wrong_arity,
)
from hydra_tune_optuna.weights import StudyWeights

Objective = Callable[[Trial], TrainTask | float | Sequence[float]]
Callback = Callable[[Study, FrozenTrial], None]

_logger = get_logger("optuna.hydra_tune")  # shown and configured like Optuna's own lines

_POLL_SECONDS = 0.1
"""Longest single wait of the driver for an event; between two waits, Ctrl-C gets through on every platform."""

_RECOUNT_SECONDS = 1.0
"""While trials wait for completed trials, how often those of other processes are counted."""

_ENDED = frozenset({"completed", "pruned", "cancelled", "failed"})
_NOT_BEGUN = frozenset({"queued", "preparing"})


def job_name(number: int) -> str:
    """Name of a trial's job."""
    # Also the name in the supervisor's marks, by which a sweep finds the trial that crashed its process.
    return f"trial {number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizeLimits:
    """Limits of one call of `optimize`.

    Args:
        n_trials: new trials of this call; None for no limit.
        timeout_seconds: seconds from the start of the search, after which no trial starts; None for no limit.
        width: most trials in flight, at least 1.
        catch: errors that fail only their own trial.
        useless_pruner: reason why the pruner can end no trial, if so; logged when a trial could have been ended.
        useless_if_fused: likewise, once trials turn out to be fused.
    """

    n_trials: int | None
    timeout_seconds: float | None
    width: int
    catch: tuple[type[Exception], ...]
    gc_after_trial: bool
    admission: AdmissionChoice
    useless_pruner: str | None = None
    useless_if_fused: str | None = None


@dataclass(slots=True, kw_only=True)
class _PooledTrial:
    """A trial whose task is in the pool.

    `failure` is an error raised in this thread on the trial's behalf, e.g. by the pruner. The job is then cancelled,
    and the trial is told when the job has ended, like every other. `known` are the steps already reported to the
    storage by an earlier search, which died or put the trial back after the last checkpoint.
    """

    trial: Trial
    task: TrainTask
    job: Job
    reports: list[Values] = field(default_factory=list)
    failure: Exception | None = None
    known: frozenset[int] = frozenset()


class OptimizeDriver:
    """One call of `PoolStudy.optimize`.

    Args:
        build: the objective.
        callbacks: called after each told trial that does not end the search.
        weights: keeps the weights of the best completed trials; None: no weights are kept.
        settled: called once an interrupted search has stored the fate of its trials, or need not: the process may end
            at any moment afterwards.
    """

    def __init__(
        self,
        study: Study,
        pool: HydraExecutor,
        build: Objective,
        limits: OptimizeLimits,
        *,
        callbacks: Iterable[Callback] | None,
        progress_bar: optuna_internals.ProgressBar,
        weights: StudyWeights | None = None,
        settled: Callable[[], None] = lambda: None,
    ) -> None:
        self._study = study
        self._pool = pool
        self._build = build
        self._limits = limits
        self._callbacks = callbacks
        self._progress_bar = progress_bar
        self._weights = weights
        self._settled = settled
        self._heartbeat = StudyHeartbeatSender(optuna_internals.storage_of(study))
        # Of this search alone: a pool may serve several searches at once.
        self._stream = pool.events()
        self._started_seconds = time.monotonic()
        self._asked = 0
        self._untold: dict[int, Trial] = {}
        self._running: dict[int, _PooledTrial] = {}
        self._held: dict[int, Reported] = {}  # reports that wait until the pruner has enough completed trials
        self._num_completed = 0 if limits.admission.rule is None else num_completed(study)
        self._counted_seconds = self._started_seconds  # when the completed trials were last counted
        self._has_told_order = limits.width == 1  # one trial at a time leaves no choice
        self._error: Exception | None = None
        self._has_hinted = False
        self._resuming = StudyResumer(study, pool)
        self._collecting = StudyCheckpointCollector(study, pool, build, weights, self._resuming)
        self._left: deque[ResumableTrial] = deque()  # trials of a dead process, to resume
        self._taken_up: set[int] = set()

    def run(self) -> None:
        """Search to the end.

        Raises:
            Exception: the first error of a trial that is not in `catch`, after all running trials have finished; or an
                error of a callback, the storage or the pool, after all running trials were cancelled.
            KeyboardInterrupt: Ctrl-C, after all running trials were saved for a later search or told as failed.
            Terminated: SIGTERM, likewise.
        """
        # Ctrl-C waits except in marked windows: between an ask and its note, a trial would seem to run forever.
        with hold_interrupts(), self._heartbeat:
            try:
                self._find_left()
                while self._step():
                    pass
                self._collecting.settle(waits=True)
            except BaseException as error:
                self._abandon(error)
                raise
            finally:
                # Trials that were neither told nor taken up still run in the storage, and need this search's sign to be
                # found.
                self._resuming.close(
                    leaves=bool(self._untold) or any(not resumable.is_told for resumable in self._left)
                )
        # As `Study.optimize` ends, so that this thread leaves no session open.
        optuna_internals.storage_of(self._study).remove_session()
        if self._error is not None:
            raise self._error

    def _find_left(self) -> None:
        self._left.extend(self._resuming.begin(self._collecting.is_wanted))
        for resumable in self._left:  # until their turn comes, other processes must not take these trials for dead
            if not resumable.is_told:
                self._heartbeat.add(optuna_internals.frozen_id(resumable.frozen))
        self._heartbeat.beat()

    def _step(self) -> bool:
        """Answer one event, or else start one trial; return False when neither can come any more.

        Events go first: the pool should not wait for a sampler, and the sampler should know every result. An event may
        hold a trained model, which must not outlive this call.
        """
        self._release_held()
        may_ask = self._may_ask()
        if not may_ask and not self._in_flight:
            return False
        with let_interrupts_through():
            pass  # an interrupt window here, not while waiting: an event once taken must be answered
        # Without a wait while a trial may be asked for: an event only goes first if it is there already.
        event = self._stream.get(timeout=0 if may_ask else _POLL_SECONDS)
        match event:
            case Reported():
                self._on_report(event)
            case Finished() | Failed():
                self._on_end(event)
            case None if may_ask:
                self._start_trial()
        return True

    @property
    def _in_flight(self) -> int:
        return len(self._untold) + len(self._collecting)

    def _may_ask(self) -> bool:
        limits = self._limits
        if self._error is not None or optuna_internals.stop_requested(self._study) or self._in_flight >= self._width:
            return False
        # Resumed trials do not count towards `n_trials`.
        if self._left and not self._is_late():
            return True
        if limits.n_trials is not None and self._asked >= limits.n_trials:
            return False
        if self._is_late():
            return False
        # With nothing in flight the sampler is asked even so: the sampler repeats a point and stops, as in plain
        # Optuna.
        return not self._untold or not optuna_internals.nothing_new_to_sample(self._study)

    @property
    def _width(self) -> int:
        """Most trials in flight at present."""
        limits, rule, first_wave = self._limits, self._limits.admission.rule, self._limits.admission.first_wave
        if rule is None or first_wave is None or not self._waits_for_pruner:
            return limits.width
        # Paused trials would hold up all others.
        num_paused = sum(running.job.paused for running in self._running.values())
        return min(limits.width, first_wave - (self._num_completed - rule.before) + num_paused)

    @property
    def _waits_for_pruner(self) -> bool:
        rule = self._limits.admission.rule
        return rule is not None and self._num_completed < rule.needed

    def _is_late(self) -> bool:
        limit = self._limits.timeout_seconds
        return limit is not None and self._elapsed_seconds() >= limit

    def _elapsed_seconds(self) -> float:
        return time.monotonic() - self._started_seconds

    def _start_trial(self) -> None:
        resumable = self._left.popleft() if self._left else None
        if resumable is not None and resumable.is_told:
            self._collecting.start(resumable, self._stream)
            return
        if resumable is None:
            # As Study.optimize does before each trial.
            # After a jump of the clock all heartbeats seem old, also those of living processes.
            if self._heartbeat.tells_who_lives:
                optuna_internals.fail_stale(self._study)
            trial = self._resuming.ask()
            self._asked += 1
        else:
            trial = optuna_internals.take_up(self._study, resumable.frozen)
            if resumable.checkpoint is None:
                _logger.info("Trial %d, which a process that died has left running, begins anew.", trial.number)
            else:
                self._taken_up.add(optuna_internals.trial_id(trial))
                steps = resumable.checkpoint.steps
                _logger.info("Trial %d goes on from its checkpoint after %d optimizer steps.", trial.number, steps)
        # Noted before the objective runs, so that an interrupt in the objective finds the trial.
        self._untold[optuna_internals.trial_id(trial)] = trial
        self._heartbeat.add(optuna_internals.trial_id(trial))
        try:
            with let_interrupts_through(), own_default_dtype():
                outcome = self._build(trial)
        except Exception as error:  # noqa: BLE001 - an objective may raise anything; `catch` decides
            self._conclude_error(trial, error)
            return
        if isinstance(outcome, TrainTask):
            self._submit(trial, outcome, resumable)
        elif self._conclude(trial, value=outcome) == TrialState.FAIL and not looks_like_a_value(outcome):
            _logger.warning(
                "Trial %d: with an executor, the objective returns a hydra_tune.TrainTask, or a number; this one "
                "returned %s.",
                trial.number,
                in_words(outcome),
            )

    def _submit(self, trial: Trial, task: TrainTask, left: ResumableTrial | None) -> None:
        unfit = wrong_arity(task, self._study.directions)
        if unfit is not None:  # known before training, so nothing is trained
            self._conclude(trial, state=TrialState.FAIL, reason=unfit)
            return
        try:
            check_result_choice(task)
        except TaskError as error:
            self._conclude_error(trial, error)
            return
        reports: list[Values] = []
        if left is not None:
            try:
                reports, prune = self._catch_up(trial, task, left)
            except Exception as error:  # noqa: BLE001 - a pruner may raise anything; `catch` decides
                self._conclude_error(trial, error)
                return
            if prune:
                self._conclude_error(trial, TrialPruned())
                return
        if not self._has_told_order and self._limits.admission.why is not None:
            _logger.info("%s.", self._limits.admission.why)
        self._has_told_order = True
        admission = self._limits.admission
        # An error of submit concerns the executor, e.g. a shutdown, and would hit every task: it ends the search,
        # whatever `catch` says.
        optuna_internals.end_draws(trial)
        options, known_steps = self._resuming.submit_options(trial, left)
        if admission.staggered_from is not None:
            options = {**options, "staggered": not admission.staggered_from or self._asked > admission.staggered_from}
        if admission.first_groups is not None and self._waits_for_pruner:
            options = {**options, "fusion_size": admission.first_groups}
        job = self._pool.submit(task, name=job_name(trial.number), events=self._stream, **options)
        # Events bear the job itself, whose id is unique as long as the entry keeps the job.
        self._running[id(job)] = _PooledTrial(trial=trial, task=task, job=job, reports=reports, known=known_steps)

    @staticmethod
    def _catch_up(trial: Trial, task: TrainTask, left: ResumableTrial) -> tuple[list[Values], bool]:
        """Report a resumed trial's history that the study lacks; return all values, and whether to prune."""
        known_steps = left.frozen.intermediate_values
        history = [] if left.checkpoint is None else left.checkpoint.history
        reports = [reported_values(task, entry) for entry in history]
        # The process may have died between the checkpoint and its report; Optuna warns of a step reported twice.
        for values, entry in zip(reports, history, strict=True):
            if len(values) == 1 and int(entry["step"]) not in known_steps:
                trial.report(values[0], int(entry["step"]))
        return reports, bool(reports) and len(reports[-1]) == 1 and trial.should_prune()

    def _on_report(self, event: Reported) -> None:
        if self._collecting.has(event.job):
            event.job.proceed()
            return
        running = self._running[id(event.job)]
        try:
            values = reported_values(running.task, event.metrics)
            running.reports.append(values)
            prune = len(values) == 1 and self._report(running, values[0], event.step)
        except Exception as error:  # noqa: BLE001 - a pruner may raise anything; `catch` decides
            # Told at the job's end, like every trial: the job may still run a unit.
            running.failure = error
            event.job.cancel()
            return
        if not self._has_hinted and len(running.reports) > 1:  # a trial with one report loses nothing
            self._hint(event.job)
        if prune:
            event.job.prune()
        elif self._is_held(running.trial, event):
            self._held[id(event.job)] = event
        else:
            event.job.proceed()

    def _is_held(self, trial: Trial, report: Reported) -> bool:
        """Whether a report waits, because the pruner needs more completed trials to judge the trial."""
        rule = self._limits.admission.rule
        if rule is None or not self._waits_for_pruner:
            return False
        begun = [
            other.trial.number
            for other in self._running.values()
            if other.job.state not in _NOT_BEGUN and not other.job.paused
        ]
        if not rule.holds(trial.number, report.step, begun, self._num_completed):
            return False
        progress = report.job.progress
        # A group waits for none of its members, and a trial that is through has nothing to save.
        return progress.group_size == 1 and (progress.num_steps is None or progress.step < progress.num_steps)

    def _release_held(self) -> None:
        """Answer the reports that need not wait any longer; the pruner judges now."""
        if not self._held:
            return
        if time.monotonic() - self._counted_seconds >= _RECOUNT_SECONDS:
            self._count_completed()
        for key, report in sorted(self._held.items(), key=lambda item: self._running[item[0]].trial.number):
            running = self._running[key]
            if self._is_held(running.trial, report):
                return  # the younger trials wait, too
            del self._held[key]
            try:
                prune = running.trial.should_prune()
            except Exception as error:  # noqa: BLE001 - a pruner may raise anything; `catch` decides
                running.failure = error
                report.job.cancel()
                continue
            if prune:
                report.job.prune()
            else:
                report.job.proceed()

    def _count_completed(self) -> None:
        """Count the study's completed trials, with those of other processes."""
        self._num_completed = num_completed(self._study)
        self._counted_seconds = time.monotonic()

    def _hint(self, job: Job) -> None:
        """Log once why the pruner can end no trial, if so."""
        hint = self._limits.useless_pruner
        if hint is None and self._limits.useless_if_fused is not None and job.progress.group_size > 1:
            hint = self._limits.useless_if_fused
        if hint is not None:
            _logger.warning(hint)
            self._has_hinted = True

    @staticmethod
    def _report(running: _PooledTrial, value: float, step: int) -> bool:
        trial = running.trial
        if step in running.known:  # the dead process reported this step, and got answers to all but the last
            return step == max(running.known) and trial.should_prune()
        trial.report(value, step)
        return trial.should_prune()

    def _on_end(self, event: Finished | Failed) -> None:
        if self._collecting.has(event.job):
            self._collecting.on_end(event)
            return
        running = self._running.pop(id(event.job))
        self._held.pop(id(event.job), None)
        # An error in this thread has cancelled the job, so the job's own end says less.
        error = running.failure or _error_of(event)
        if error is not None:
            self._conclude_error(running.trial, error)
            return
        try:
            value = trial_value(running.task, running.reports, self._study.directions)
        except HydraTuneError as metric_error:
            self._conclude_error(running.trial, metric_error)
        else:
            self._conclude(running.trial, value=value, trained=(running.task, event.result))

    def _conclude_error(self, trial: Trial, error: BaseException) -> None:
        """Tell the outcome that plain Optuna would, had the objective raised `error`."""
        if not isinstance(error, Exception):
            raise error
        state = TrialState.PRUNED if isinstance(error, TrialPruned) else TrialState.FAIL
        self._conclude(trial, state=state, error=error)

    def _conclude(
        self,
        trial: Trial,
        *,
        value: object = None,
        state: TrialState | None = None,
        error: Exception | None = None,
        reason: str | None = None,
        trained: tuple[TrainTask, Result] | None = None,
    ) -> TrialState:
        """Tell, log, keep weights and run callbacks; after an error not in `catch`, the search only drains."""
        final_state = self._tell(trial, value=value, state=state, error=error, reason=reason)
        # Before the callbacks, which may load the module of the best trial.
        if self._weights is not None and trained is not None:
            self._weights.completed(optuna_internals.stored(self._study, trial), *trained)
        if final_state in (TrialState.COMPLETE, TrialState.PRUNED):
            self._collecting.told(trial.number)
        if self._limits.admission.rule is not None:
            self._count_completed()
        if self._limits.gc_after_trial:
            gc.collect()
        if final_state == TrialState.FAIL and error is not None and not isinstance(error, self._limits.catch):
            # The first error counts; the trials still running are finished and told before it is raised.
            self._error = self._error or error
            return final_state
        if self._callbacks is not None:
            stored = optuna_internals.stored(self._study, trial)
            for callback in self._callbacks:
                frozen = copy.deepcopy(stored)  # a callback may change its argument
                with let_interrupts_through():
                    callback(self._study, frozen)
        self._progress_bar.update(self._elapsed_seconds(), self._study)
        return final_state

    def _tell(
        self, trial: Trial, *, value: object, state: TrialState | None, error: Exception | None, reason: str | None
    ) -> TrialState:
        try:
            final_state, values, unfit = optuna_internals.tell(self._study, trial, value=value, state=state)
        except Exception as refusal:  # a sampler may raise on what it is told; the trial has its state all the same
            stored = optuna_internals.stored(self._study, trial)
            if stored.state.is_finished():
                self._log(trial, stored.state, stored.values, value=value, error=error, reason=reason or repr(refusal))
            raise
        self._log(trial, final_state, values, value=value, error=error, reason=reason or unfit)
        # Only after the tell: an error in it leaves the trial among those that `_abandon` tells.
        del self._untold[optuna_internals.trial_id(trial)]
        self._heartbeat.discard(optuna_internals.trial_id(trial))
        return final_state

    def _log(
        self,
        trial: Trial,
        state: TrialState,
        values: Sequence[float] | None,
        *,
        value: object,
        error: Exception | None,
        reason: str | None,
    ) -> None:
        if state == TrialState.COMPLETE:
            optuna_internals.log_completed(self._study, trial, values or ())
        elif state == TrialState.PRUNED:
            optuna_internals.logger.info("Trial %d pruned. %s", trial.number, error)
        else:
            optuna_internals.log_failed(trial, repr(error) if error else str(reason), error=error, value=value)

    def _abandon(self, error: BaseException) -> None:
        """End running trials, record their fate in the storage, and wait until none of their units runs.

        The storage comes before the units: a second Ctrl-C during the wait must not leave trials that seem to run. The
        storage session is renewed first, because the error may have cut the old session off in the middle of a
        statement.
        """
        optuna_internals.storage_of(self._study).remove_session()
        jobs = [*(running.job for running in self._running.values()), *self._collecting.jobs]
        if is_interrupt(error) and self._resuming.saves:
            self._settled()  # running trials stay running in the storage, to be resumed
            self._leave()
        else:
            for job in jobs:
                job.cancel()
            if is_interrupt(error):
                self._tell_ended()
            self._keep_untold(give_up(self._study, self._untold.values(), error))
            self._settled()
        while any(job.state not in _ENDED for job in jobs):
            with let_interrupts_through():
                self._stream.get(timeout=_POLL_SECONDS)

    def _leave(self) -> None:
        """Save all running trials for a later search; trials that end meanwhile are told."""
        for job in self._collecting.jobs:
            job.cancel()  # their checkpoints stay
        try:
            self._pool.suspend([running.job for running in self._running.values()])
        finally:
            self._tell_ended()
            # After `_tell_ended`, which takes the trials that ended meanwhile out of `_running`.
            submitted = {optuna_internals.trial_id(running.trial) for running in self._running.values()}
            never_submitted = self._untold.keys() - submitted - self._taken_up
            still_running = leave(
                self._study,
                self._resuming,
                [self._untold[trial] for trial in sorted(submitted)],
                [self._untold[trial] for trial in sorted(never_submitted)],
            )
            # Resumed trials that were never submitted stay running: their checkpoints are still on disk.
            resumed_only = [self._untold[trial] for trial in sorted(self._untold.keys() & self._taken_up - submitted)]
            self._keep_untold([*still_running, *resumed_only])

    def _keep_untold(self, trials: Iterable[Trial]) -> None:
        """Limit the untold trials to those that the storage still lists as running."""
        self._untold = {optuna_internals.trial_id(trial): trial for trial in trials}

    def _tell_ended(self) -> None:
        """Tell the completed and pruned trials that ended before the search could take their events."""
        while (event := self._stream.get(timeout=0)) is not None:
            if isinstance(event, Finished) and event.result.status in ("completed", "pruned"):
                try:
                    self._on_end(event)
                except Exception:
                    # The other trials that have ended must be told all the same.
                    _logger.warning("%s has ended, and could not be told so.", event.job.name, exc_info=True)


def _error_of(event: Finished | Failed) -> BaseException | None:
    """Return the error that an objective would have raised in place of the job, or None for a normal return."""
    result = event.result
    if isinstance(event, Failed):
        return result.error or HydraTuneError(f"{event.job.name} failed and its pool gave no reason")
    if result.status == "pruned":
        return TrialPruned()
    if result.status == "cancelled":
        return TrialCancelledError(
            f"{event.job.name} was cancelled by job.cancel() or the executor's shutdown(), not by its study"
        )
    return None
