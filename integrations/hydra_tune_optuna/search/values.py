"""Converts a pool's reports to Optuna's values.

The functions are pure. `OptimizeDriver` (`driver.py`) checks each task here before the submit, and converts each report and
each trial's final value here; the driver also asks here about an objective's outcome that is no task.
"""

import math
from collections.abc import Mapping, Sequence
from numbers import Real

from optuna.study import StudyDirection

from hydra_tune import LoopTask, TrainTask
from hydra_tune.errors import MetricError, TaskError

Values = tuple[float, ...]
"""A report of a task: the values of `task.metrics`, in order."""


def reported_values(task: TrainTask, metrics: Mapping[str, float]) -> Values:
    """Pick the task's metrics from a report.

    Raises:
        MetricError: a metric is missing.
    """
    missing = [name for name in task.metrics if name not in metrics]
    if missing:
        missing_names, reported_names = ", ".join(map(repr, missing)), ", ".join(map(repr, metrics)) or "nothing"
        raise MetricError(
            f"metric {missing_names} is not reported; reported: {reported_names}; name one of these, or return it in evaluate"
        )
    return tuple(metrics[name] for name in task.metrics)


def check_result_choice(task: TrainTask) -> None:
    """Refuse a choice of report that has no meaning.

    Raises:
        TaskError: `result="best"` with several objectives.
    """
    if task.result == "best" and len(task.metrics) > 1:
        raise TaskError(f"result='best' needs one metric, not {len(task.metrics)} {task.metrics}; use result='last'")


def wrong_arity(task: TrainTask, directions: Sequence[StudyDirection]) -> str | None:
    """Explain, in Optuna's words, why the task's values can never fit the study; None if the values can."""
    if len(task.metrics) == len(directions):
        return None
    return (
        f"The number of the values {len(task.metrics)} did not match the number of the objectives {len(directions)}: "
        f"the task's metric is {task.metric!r}"
    )


def trial_value(task: TrainTask, reports: Sequence[Values], directions: Sequence[StudyDirection]) -> float | Values:
    """Value that the objective would return after the given reports: the last report's values, or the best value.

    A NaN is the best value only if every report is NaN.

    Raises:
        MetricError: the task ended without a report.
    """
    if not reports and isinstance(task, LoopTask):
        raise MetricError(
            f"metric {task.metrics[0]!r} was never reported; call loop.report(value) before the loop ends"
        )
    if not reports:
        raise MetricError(
            f"metric {task.metrics[0]!r} was never reported: training ended before the first report "
            f"(report_every={task.report_every!r}); lower report_every"
        )
    if task.result == "best":
        numbers = [values[0] for values in reports if not math.isnan(values[0])]
        pick = max if directions[0] == StudyDirection.MAXIMIZE else min
        # NaN compares false with everything, so a NaN must not be among the compared numbers.
        return pick(numbers, default=math.nan)
    return reports[-1] if len(task.metrics) > 1 else reports[-1][0]


def looks_like_a_value(outcome: object) -> bool:
    """Whether an objective meant the outcome as its value, however wrong."""
    items: Sequence[object] = outcome if isinstance(outcome, list | tuple) else (outcome,)
    return all(isinstance(item, Real) for item in items)


def in_words(outcome: object) -> str:
    """Describe an outcome of an objective that is neither a task nor a value."""
    kind = type(outcome).__name__
    if isinstance(outcome, list | tuple) and outcome and all(isinstance(item, TrainTask) for item in outcome):
        return (
            f"a {kind} of tasks; return one task, with metric= of several names for several objectives; for folds or seeds, "
            "train the tasks in the objective with study.executor.run(tasks), and return a number"
        )
    if isinstance(outcome, type):
        return f"the class {outcome.__name__} itself"
    return kind
