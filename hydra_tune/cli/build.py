"""Makes the task of a trial with the function that the sweep file names."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hydra_tune.cli.spec import SweepSpec
from hydra_tune.errors import TaskError
from hydra_tune.task import TrainTask


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskBuilder:
    """The user's function, with its result checked and given the sweep's metric.

    Args:
        spec: the sweep.
        function: what `task:` names.
    """

    spec: SweepSpec
    function: Callable[..., Any]

    def __call__(self, *args: Any, **params: Any) -> TrainTask:
        """Build a task.

        Args:
            args: the tuner's trial, where the sweep file has no parameters.
            params: what was drawn, where it has.

        Returns:
            The task, which reports the metric of the sweep file.

        Raises:
            TaskError: the function returned something else, or its task does not report that metric.
            Exception: whatever the function raises.
        """
        task = self.function(*args, **params)
        if not isinstance(task, TrainTask):
            raise TaskError(f"{self.spec.task} must return a TrainTask, not {type(task).__name__}")
        if task.metrics == (self.spec.metric,):
            return task
        try:
            return replace(task, metric=self.spec.metric)
        except TaskError as error:
            raise TaskError(f"{self.spec.at('metric.name')}: {error}") from error
