"""A weighted mean in float64, and the values of a validation pass.

`OwnCodeTrial` (`own_code_trial.py`), `SingleTrial` (`single_trial.py`) and `MemberTrial` (`fusion/group/member.py`) average
the training losses between two reports, weighted by samples, or with `loss_weight=` by steps, and the metrics of each
validation pass. `Trial` (`trial.py`) puts the `parts` of a begun mean into checkpoints. `train_plain`
(`train/loop/reference_loop.py`) has a mean of its own, and both must add in the same order.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hydra_tune.task import TrainTask, finished, reported_names


class WeightedMean:
    """Accumulates weighted values, from a sum of values times their weights, and a sum of weights."""

    def __init__(self, total: float = 0.0, weight: int = 0) -> None:
        self._total = total
        self._weight = weight

    @property
    def parts(self) -> tuple[float, int]:
        """Arguments that recreate the mean."""
        return self._total, self._weight

    def add(self, value: float, weight: int) -> None:
        """Add a value that stands for `weight` samples."""
        self._total += value * weight
        self._weight += weight

    def add_part(self, part: float) -> None:
        """Add a part of a value of weight 1; `complete` ends the value."""
        self._total += part

    def complete(self) -> None:
        """End a value whose parts have been added."""
        self._weight += 1

    def value(self) -> float:
        """Return the mean of the added values."""
        return self._total / self._weight


class EvaluationResults:
    """Gathers the values of a validation pass: means over samples, or all values for `finish=`.

    Attributes:
        nbytes: host memory of the tensors gathered, in bytes.
    """

    def __init__(self, task: TrainTask) -> None:
        self._task = task
        self._means: dict[str, WeightedMean] = {}
        self._collected: dict[str, list[Tensor]] = {}
        self.nbytes = 0

    def add(self, values: Mapping[str, Any], samples: int) -> None:
        """Add the values of a batch: numbers, or tensors on the host for `finish=`."""
        if self._task.finish is None:
            for name, value in values.items():
                self._means.setdefault(name, WeightedMean()).add(value, samples)
            return
        for name, value in values.items():
            self._collected.setdefault(name, []).append(value)
            self.nbytes += value.numel() * value.element_size()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the pass by reported name; runs the user's `finish=`.

        Raises:
            MetricError: as of `finished` and `reported_names`.
        """
        if self._task.finish is not None:
            return reported_names(finished(self._task, self._collected))
        return reported_names({name: mean.value() for name, mean in self._means.items()})
