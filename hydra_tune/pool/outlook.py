"""How long a sweep will have taken, and what no schedule of the same work could have been below."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hydra_tune.pool.stats import PoolStats
from hydra_tune.schedule.bound import makespan_bound

_WINDOW_SECONDS = 60.0
_LEAST_SHARE = 0.02  # of all work that has been done before anything is said: first times are guesses
_SPREAD = ("data-parallel", "pipelined")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A trial, as time to compute.

    Args:
        done_seconds: what its units have taken.
        left_seconds: what they will take; None: not known yet.
        is_over: nothing more of it will run.
    """

    done_seconds: float
    left_seconds: float | None
    is_over: bool = False

    @property
    def seconds(self) -> float | None:
        """All of it; None: not known yet."""
        if self.is_over:
            return self.done_seconds
        return None if self.left_seconds is None else self.done_seconds + self.left_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """A forecast.

    Attributes:
        left_seconds: wall time to come.
        bound_seconds: the lower bound on the makespan of all the work, done and to come, on these devices without copies.
    """

    left_seconds: float
    bound_seconds: float


class Forecaster:
    """Remembers how fast computing went on in the last minute. Not thread-safe."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()  # wall time, and seconds computed by then

    def outlook(self, works: Iterable[Work], num_unstarted: int | None, stats: PoolStats) -> Outlook | None:
        """What is to be expected.

        Trials of which nothing is known, those that have not begun and those that have not been asked for, are taken for as
        long as the others are on average; a trial in flight, for as long as it is if nobody prunes it. The devices are taken to
        go on as they have done in the last minute, and a trial not to compute on two devices at once.

        Args:
            works: the trials that there are.
            num_unstarted: trials that are still to come; None: nobody knows, so there is no outlook.
            stats: the pool's figures.

        Returns:
            The outlook; None while too little is known.
        """
        works = list(works)
        done = sum(work.done_seconds for work in works)
        known = [seconds for work in works if (seconds := work.seconds) is not None]
        if done > 0:  # what came before is not held against the devices
            self._seen.append((stats.elapsed_seconds, done))
        while len(self._seen) > 1 and stats.elapsed_seconds - self._seen[1][0] >= _WINDOW_SECONDS:
            self._seen.popleft()
        busy = sum(device.busy_seconds for device in stats.devices.values())
        if not self._seen or num_unstarted is None or not busy or sum(known) <= 0:
            return None
        mean = sum(known) / len(known)
        totals = [mean if work.seconds is None else work.seconds for work in works] + [mean] * num_unstarted
        lefts = [0.0 if work.is_over else mean if work.left_seconds is None else work.left_seconds for work in works]
        lefts += [mean] * num_unstarted
        bound = makespan_bound(totals, len(stats.devices))
        if _is_spread(stats.steps_by_way):  # then a trial may be over sooner than one device could have it
            bound = sum(totals) / len(stats.devices)
        if done < _LEAST_SHARE * sum(totals):
            return None
        span, computed = stats.elapsed_seconds - self._seen[0][0], done - self._seen[0][1]
        speed = min(1.0, done / busy)  # of one device, when it has something to do
        # A moment is too short to tell, and a rest, in which nothing is computed, will not last.
        rate = min(max(computed / span if span > 1 else 0.0, speed), speed * len(stats.devices))
        left = max(sum(lefts) / rate, max(lefts, default=0.0) / speed)
        return Outlook(left_seconds=left, bound_seconds=bound)


def _is_spread(steps_by_way: Mapping[str, int]) -> bool:
    return any(steps_by_way.get(way) for way in _SPREAD)
