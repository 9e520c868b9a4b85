"""What planned steps prove to take, and which of their ways is the fastest: measured on the steps that are made anyway.

All ways to run a step compute the same graphs, with the same bits. So the one that is predicted to be fastest is taken first,
and timed. Where that is off by more than `TOLERANCE`, what was measured corrects what profiles say, the steps are planned once
more, and what comes of that makes steps in turn with what there was; the fastest goes on (`planner/replan.py`). Where even that
takes more than was predicted, whoever is told compares it with groups that need no plan (`pool/fusion_group.py`).
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from hydra_tune.fusion.planned import PlannedStep
from hydra_tune.fusion.planner.replan import TOLERANCE
from hydra_tune.fusion.planner.run_off import RunOff

_LOGGER = logging.getLogger("hydra_tune.fusion")
_WARM_UPS, _TURNS = 2, 5
"""Units of each way: whose time does not count, and that are timed."""


class Steps(Protocol):
    """Runs the steps of one way."""

    @property
    def planned(self) -> PlannedStep:
        """The steps."""

    def close(self) -> None:
        """No more of them are run."""


S = TypeVar("S", bound=Steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredWay:
    """A way that was timed.

    Attributes:
        how: what the planner decides, by its name in the portfolio.
        predicted_seconds: of a step of all its members; by profiles as corrected, where it was planned once more.
        seconds: as measured.
        is_chosen: whether it is the one that goes on.
    """

    how: str
    predicted_seconds: float
    seconds: float
    is_chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What planned steps have proved to take.

    Attributes:
        sizes: members of each group.
        predicted_seconds: of a step of all of them, at first.
        seconds: as measured then.
        is_replanned: whether that was so far off that they were planned once more.
        ways: all that were timed, the first of all first.
    """

    sizes: tuple[int, ...]
    predicted_seconds: float
    seconds: float
    is_replanned: bool
    ways: tuple[MeasuredWay, ...]

    @property
    def seconds_each(self) -> float:
        """Of a step of the way that goes on, for each member."""
        return self._chosen.seconds / sum(self.sizes)

    @property
    def is_slower(self) -> bool:
        """Whether that way takes more than was predicted, by more than is tolerated."""
        return self._chosen.seconds > (1 + TOLERANCE) * self.predicted_seconds

    @property
    def _chosen(self) -> MeasuredWay:
        return next(way for way in self.ways if way.is_chosen)

    @property
    def told(self) -> str:
        """That in words, with its numbers."""
        sizes = " + ".join(map(str, self.sizes))
        found = (
            f"a planned step of {sizes} takes {self.seconds * 1e3:.3g} ms, where {self.predicted_seconds * 1e3:.3g} ms were "
            "predicted"
        )
        if not self.is_replanned:
            return found
        ways = ", ".join(
            f"{way.how} {way.seconds * 1e3:.3g} ms{' (chosen)' if way.is_chosen else ''}" for way in self.ways
        )
        return f"{found}; planned once more, and run in turn: {ways}"


class Ways(Generic[S]):
    """The ways of the planned steps of one group or pair, of which one runs at a time.

    Args:
        planned: the steps, as predicted to be fastest.
        make: what runs a way.
        replan: given what a step of `planned` has taken, other ways to run it, all of which fit; the first is it again,
            with what is predicted for it now.
        tell: is told once what was measured.
    """

    def __init__(
        self,
        planned: PlannedStep,
        make: Callable[[PlannedStep], S],
        replan: Callable[[PlannedStep, float], Sequence[PlannedStep]],
        tell: Callable[[Measured], None],
    ) -> None:
        self._first = planned
        self._make, self._replan, self._tell = make, replan, tell
        self._made = [make(planned)]
        self._predicted = [planned.part.times.seconds]
        self._seconds = 0.0
        self._race: RunOff[int] | None = RunOff([0], warm_ups=_WARM_UPS, turns=_TURNS)
        self._chosen = 0

    @property
    def current(self) -> S:
        """What runs the next steps."""
        now = None if self._race is None else self._race.next
        return self._made[self._chosen if now is None else now]

    @property
    def host_bytes(self) -> int:
        """Host memory for what is swapped."""
        return sum(one.planned.host_bytes for one in self._made)

    def took(self, seconds: float) -> None:
        """A step of `current` has taken so long."""
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
            again, *others = self._replan(self._first, self._seconds)
            for other in others:  # one by one: those that were made before another failed are ended below
                self._made.append(self._make(other))
            self._predicted = [one.part.times.seconds for one in (again, *others)]
        except Exception:  # the steps that there are go on
            _LOGGER.info("steps cannot be planned once more", exc_info=True)
            for one in self._made[1:]:
                one.close()
            del self._made[1:]
        if len(self._made) > 1:
            self._race = RunOff(range(len(self._made)), warm_ups=_WARM_UPS, turns=_TURNS)
        else:
            self._race = None
            self._told({0: self._seconds}, is_replanned=True)

    def close(self) -> None:
        """No more steps are run."""
        for one in self._made:
            one.close()

    def _end(self, race: RunOff[int]) -> None:
        """The fastest is known."""
        self._race, self._chosen = None, race.best
        self._told(race.seconds, is_replanned=True)
        best = self._made[self._chosen]
        for one in self._made:
            if one is not best:
                one.close()
        self._made, self._chosen = [best], 0

    def _told(self, seconds: dict[int, float], *, is_replanned: bool) -> None:
        ways = tuple(
            MeasuredWay(
                how=self._made[place].planned.part.way,
                predicted_seconds=self._predicted[place],
                seconds=found,
                is_chosen=place == self._chosen,
            )
            for place, found in seconds.items()
        )
        self._tell(
            Measured(
                sizes=self._first.part.sizes,
                predicted_seconds=self._first.part.times.seconds,
                seconds=self._seconds,
                is_replanned=is_replanned,
                ways=ways,
            )
        )
