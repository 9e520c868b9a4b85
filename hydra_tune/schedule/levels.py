"""`Levels`: keeps priorities and the front apart, so that no policy has to."""

from bisect import bisect_left, insort
from collections.abc import Callable

from hydra_tune.schedule.policy import JobView, Selection, SpeedAware

Level = tuple[int, bool]
"""A priority, and whether the job is in the front (`schedule/front.py`); the greatest goes first."""


class Levels:
    """All eligible jobs, in one selection for each level; the highest that has a job is asked.

    A selection is kept when its last job goes: what it knows beside its jobs (a random stream, a job promised to a
    device) holds when the next one comes.

    Args:
        start: makes an empty selection.
    """

    def __init__(self, start: Callable[[], Selection]) -> None:
        self._start = start
        self._selections: dict[Level, Selection] = {}
        self._counts: dict[Level, int] = {}
        self._rising: list[Level] = []  # levels that have a job
        self._speeds: dict[str, float] = {}

    @property
    def highest(self) -> Level:
        """The highest level that has an eligible job; there must be one."""
        return self._rising[-1]

    @property
    def counts(self) -> dict[Level, int]:
        """The eligible jobs of each level that has any."""
        return {level: self._counts[level] for level in self._rising}

    def add(self, view: JobView, level: Level) -> None:
        """A job has become eligible."""
        if not self._counts.get(level):
            if level not in self._selections:
                self._open(level)
            self._counts[level] = 0
            insort(self._rising, level)
        self._counts[level] += 1
        self._selections[level].add(view)

    def remove(self, view: JobView, level: Level) -> None:
        """A job is no longer eligible."""
        self._counts[level] -= 1
        if not self._counts[level]:
            del self._rising[bisect_left(self._rising, level)]
        self._selections[level].remove(view)

    def choose(self, device: str) -> JobView:
        """Ask the selection of the highest level."""
        return self._selections[self._rising[-1]].choose(device)

    def set_speed(self, device: str, speed: float) -> None:
        """Tell the selections that care how fast a device is; 0 is lost."""
        self._speeds[device] = speed
        for selection in self._selections.values():
            if isinstance(selection, SpeedAware):
                selection.set_speed(device, speed)
        if not speed:
            del self._speeds[device]

    def _open(self, level: Level) -> None:
        selection = self._selections[level] = self._start()
        if isinstance(selection, SpeedAware):
            for device, speed in self._speeds.items():
                selection.set_speed(device, speed)
