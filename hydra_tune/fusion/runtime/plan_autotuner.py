"""`StepPlanAutotuner`: measure planned steps during ordinary training, and keep the fastest way to run them.

`PlannedStepCache` (`planned_unit.py`) and `PairTrial` (`pair_trial.py`) make a `StepPlanAutotuner` for each kind of
step. All ways to run a step compute the same graphs with the same bits, so training can switch between ways at any
unit. The way with the best prediction runs first and is timed: `PlannedRound` (`planned_unit.py`) and `PairRound`
(`paired_unit.py`) report the time of a step after each unit. If the prediction is off by more than `TOLERANCE`, the
measurement corrects the profiles, the steps are planned again, and the new ways run in turn with the first way; the
fastest stays. If even the fastest takes longer than first predicted, beyond `TOLERANCE`, `LiveGroup`
(`pool/fusion/live_group.py`) compares with groups that need no plan, unless `fusion_planner` is "on".

Note: threads. The thread that advances the group makes all calls, so there is no lock. `took` may plan again, which takes
seconds and other locks (`step_planner.py`), so its caller may hold neither the pool's lock nor the capture gate.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hydra_tune.fusion.runtime.planned_executor import DeviceStepRunner
from hydra_tune.fusion.runtime.step_planner import PlannedStep
from hydra_tune.planner.search.autotune import TOLERANCE
from hydra_tune.planner.search.tournament import SpeedTournament
from hydra_tune.quantities import format_short_seconds

_LOGGER = logging.getLogger("hydra_tune.fusion")
_WARM_UPS, _TURNS = 2, 5
"""Untimed and timed units of each way in a comparison."""


S = TypeVar("S", bound=DeviceStepRunner)


@dataclass(frozen=True, slots=True, kw_only=True)
class AutotuneCandidate:
    """A timed way.

    Attributes:
        how: the planner's strategy, by name in the portfolio.
        predicted_seconds: predicted seconds of a step of all members; from corrected profiles after replanning.
    """

    how: str
    predicted_seconds: float
    seconds: float
    is_chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AutotuneResult:
    """Measured times of planned steps.

    Attributes:
        predicted_seconds: first prediction for a step of all members.
        seconds: measured seconds of the first way.
        ways: all timed ways, the first way first.
    """

    sizes: tuple[int, ...]
    predicted_seconds: float
    seconds: float
    is_replanned: bool
    ways: tuple[AutotuneCandidate, ...]

    @property
    def seconds_each(self) -> float:
        """Seconds of a step of the chosen way, per member."""
        return self._chosen.seconds / sum(self.sizes)

    @property
    def is_slower(self) -> bool:
        """Whether the chosen way takes longer than first predicted, beyond the tolerance."""
        return self._chosen.seconds > (1 + TOLERANCE) * self.predicted_seconds

    @property
    def _chosen(self) -> AutotuneCandidate:
        return next(way for way in self.ways if way.is_chosen)

    @property
    def told(self) -> str:
        """A description in words, with the numbers."""
        sizes = " + ".join(map(str, self.sizes))
        summary = (
            f"a planned step of {sizes} takes {format_short_seconds(self.seconds)}, where "
            f"{format_short_seconds(self.predicted_seconds)} were predicted"
        )
        if not self.is_replanned:
            return summary
        ways = ", ".join(
            f"{way.how} {format_short_seconds(way.seconds)}{' (chosen)' if way.is_chosen else ''}" for way in self.ways
        )
        return f"{summary}; planned once more, and run in turn: {ways}"


class StepPlanAutotuner(Generic[S]):
    """The ways of a group's or pair's planned steps; a single way runs at a time.

    Args:
        replan: takes `planned` and the measured seconds of a step; returns `planned` with a corrected prediction,
            followed by other ways that fit.
        tell: receives the measurement, once.
    """

    def __init__(
        self,
        planned: PlannedStep,
        make: Callable[[PlannedStep], S],
        replan: Callable[[PlannedStep, float], Sequence[PlannedStep]],
        tell: Callable[[AutotuneResult], None],
    ) -> None:
        self._first = planned
        self._make, self._replan, self._tell = make, replan, tell
        self._made = [make(planned)]
        self._predicted = [planned.part.times.seconds]
        self._seconds = 0.0
        # Without a rival, the tournament only counts warm-ups and takes the median.
        self._race: SpeedTournament[int] | None = SpeedTournament([0], warm_ups=_WARM_UPS, turns=_TURNS)
        self._chosen = 0

    @property
    def current(self) -> S:
        """The runner of the next steps."""
        place = None if self._race is None else self._race.next
        return self._made[self._chosen if place is None else place]

    @property
    def host_bytes(self) -> int:
        """Host memory for swapped tensors, in bytes."""
        return sum(runner.planned.host_bytes for runner in self._made)

    def took(self, seconds: float) -> None:
        """Take the measured seconds of a step of `current`."""
        race = self._race
        if race is None:
            return
        race.took(seconds)
        if race.next is not None:
            return
        if len(self._made) > 1:
            self._end(race)
            return
        self._seconds = race.seconds[0]
        predicted = self._first.part.times.seconds
        if abs(self._seconds / predicted - 1) <= TOLERANCE:
            self._race = None
            self._told({0: self._seconds}, is_replanned=False)
            return
        try:
            corrected_step, *other_steps = self._replan(self._first, self._seconds)
            for other_step in other_steps:  # append one at a time, so a failure below can close the runners made so far
                self._made.append(self._make(other_step))
            self._predicted = [one.part.times.seconds for one in (corrected_step, *other_steps)]
        except Exception:  # training continues with the first way
            _LOGGER.info("steps cannot be planned once more", exc_info=True)
            for one in self._made[1:]:
                one.close()
            del self._made[1:]
        if len(self._made) > 1:
            self._race = SpeedTournament(range(len(self._made)), warm_ups=_WARM_UPS, turns=_TURNS)
        else:
            self._race = None
            self._told({0: self._seconds}, is_replanned=True)

    def close(self) -> None:
        """Release all runners."""
        for runner in self._made:
            runner.close()

    def _end(self, race: SpeedTournament[int]) -> None:
        self._race, self._chosen = None, race.best
        # Report before closing: the report looks up every way by its position in the race.
        self._told(race.seconds, is_replanned=True)
        best = self._made[self._chosen]
        for runner in self._made:
            if runner is not best:
                runner.close()
        self._made, self._chosen = [best], 0

    def _told(self, seconds: dict[int, float], *, is_replanned: bool) -> None:
        ways = tuple(
            AutotuneCandidate(
                how=self._made[place].planned.part.way,
                predicted_seconds=self._predicted[place],
                seconds=way_seconds,
                is_chosen=place == self._chosen,
            )
            for place, way_seconds in seconds.items()
        )
        self._tell(
            AutotuneResult(
                sizes=self._first.part.sizes,
                predicted_seconds=self._first.part.times.seconds,
                seconds=self._seconds,
                is_replanned=is_replanned,
                ways=ways,
            )
        )


def drop_stale(known: dict[Any, StepPlanAutotuner[Any]], present: Collection[Any]) -> None:
    """Drop planned steps of plans that no group will run again, since each keeps host memory."""
    for plans in [plans for plans in known if plans not in present]:
        known.pop(plans).close()
