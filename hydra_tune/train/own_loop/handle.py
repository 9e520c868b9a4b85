"""`Loop`: what the function of a `LoopTask` is given, in a pool and outside of one.

`LoopTrial` (`loop_trial.py`) makes a `Loop` for a trial of a pool, and `PlainLoop` (`plain.py`) for a call outside of a
pool; each is the loop's `LoopHost`. The methods of a `Loop` run on the thread of the loop's function alone, and so take no
lock. The module must not know the pool.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hydra_tune.errors import MetricError, TaskError
from hydra_tune.loop_task import LoopTask
from hydra_tune.task import check_positive, check_reported, numbers_of
from hydra_tune.train.own_loop.registered import Registered, left_out

_HISTORY_NAMES = ("step", "epoch", "seconds")
"""Names in each entry of a history beside the metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopReport:
    """A report of a loop, to be delivered at its next mark.

    Attributes:
        step: the number given to `report`, or the calls of `step()` done, the coming call included.
        metrics: the values by name.
    """

    step: int
    metrics: dict[str, float]


class LoopHost(Protocol):
    """The side that runs a loop."""

    @property
    def device(self) -> torch.device:
        """Device of the present unit."""

    @property
    def num_steps(self) -> int:
        """Calls of `step()` done, before the loop was interrupted included."""

    @property
    def is_saved(self) -> bool:
        """Whether the loop has checkpoints."""

    def warn_of_left_out(self, names: list[str]) -> None:
        """Warn of variables of the loop with a state that it has not registered."""

    def check_caller(self) -> None:
        """Refuse, by a `TaskError`, a call of another thread than the loop's."""

    def take(self, registered: Registered, steps: int | None) -> None:
        """Take what the loop registers; returns on the device of the first unit."""

    def end_unit(self, reports: list[LoopReport], *, may_resume: bool) -> None:
        """End a unit; returns at the beginning of the next.

        Raises:
            LoopEnded: the trial is over.
        """


class Loop:
    """A training loop of your own, as its function sees it. Not made by users; see `LoopTask`."""

    def __init__(self, task: LoopTask, host: LoopHost) -> None:
        self._task, self._host = task, host
        self._is_registered = False
        self._reports: list[LoopReport] = []
        self._last_report = -1

    @property
    def device(self) -> torch.device:
        """Device of the present unit: registered modules are there, and batches have to go there. May change at `step()`.

        Raises:
            TaskError: before `register`, as the loop has no device yet.
        """
        self._check("loop.device")
        return self._host.device

    @property
    def start_step(self) -> int:
        """Calls of `step()` that the loop made before the point from which the loop resumes; 0 for a loop that begins.

        Raises:
            TaskError: before `register`, which restores the interrupted state.
        """
        self._check("loop.start_step")
        return self._start_step

    def register(self, *objects: object, steps: int | None = None) -> None:
        """Hand over what is trained: moved between device and host from now on, saved, and restored if the loop resumes.

        Call it once, with what was built on the host. On return the registered modules are on `loop.device`.

        Args:
            objects: modules, optimizers, and anything else with `state_dict` and `load_state_dict`, such as a scheduler, in
                any order. All parameters of the optimizers have to be of the modules.
            steps: as of `LoopTask`.

        Raises:
            TaskError: an object of another kind, no module, an optimizer of a parameter of no module, or a second call.
            BudgetError: the state does not fit the device.
        """
        self._host.check_caller()
        if self._is_registered:
            raise TaskError("loop.register() is called once, with all objects; a second call came")
        if steps is not None:
            check_positive("steps", steps)
        self._host.take(Registered.of(objects), steps or self._task.steps)
        self._is_registered, self._start_step = True, self._host.num_steps
        self._registered: tuple[object, ...] | None = objects if self._host.is_saved else None

    def step(self, *, may_resume: bool = True) -> None:
        """End a unit: deliver the reports since the last, and begin the next unit, perhaps later and on another device.

        Call it last in an iteration, when the iteration's report is made: a loop that is interrupted resumes behind a
        call of `step()`, with `start_step` calls done.

        Args:
            may_resume: whether registered state, random streams and `start_step` say all that the rest of the loop depends
                on. False, in the middle of a pass over shuffled data for example: the loop resumes from an earlier call.

        Raises:
            TaskError: nothing is registered.
            LoopEnded: the trial has been pruned or cancelled; let the exception pass.
        """
        self._check("loop.step()")
        if self._registered is not None:
            caller = sys._getframe(1)  # noqa: SLF001 - as documented, for the caller's variables
            if names := left_out(caller, self._registered):
                self._host.warn_of_left_out(names)
            self._registered = None
        reports, self._reports = self._reports, []
        self._host.end_unit(reports, may_resume=may_resume)

    def report(self, metrics: float | Tensor | Mapping[str, float | Tensor], step: int | None = None) -> None:
        """Report values, delivered by the next `step()` or the loop's end. The tuner may prune the trial there.

        Args:
            metrics: values by name; or one number, the value of the task's metric.
            step: number of the report, higher than that of the report before, such as an epoch; None: the calls of
                `step()`, with the next.

        Raises:
            MetricError: no numbers, a metric named as the history's own entries, a metric of the task is missing, or the
                step is not higher than the last.
            TaskError: nothing is registered.
        """
        self._check("loop.report()")
        if not isinstance(metrics, Mapping):
            metrics = {self._task.metrics[0]: metrics}
        values = numbers_of(metrics, "loop.report() takes numbers by name")
        for name in _HISTORY_NAMES:
            if name in values:
                raise MetricError(
                    f"loop.report() takes no metric named {name!r}, because each entry of the history has a {name!r} of its "
                    "own; choose another name, or give step= for the number of the report"
                )
        check_reported(self._task.metrics, values)
        step = self._host.num_steps + 1 if step is None else step
        if isinstance(step, bool) or not isinstance(step, int) or step <= self._last_report:
            raise MetricError(
                f"the step of a report must be a whole number above that of the report before, {self._last_report}, not "
                f"{step!r}; report once before each loop.step(), or give step="
            )
        self._last_report = step
        self._reports.append(LoopReport(step=step, metrics=values))

    def finish(self, returned: object) -> list[LoopReport]:
        """Return the reports that are left at the end of the loop; for the host.

        Args:
            returned: value that the function returned.

        Raises:
            TaskError: nothing was registered, or the function returned a value.
        """
        if not self._is_registered:
            raise TaskError(
                "the loop has ended without loop.register(), so nothing of it could be moved or saved; call "
                "loop.register(model, optimizer) before training"
            )
        if returned is not None:
            raise TaskError(
                f"the loop returned {type(returned).__name__}, which nobody reads; report the value with loop.report(value)"
            )
        return self._reports

    def continues(self, last_report: int) -> None:
        """Note the step of the last report before the interruption; for the host."""
        self._last_report = last_report

    def _check(self, what: str) -> None:
        self._host.check_caller()
        if not self._is_registered:
            raise TaskError(f"{what} needs loop.register(model, optimizer) first")
