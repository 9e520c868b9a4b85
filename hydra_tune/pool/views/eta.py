"""Forecast of a sweep's makespan during the run, and a lower bound over all schedules of the same work.

`with_outlook` (`job_views.py`) asks a `MakespanForecaster` at each snapshot for a display: of a pool
(`live_snapshot.py`) and of `hydra-tune sweep` (`cli/display/board.py`). The module must not know jobs: seconds and
`PoolStats` are enough.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hydra_tune.pool.stats import PoolStats
from hydra_tune.schedule.bound import makespan_bound

_WINDOW_SECONDS = 60.0
_LEAST_SHARE = 0.02  # least share of work done before a forecast: first times are guesses
_SPREAD = ("data-parallel", "pipelined")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialComputeTime:
    """A trial as compute time.

    Args:
        left_seconds: seconds of compute still to come; None: unknown.
        is_over: whether the trial will run no further unit.
    """

    done_seconds: float
    left_seconds: float | None
    is_over: bool = False

    @property
    def seconds(self) -> float | None:
        """Total seconds of compute; None: unknown."""
        if self.is_over:
            return self.done_seconds
        return None if self.left_seconds is None else self.done_seconds + self.left_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MakespanForecast:
    """A forecast.

    Attributes:
        left_seconds: wall time still to come in seconds.
        bound_seconds: lower bound in seconds on the makespan of all work, done and to come, on the same devices without
            copies.
    """

    left_seconds: float
    bound_seconds: float


class MakespanForecaster:
    """Remembers the rate of compute over the last minute; not thread-safe, so a display calls under its own lock."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()  # pairs of wall time and total compute, in seconds

    def outlook(
        self, works: Iterable[TrialComputeTime], num_unstarted: int | None, stats: PoolStats
    ) -> MakespanForecast | None:
        """Return the forecast.

        Trials of unknown length, submitted or not, count with the mean of the known lengths. A running trial counts with
        its full length, as if never pruned. The forecast assumes that the devices keep the rate of the last minute, at
        least the rate of one busy device and at most of all, and that no trial computes on two devices at the same time.
        The bound drops the last assumption once steps have been spread over devices.

        Args:
            works: the existing trials.
            num_unstarted: number of trials still to come; None: unknown, so there is no forecast.
            stats: statistics of the pool.

        Returns:
            The forecast; None while too little is known.
        """
        works = list(works)
        done_seconds = sum(work.done_seconds for work in works)
        known_seconds = [seconds for work in works if (seconds := work.seconds) is not None]
        if done_seconds > 0:  # preparation before the first unit does not lower the rate
            self._seen.append((stats.elapsed_seconds, done_seconds))
        while len(self._seen) > 1 and stats.elapsed_seconds - self._seen[1][0] >= _WINDOW_SECONDS:
            self._seen.popleft()
        busy = sum(device.busy_seconds for device in stats.devices.values())
        if not self._seen or num_unstarted is None or not busy or sum(known_seconds) <= 0:
            return None
        mean = sum(known_seconds) / len(known_seconds)
        totals = [mean if work.seconds is None else work.seconds for work in works] + [mean] * num_unstarted
        remaining = [
            0.0 if work.is_over else mean if work.left_seconds is None else work.left_seconds for work in works
        ]
        remaining += [mean] * num_unstarted
        bound = makespan_bound(totals, len(stats.devices))
        if _is_spread(stats.steps_by_way):  # a spread trial may end sooner than a single device could compute it
            bound = sum(totals) / len(stats.devices)
        if done_seconds < _LEAST_SHARE * sum(totals):
            return None
        span, computed = stats.elapsed_seconds - self._seen[0][0], done_seconds - self._seen[0][1]
        speed = min(1.0, done_seconds / busy)  # compute per busy second of a device
        # A short span gives no reliable rate, and a pause without compute will not last: so the rate is at least that
        # of one busy device.
        rate = min(max(computed / span if span > 1 else 0.0, speed), speed * len(stats.devices))
        # Neither do all devices together get faster, nor does the longest trial on the one device that computes it.
        wall_seconds = max(sum(remaining) / rate, max(remaining, default=0.0) / speed)
        return MakespanForecast(left_seconds=wall_seconds, bound_seconds=bound)


def _is_spread(steps_by_way: Mapping[str, int]) -> bool:
    return any(steps_by_way.get(way) for way in _SPREAD)
