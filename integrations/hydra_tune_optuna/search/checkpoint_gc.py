"""Removes the checkpoints of completed and pruned trials, once the trial's weights are kept, lost or not among the best.

A process killed between the tell and the keeping leaves a complete trial with a checkpoint and no weights. The next
search resumes the checkpoint in the pool to recover the weights; a checkpoint of the trial's final state takes no
units. `OptimizeDriver` (`driver.py`) calls `told` after each completed or pruned trial, `start` for each trial with
weights to recover, `on_end` at the end of a recovery, and `settle` at the end of the search.

Note: a checkpoint must outlive the write of its trial's weights, on another thread. All calls come from the search's thread.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from optuna.study import Study
from optuna.trial import FrozenTrial

from hydra_tune import Failed, Finished, HydraExecutor, Job, TrainTask
from hydra_tune.interrupts import let_interrupts_through
from hydra_tune.pool.job import EventStream
from hydra_tune_optuna import optuna_internals
from hydra_tune_optuna.search.resume_study import ResumableTrial, StudyResumer
from hydra_tune_optuna.weights import StudyWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class _WeightsRecovery:
    """A trial whose weights are being recovered."""

    frozen: FrozenTrial
    task: TrainTask
    job: Job


class StudyCheckpointCollector:
    """Told trials of a search, until nothing of these trials is needed any more.

    Args:
        build: the objective, called with ended trials, too.
        weights: keeper of the best weights; None: no weights are kept.
        resuming: removes checkpoints.
    """

    def __init__(
        self,
        study: Study,
        pool: HydraExecutor,
        build: Callable[[Any], Any],
        weights: StudyWeights | None,
        resuming: StudyResumer,
    ) -> None:
        self._study = study
        self._pool = pool
        self._build = build
        self._weights = weights
        self._resuming = resuming
        self._running: dict[int, _WeightsRecovery] = {}
        # Numbers whose checkpoints wait for the write of their weights.
        self._told: set[int] = set()

    def __len__(self) -> int:
        """Number of recoveries under way."""
        return len(self._running)

    @property
    def jobs(self) -> list[Job]:
        """Jobs of the recoveries under way."""
        return [recovery.job for recovery in self._running.values()]

    def is_wanted(self, frozen: FrozenTrial) -> bool:
        """Whether a completed trial's weights should be kept, but are missing."""
        return self._weights is not None and self._weights.lacks(frozen)

    def start(self, left: ResumableTrial, events: EventStream) -> None:
        """Start to recover a trial's weights from its checkpoint."""
        assert left.checkpoint is not None
        frozen = left.frozen
        try:
            with let_interrupts_through():
                task = self._build(optuna_internals.as_running(self._study, frozen))
            if isinstance(task, TrainTask):
                name, checkpoint = f"weights of trial {frozen.number}", left.checkpoint
                job = self._pool.submit(
                    task, name=name, events=events, resume_from=checkpoint.path, labels=checkpoint.labels
                )
                self._running[id(job)] = _WeightsRecovery(frozen=frozen, task=task, job=job)
                return
        except Exception as error:  # noqa: BLE001 - an objective may raise anything; the search goes on
            self._say_lost(frozen, f"{type(error).__name__}: {error}")
        # Nothing can be recovered, so the checkpoint is of no further use.
        self.told(frozen.number)

    def has(self, job: Job) -> bool:
        """Whether a job is a recovery."""
        return id(job) in self._running

    def on_end(self, event: Finished | Failed) -> None:
        """Finish a recovery: keep the weights, or report their loss."""
        recovery = self._running.pop(id(event.job))
        if event.result.status == "completed" and self._weights is not None:
            self._weights.completed(recovery.frozen, recovery.task, event.result)
        else:
            error = event.result.error
            why = f"its recovery was {event.result.status}" if error is None else f"{type(error).__name__}: {error}"
            self._say_lost(recovery.frozen, why)
        self.told(recovery.frozen.number)

    def told(self, number: int) -> None:
        """Note a told trial whose weights have been offered."""
        self._told.add(number)
        self.settle()

    def settle(self, *, waits: bool = False) -> None:
        """Remove checkpoints no longer needed; with `waits`, after all weights have been written."""
        if waits and self._weights is not None:
            self._weights.flush()
        for number in sorted(self._told):
            # The checkpoint must outlive the write: until then, a crash could only recover the weights from there.
            if self._weights is None or self._weights.is_settled(number):
                self._told.discard(number)
                self._resuming.forget(number)

    def _say_lost(self, frozen: FrozenTrial, why: str) -> None:
        if self._weights is not None:
            self._weights.say_lost(frozen.number, why)
