"""Pace of the machine: the mean of the seconds that a fixed set of operators takes at the moment.

A core that others use as well changes its speed from second to second, by the clock and in CPU time alike. Sub-arrays
are profiled one after another, and plans compare the profiles. So `profiler.py` measures the pace before and after each
pass over a step's graph on the host, and reports the time of a pass relative to the pace; `benchmarks/mutwo_runs.py` does so
with steps. The module must not know graphs or plans.

Operators of microseconds, which consist mostly of the call, slow down more than long operators. Steps have both, so the
pace is the geometric mean of the times of small operators and of products of larger matrices.
"""

import math
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

_TIMES, _LARGE_TIMES = 30, 6
_SIDES = (8, 64), (64, 64), (128, 128)
_SHARE, _MOST_LOOKS = 0.03, 64
_LEAST_SECONDS = 1e-6  # in case a clock advances in larger steps


class CpuPaceMeter:
    """Pace of a CPU."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now

    def seconds(self, beside: float = 0.0) -> float:
        """Return the pace now, in seconds; the operators take about half a millisecond.

        For an action that takes longer, the result is the mean of several looks.

        Args:
            beside: seconds of the action; looks go on for a small share of these.
        """
        few, square, many = (torch.zeros(*sides, dtype=torch.float32, device="cpu") for sides in _SIDES)
        looks: list[float] = []
        with torch.no_grad():
            while not looks or (math.fsum(looks) < _SHARE * beside and len(looks) < _MOST_LOOKS):
                looks.append(max(_LEAST_SECONDS, self._look(few, square, many)))
        return statistics.fmean(looks)

    def _look(self, few: Tensor, one: Tensor, many: Tensor) -> float:
        begin = self._now()
        for _ in range(_TIMES):
            doubled = few.view(64, 8) * 2
            (doubled + doubled).sum(1).unsqueeze(1)
            torch.exp(torch.mm(one, one))
        between = self._now()
        for _ in range(_LARGE_TIMES):
            torch.mm(many, many)
        # In a geometric mean both kinds of operators weigh alike, however long they take.
        return math.sqrt((between - begin) * (self._now() - between))


class PacedTimer:
    """Times a repeated action relative to the pace before and after each run."""

    def __init__(self, pace: CpuPaceMeter) -> None:
        self._pace = pace
        self._found: list[tuple[float, float]] = []

    def time(self, action: Callable[[], float], times: int, *, counts: bool) -> None:
        """Run the action, which returns the seconds of a run, some times; the runs count if `counts`."""
        pace_before = self._pace.seconds()
        for _ in range(times):
            seconds = action()
            pace_after = self._pace.seconds(seconds)
            if counts:
                self._found.append((seconds, (pace_before + pace_after) / 2))
            # The look behind a run is also the look before the next.
            pace_before = pace_after

    @property
    def pace_seconds(self) -> float:
        """Median seconds of the pace's operators; 0 before any run that counts."""
        return statistics.median(pace for _, pace in self._found) if self._found else 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the action at the median pace; 0 before any run that counts."""
        if not self._found:
            return 0.0
        return statistics.median(seconds / pace for seconds, pace in self._found) * self.pace_seconds
