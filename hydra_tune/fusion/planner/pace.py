"""The pace of the machine: what the same few operators take at the moment.

A core that others have a part in is faster in one second than in the next, by the clock and in CPU time alike: on a virtual
machine with nothing else to do these operators took 0.72 ms or 1.3 ms, and went from one to the other within a second; steps
of DLRMs took 3.3 ms or 5.4 ms. A profile takes less than a second, sub-arrays are profiled one after another, and
plans compare them. So the pace is looked at beside each pass, and what a pass took is told relative to that.

The operators are of the kinds that steps are made of: views and small sums, which cost what calling them costs, and as long
products of matrices, and exponentials of those.
"""

import statistics
from collections.abc import Callable

import torch

_TIMES, _EACH = 6, 5


class Pace:
    """Of the computing of a CPU.

    Args:
        now: seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._few, self._square = (
            torch.zeros(8, 64),
            torch.zeros(64, 64),
        )  # little, for they lie beside what is profiled

    def seconds(self) -> float:
        """What they take now, about a millisecond."""
        begin = self._now()
        with torch.no_grad():
            for _ in range(_TIMES):
                for _ in range(_EACH):
                    doubled = self._few.view(64, 8) * 2
                    (doubled + doubled).sum(1).unsqueeze(1)
                for _ in range(_EACH):
                    torch.exp(torch.mm(self._square, self._square))
        return self._now() - begin


class Paced:
    """What something takes that is done again and again, relative to the pace before and after each time.

    Args:
        pace: of the machine.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._found: list[tuple[float, float]] = []

    def time(self, action: Callable[[], float], times: int, *, counts: bool) -> None:
        """Do it some times.

        Args:
            action: gives the seconds it took.
            times: how often.
            counts: whether these times count.
        """
        before = self._pace.seconds()
        for _ in range(times):
            seconds, after = action(), self._pace.seconds()
            if counts:
                self._found.append((seconds, (before + after) / 2))
            before = after

    @property
    def pace_seconds(self) -> float:
        """What the pace's operators took, the median; 0 before anything."""
        return statistics.median(beside for _, beside in self._found) if self._found else 0.0

    @property
    def seconds(self) -> float:
        """What it takes at that pace; 0 before anything."""
        if not self._found:
            return 0.0
        return statistics.median(seconds / beside for seconds, beside in self._found) * self.pace_seconds
