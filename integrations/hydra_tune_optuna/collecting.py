"""Checkpoints of trials that have been told: they go when the trial's weights are kept, or are not among the best.

A process that is killed between the two leaves a trial that is complete, a checkpoint, and no weights. The next search has the
pool go on from the checkpoint, which takes no units where the trial's last state was saved, and keeps the weights of that.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from optuna.trial import FrozenTrial

from hydra_tune import Failed, Finished, HydraExecutor, Job, TrainTask
from hydra_tune.interrupts import let_interrupts_through
from hydra_tune.pool.job import EventStream
from hydra_tune_optuna.resuming import Left, Resuming
from hydra_tune_optuna.weights import StudyWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class _Collected:
    """A trial whose weights are being got."""

    frozen: FrozenTrial
    task: TrainTask
    job: Job


class Collecting:
    """Trials of one search that have been told, until nothing of them is needed any more.

    Args:
        pool: has the checkpoints.
        build: the objective, which is called with a trial that has ended as well.
        weights: keeps those of the best; None: nobody does.
        resuming: removes checkpoints.
    """

    def __init__(
        self,
        pool: HydraExecutor,
        build: Callable[[Any], Any],
        weights: StudyWeights | None,
        resuming: Resuming,
    ) -> None:
        self._pool = pool
        self._build = build
        self._weights = weights
        self._resuming = resuming
        self._running: dict[int, _Collected] = {}
        self._told: set[int] = set()

    def __len__(self) -> int:
        """How many are under way."""
        return len(self._running)

    @property
    def jobs(self) -> list[Job]:
        """What runs for them."""
        return [one.job for one in self._running.values()]

    def is_wanted(self, frozen: FrozenTrial) -> bool:
        """Whether the weights of a completed trial should be there, and are not."""
        return self._weights is not None and self._weights.lacks(frozen)

    def start(self, left: Left, events: EventStream) -> None:
        """Get the weights of a trial from its checkpoint."""
        assert left.checkpoint is not None
        frozen = left.frozen
        try:
            with let_interrupts_through():
                task = self._build(copy.deepcopy(frozen))
            if isinstance(task, TrainTask):
                name, found = f"weights of trial {frozen.number}", left.checkpoint
                job = self._pool.submit(task, name=name, events=events, resume_from=found.path, labels=found.labels)
                self._running[id(job)] = _Collected(frozen=frozen, task=task, job=job)
                return
        except Exception as error:  # noqa: BLE001 - an objective may raise anything; the search goes on
            self._say_lost(frozen, error)
        self.told(frozen.number)

    def has(self, job: Job) -> bool:
        """Whether a job is one of these."""
        return id(job) in self._running

    def on_end(self, event: Finished | Failed) -> None:
        """The weights are there, or will never be."""
        one = self._running.pop(id(event.job))
        if event.result.status == "completed" and self._weights is not None:
            self._weights.completed(one.frozen, one.task, event.result)
        else:
            self._say_lost(one.frozen, event.result.error)
        self.told(one.frozen.number)

    def told(self, number: int) -> None:
        """A trial has been told, and its weights were offered."""
        self._told.add(number)
        self.settle()

    def settle(self, *, waits: bool = False) -> None:
        """Remove the checkpoints that nobody needs any more.

        Args:
            waits: until all weights are written.
        """
        if waits and self._weights is not None:
            self._weights.flush()
        for number in sorted(self._told):
            if self._weights is None or self._weights.is_settled(number):
                self._told.discard(number)
                self._resuming.forget(number)

    def _say_lost(self, frozen: FrozenTrial, error: BaseException | None) -> None:
        if self._weights is not None:
            self._weights.say_lost(frozen.number, f"{type(error).__name__}: {error}")
