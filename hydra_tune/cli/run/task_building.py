"""Builds the task of a trial with the function named by the sweep file.

`sweep_run.py` gives the builder to the Optuna tuner, which builds the task of each trial when the trial begins
(`integrations/hydra_tune_optuna/sweep.py`). `cluster.py` gives the builder to the tuner for Ray, and the pool of a trial
builds the task in another process (`integrations/hydra_tune_ray/node/pool_runtime.py`), so a builder must be picklable.
`cli/dry_run/planning.py` builds the task of each configuration to plan, and `cli/dry_run/checking.py` a single task.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hydra_tune.cli.sweep_file.spec import SweepSpec
from hydra_tune.errors import TaskError
from hydra_tune.task import TrainTask


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskBuilder:
    """The user's function, named by `task:`, with a check of its result, and with the sweep's metric."""

    spec: SweepSpec
    function: Callable[..., Any]

    def __call__(self, *args: Any, **params: Any) -> TrainTask:
        """Build a task, which reports the metric of the sweep file.

        Args:
            args: the tuner's trial, for a sweep file without parameters.
            params: drawn parameters, for a sweep file with parameters.

        Raises:
            TaskError: the function returned something else, or a task that does not report the metric.
            Exception: whatever the function raises.
        """
        task = self.function(*args, **params)
        if not isinstance(task, TrainTask):
            raise TaskError(f"{self.spec.task} must return a TrainTask, not {type(task).__name__}")
        if task.metrics == (self.spec.metric,):
            return task
        try:
            # A new task checks all arguments again, so a metric that the task never reports is refused here.
            return replace(task, metric=self.spec.metric)
        except TaskError as error:
            raise TaskError(f"{self.spec.at('metric.name')}: {error}") from error
