"""When a block is needed next, told from when it was used, or by whoever knows.

Note: a training step repeats itself. Optimizer state is used once in a step, parameters two or three times at distances that
come again in the next step. So the distances between a block's last uses tell the next one. Times are counted in units of the
whole pool. A block that is overdue belongs to a trial that waits, and the longer it has waited the later it is taken to come.
"""

import itertools
from collections import deque
from collections.abc import Sequence

AHEAD = 4  # units: a backward and an update are two, so this is two shards ahead
_PATTERNS = (1, 2, 3)  # uses of a block in a step
_KEPT = 2 * _PATTERNS[-1] + 1


class Uses:
    """The last uses of one block.

    Args:
        now: it has just been made, which counts as a use.
    """

    __slots__ = ("_expected", "_times")

    def __init__(self, now: int) -> None:
        self._times = deque([now], maxlen=_KEPT)
        self._expected: int | None = None  # when, by whoever knows; until it comes true, or has not for long

    def add(self, now: int) -> None:
        """It is used now."""
        self._times.append(now)
        self._expected = None

    def expect(self, time: int) -> None:
        """It will be used then, says who knows more than its last uses tell."""
        self._expected = time

    def distance(self, now: int) -> int:
        """In how many units it is needed next, as far as can be told."""
        expected = self._told(now)
        return abs((self._times[-1] + self._gap() if expected is None else expected) - now)

    def is_soon(self, now: int) -> bool:
        """Whether it is known to be needed soon."""
        return self._told(now) is not None or (self._gap() > 0 and self.distance(now) <= AHEAD)

    def _told(self, now: int) -> int | None:
        """When somebody has said that it will be used, as long as that may still come true."""
        expected = self._expected
        return expected if expected is not None and now - expected <= AHEAD else None

    def _gap(self) -> int:
        return _next_gap([b - a for a, b in itertools.pairwise(self._times)])


def _next_gap(gaps: Sequence[int]) -> int:
    """The number that follows, if the last ones come again in turn; 0, as for one that is due, where nothing is known yet."""
    known = [period for period in _PATTERNS if 2 * period <= len(gaps)]
    if not known:
        return 0

    def error(period: int) -> float:
        return sum(abs(gaps[-i] - gaps[-i - period]) for i in range(1, period + 1)) / period

    return gaps[-min(known, key=error)]
