"""Times on a grid, so that sums and differences are exact.

`Simulator` (`simulator.py`) makes the grid of a scenario before the clock starts. `simulator.py`, `entities.py` and
`transfers.py` round each duration and each moment of a scenario; a time that is not rounded breaks the skipping
of repetitions (`repeats.py`).

Note: exact times. Every duration is rounded once to a multiple of a power of two, chosen so small that even the longest
possible schedule has fewer than 2**52 multiples. Sums and differences of such floats have no rounding error, so the
order of events does not depend on absolute time: a schedule that repeats does so to the last bit, and skipping the
repetitions changes nothing (`repeats.py`).
"""

import math

_BITS = 52


class TimeGrid:
    """Rounds durations to the grid.

    Args:
        longest_seconds: upper bound on every sum of durations.
    """

    def __init__(self, longest_seconds: float) -> None:
        # `frexp` gives the exponent e with longest_seconds < 2**e, so the longest schedule has fewer than 2**_BITS
        # steps.
        self._exponent = math.frexp(longest_seconds)[1] - _BITS

    def round(self, seconds: float) -> float:
        """Round to the nearest multiple of the grid's step; a positive duration stays positive."""
        steps = round(math.ldexp(seconds, -self._exponent))
        return math.ldexp(float(max(steps, 1 if seconds > 0 else 0)), self._exponent)
