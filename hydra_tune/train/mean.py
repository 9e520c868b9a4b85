"""A mean weighted by samples, in float64."""


class Mean:
    """Adds values with their weights.

    Args:
        total: of the values so far, each times its weight.
        weight: of all of them.
    """

    def __init__(self, total: float = 0.0, weight: int = 0) -> None:
        self._total = total
        self._weight = weight

    @property
    def parts(self) -> tuple[float, int]:
        """What makes the same mean again."""
        return self._total, self._weight

    def add(self, value: float, weight: int) -> None:
        """One value that stands for `weight` samples."""
        self._total += value * weight
        self._weight += weight

    def value(self) -> float:
        """The mean of what was added."""
        return self._total / self._weight
