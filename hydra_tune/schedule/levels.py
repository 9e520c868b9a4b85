"""`PriorityLevels`: separates jobs by priority and front, so that policies can ignore both.

`Scheduler` (`machine.py`) asks the highest level for a job for each idle device; `NextJobPredictor` (`ahead.py`) keeps
separate levels for predictions. `SchedulerState` (`state.py`) adds and removes the views of the scheduler's levels, and
passes on the devices' speeds. A view leaves the level that it entered, so a change of level is a removal before the change
and an addition after the change. The module takes no lock, because the scheduler's caller holds one or is the only thread.
"""

from bisect import bisect_left, insort
from collections.abc import Callable

from hydra_tune.schedule.policies.policy import BindsEarly, JobView, Selection, SpeedAware

Level = tuple[int, bool]
"""A priority, and whether the job is in the front (`schedule/front.py`); the greatest level runs first."""
_FEWEST_KEPT = 64


class PriorityLevels:
    """All eligible jobs, in a selection for each level; the highest level with a job is asked.

    An empty selection is kept: its state apart from jobs (a random stream, a job promised to a device) still holds when
    the next job comes. Empty selections without such state (`Selection.holds_only_jobs`) are dropped where there are many,
    because a driver may give each trial a priority of its own.

    Args:
        start: makes an empty selection.
    """

    def __init__(self, start: Callable[[], Selection]) -> None:
        self._start = start
        self._levels: dict[Level, _PriorityLevel] = {}
        self._rising: list[Level] = []  # non-empty levels, in rising order
        self._most_kept = _FEWEST_KEPT  # number of levels at which the next one drops empty levels
        # For selections of levels that open later.
        self._speeds: dict[str, float] = {}

    @property
    def highest(self) -> Level:
        """The highest level with an eligible job; there must be such a level."""
        return self._rising[-1]

    def add(self, view: JobView, level: Level) -> None:
        """Add a job that has become eligible."""
        priority_level = self._levels.get(level)
        if priority_level is None:
            priority_level = self._open(level)
        if not priority_level.num_jobs:
            insort(self._rising, level)
        priority_level.num_jobs += 1
        priority_level.selection.add(view)

    def remove(self, view: JobView, level: Level) -> None:
        """Remove a job that is no longer eligible."""
        priority_level = self._levels[level]
        priority_level.num_jobs -= 1
        if not priority_level.num_jobs:
            del self._rising[bisect_left(self._rising, level)]
        priority_level.selection.remove(view)

    def choose(self, device: str) -> JobView:
        """Ask the selection of the highest level; there must be an eligible job."""
        return self._levels[self._rising[-1]].selection.choose(device)

    def bound_to(self, device: str) -> str | None:
        """Return the job bound to a device by the selection of the highest level; None if there is no such job."""
        selection = self._levels[self._rising[-1]].selection if self._rising else None
        return selection.bound_to(device) if isinstance(selection, BindsEarly) else None

    def set_speed(self, device: str, speed: float) -> None:
        """Pass a device's speed on to speed-aware selections, also those of later levels; 0 means lost."""
        self._speeds[device] = speed
        for level in self._levels.values():
            if isinstance(level.selection, SpeedAware):
                level.selection.set_speed(device, speed)
        if not speed:
            del self._speeds[device]

    def _open(self, level: Level) -> "_PriorityLevel":
        if len(self._levels) >= self._most_kept:
            self._levels = {known: kept for known, kept in self._levels.items() if kept.num_jobs or not kept.is_as_new}
            # Twice as many, so that many levels with jobs are not looked at for each further level.
            self._most_kept = max(_FEWEST_KEPT, 2 * len(self._levels))
        selection = self._start()
        if isinstance(selection, SpeedAware):
            # A selection for a new level has missed all earlier speeds.
            for device, speed in self._speeds.items():
                selection.set_speed(device, speed)
        priority_level = self._levels[level] = _PriorityLevel(selection)
        return priority_level


class _PriorityLevel:
    __slots__ = ("num_jobs", "selection")

    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        self.num_jobs = 0

    @property
    def is_as_new(self) -> bool:
        """Whether the selection, if empty, is like a new one."""
        return getattr(self.selection, "holds_only_jobs", False)
