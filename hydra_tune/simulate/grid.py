"""Times on a grid, so that adding and subtracting them is exact.

Note: exact times. Every duration is rounded once to a multiple of a power of two that is so small that even the longest
possible schedule is fewer than 2**52 of them. Sums and differences of such floats have no rounding error, so the order of
events does not depend on when they happen: a schedule that repeats itself repeats itself to the last bit, and skipping
the repetitions changes nothing (`repeats.py`).
"""

import math

_BITS = 52


class Grid:
    """Rounds durations.

    Args:
        longest_seconds: no sum of durations is larger.
    """

    def __init__(self, longest_seconds: float) -> None:
        self._exponent = math.frexp(longest_seconds)[1] - _BITS

    def round(self, seconds: float) -> float:
        """The nearest multiple of the step; a positive duration stays positive."""
        steps = round(math.ldexp(seconds, -self._exponent))
        return math.ldexp(float(max(steps, 1 if seconds > 0 else 0)), self._exponent)
