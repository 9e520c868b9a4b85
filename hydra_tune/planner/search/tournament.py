"""Run-off: candidates make steps in turns, and a candidate that is clearly slower leaves.

In turns, the candidates find the machine in about the same state. The run-off is a state without a clock: while a group
trains, `StepPlanAutotuner` (`fusion/runtime/plan_autotuner.py`) asks for the next candidate and reports the seconds of
a step. A step counts relative to the steps of the remaining candidates in the same turn, because a machine with other
users changes its speed between turns. Benchmarks, such as `benchmarks/interleaving.py`, time ways of training in a
run-off, too.

A run-off has no lock, and each call of `took` reports the step of the candidate that `next` names. The module must not
know groups or devices.
"""

import statistics
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

WARM_UPS, TURNS = 2, 9
"""Turns that do not count, and turns that count; `StepPlanAutotuner` gives numbers of its own."""

LEAVES_AT = 1.3
"""A candidate slower than the fastest by more than this factor leaves after a turn that counts, from the third such turn on."""

_LEAST_TURNS = 3


class SpeedTournament(Generic[Key]):
    """State of a run-off: the candidate that is next, until all turns are over.

        race = SpeedTournament(["a", "b"])
        while (name := race.next) is not None:
            race.took(seconds_of_a_step(name))
        race.best, race.seconds

    Args:
        candidates: in the order of their steps within a turn; all different.
        leaves_at: a candidate leaves above so many times the seconds of the fastest.

    Raises:
        ValueError: there are no candidates.
    """

    def __init__(
        self,
        candidates: Sequence[Key],
        *,
        warm_ups: int = WARM_UPS,
        turns: int = TURNS,
        leaves_at: float = LEAVES_AT,
    ) -> None:
        if not candidates:
            raise ValueError("a run-off needs candidates, and there are none")
        self._all, self._in = list(candidates), list(candidates)
        self._warm_ups, self._turns, self._leaves_at = warm_ups, turns, leaves_at
        self._place = 0
        self._turn: dict[Key, float] = {}
        self._found: list[dict[Key, float]] = []  # of each turn that counts

    @property
    def next(self) -> Key | None:
        """Candidate that makes the next step; None when all turns are over."""
        return None if len(self._found) >= self._turns else self._in[self._place]

    def took(self, seconds: float) -> None:
        """Report the step of the candidate that `next` names."""
        self._turn[self._in[self._place]] = seconds
        self._place += 1
        if self._place == len(self._in):
            self._end_turn()

    @property
    def seconds(self) -> dict[Key, float]:
        """Seconds of a step of each candidate, by the turns so far; without candidates that have no counted turn."""
        if not self._found:
            return {}
        # Shares of a turn's mean cancel the speed of the machine in that turn. Only remaining candidates have a step in
        # every turn, so only remaining candidates make up the means.
        means = [statistics.fmean(turn[candidate] for candidate in self._in) for turn in self._found]
        usual = statistics.median(means)
        step_seconds: dict[Key, float] = {}
        for candidate in self._all:
            shares = [
                turn[candidate] / mean if mean else 1.0  # a clock of large steps may measure nothing
                for turn, mean in zip(self._found, means, strict=True)
                if candidate in turn
            ]
            if shares:
                step_seconds[candidate] = statistics.median(shares) * usual
        return step_seconds

    @property
    def best(self) -> Key:
        """The fastest remaining candidate, by the turns so far; the first candidate before any counted turn."""
        seconds = self.seconds
        return min(self._in, key=lambda candidate: seconds.get(candidate, 0.0))

    def _end_turn(self) -> None:
        turn, self._turn, self._place = self._turn, {}, 0
        if self._warm_ups:
            self._warm_ups -= 1
            return
        self._found.append(turn)
        if len(self._found) >= _LEAST_TURNS:
            seconds = self.seconds
            least = min(seconds[candidate] for candidate in self._in)
            self._in = [candidate for candidate in self._in if seconds[candidate] <= least * self._leaves_at]
