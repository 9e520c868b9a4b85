"""A mean weighted by samples, in float64.

`SingleTrial` (`single_trial.py`) and `MemberTrial` (`fusion/group/member.py`) average the training losses between two
reports, and the metrics of each validation pass.
"""


class WeightedMean:
    """Accumulates weighted values.

    Args:
        total: sum of the values so far, each times its weight.
        weight: sum of the weights.
    """

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

    def value(self) -> float:
        """Return the mean of the added values."""
        return self._total / self._weight
