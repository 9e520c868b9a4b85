"""A mean weighted by samples, in float64."""


class Mean:
    """Adds values with their weights."""

    def __init__(self) -> None:
        self._total = 0.0
        self._weight = 0

    def add(self, value: float, weight: int) -> None:
        """One value that stands for `weight` samples."""
        self._total += value * weight
        self._weight += weight

    def value(self) -> float:
        """The mean of what was added."""
        return self._total / self._weight
