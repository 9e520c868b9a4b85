"""Predicts the next use of a block from its past uses, or from the prefetcher, which knows the next use.

`HostTier` (`memory/host/host_tier.py`) notes each use, and the uses that the prefetcher announces, under the tier's lock; the
tier and its rules (`memory/host/host_eviction.py`) ask for the distance, mostly without the lock, when a host copy has to make
room or a block on disk may be read ahead. The module knows neither trials nor steps, only blocks and their uses.

Note: periodicity. A training step repeats. Optimizer state is used once per step; parameters are used two or three
times, at distances repeated in the next step. The distances between a block's last uses therefore predict the next
distance. Time is counted in units of the whole pool. An overdue block belongs to a waiting trial: the longer the delay,
the later the predicted use.

Example: a block used at the times 0, 3, 8, 11 and 16 has the gaps 3, 5, 3 and 5. The gaps repeat every two uses, so the
next use is expected at 16 + 3 = 19.
"""

import itertools
from collections.abc import Sequence

AHEAD = 4  # in units: a backward and an update are two units, so the window covers two shards
_PATTERNS = (1, 2, 3)  # uses of a block in a step
# Two periods of the longest pattern; n gaps need n + 1 times.
_KEPT = 2 * _PATTERNS[-1] + 1


class BlockUseHistory:
    """The last uses of a block.

    Args:
        now: time of creation, which counts as a use.
    """

    __slots__ = ("_expected", "_times")

    def __init__(self, now: int) -> None:
        # A new tuple for each use: threads read the times while another thread notes a use.
        self._times: tuple[int, ...] = (now,)
        self._expected: int | None = None  # announced time of the next use; until the use, or until long overdue

    def add(self, now: int) -> None:
        """Note a use at time `now`."""
        self._times = (*self._times, now)[-_KEPT:]
        self._expected = None

    def expect(self, time: int) -> None:
        """Note an announced use at `time`, which overrides the prediction."""
        self._expected = time

    def distance(self, now: int) -> int:
        """Predicted number of units until the next use."""
        # The absolute value: an overdue block counts as the more distant the longer the delay.
        expected = self._told(now)
        return abs((self._times[-1] + self._gap() if expected is None else expected) - now)

    def is_soon(self, now: int) -> bool:
        """Whether a use is known or predicted to be soon."""
        return self._told(now) is not None or (self._gap() > 0 and self.distance(now) <= AHEAD)

    def _told(self, now: int) -> int | None:
        expected = self._expected
        return expected if expected is not None and now - expected <= AHEAD else None

    def _gap(self) -> int:
        return _next_gap([b - a for a, b in itertools.pairwise(self._times)])


def _next_gap(gaps: Sequence[int]) -> int:
    """Predict the next gap by the period that best explains the last gaps; 0, as for a due block, without enough gaps."""
    periods = [period for period in _PATTERNS if 2 * period <= len(gaps)]
    if not periods:
        return 0

    def error(period: int) -> float:
        return sum(abs(gaps[-i] - gaps[-i - period]) for i in range(1, period + 1)) / period

    # Of equally good periods `min` takes the first, that is, the shortest.
    return gaps[-min(periods, key=error)]
