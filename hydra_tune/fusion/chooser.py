"""`Chooser`: says of trials that could be one group how many of them are computed together, for `fusion="auto"`."""

import logging
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hydra_tune.devices.device import Device
from hydra_tune.errors import UnfusableError
from hydra_tune.fusion.choice import Timing, chosen_size, next_size, why
from hydra_tune.fusion.member import Member, Wanted
from hydra_tune.fusion.plans import GroupPlans
from hydra_tune.fusion.probe import Bench
from hydra_tune.shard.library import PlanLibrary, Prepared

_LOGGER = logging.getLogger("hydra_tune.fusion")
_LEAST_STEPS = 400  # of all trials together; a step of one is timed at the cost of some ten of them
_UNKNOWN_STEPS = 1000  # of a trial whose data does not tell their number


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was chosen.

    Attributes:
        size: trials to compute together; 1: each by itself.
        why: in words, with the numbers.
        timing: what was seen; None where nothing was timed.
    """

    size: int
    why: str
    timing: Timing | None = None


class UntracedPlans(GroupPlans):
    """Plans that run operator by operator: to trace a step takes longer than to time it."""

    @staticmethod
    def trace(
        prepared: Prepared,
        state: dict[str, Tensor],
        inputs: tuple[Tensor, ...],
        count: int,
        *,
        accumulate: int = 1,
        may_compile: bool = True,
        place: torch.device | None = None,
    ) -> None:
        """Not done."""


class Chooser:
    """Times steps on the device that asks, and remembers what it has seen. Any thread may ask; one at a time is answered.

    Args:
        library: where plans come from.
    """

    def __init__(self, library: PlanLibrary) -> None:
        self._library = library
        self._plans = UntracedPlans(library)
        self._lock = threading.Lock()
        self._timings: dict[Hashable, Timing] = {}
        self._refused: dict[
            Hashable, float
        ] = {}  # optimizer steps of all trials together, for which nothing was gained

    def refuse(self, kind: Hashable, num_steps: float) -> None:
        """Say at once of a kind of trial what is known already.

        Args:
            kind: as of `choose`.
            num_steps: the most optimizer steps that trials of this kind may have to go together.

        Raises:
            UnfusableError: as many steps have been found to be too few before, or are too few to find out.
        """
        with self._lock:
            if num_steps <= self._refused.get(kind, -1):
                raise UnfusableError("trials of its kind do not gain by being computed together, as was found before")
            if self._are_few(kind, num_steps):
                raise UnfusableError(_too_few(num_steps))

    def _are_few(self, kind: Hashable, num_steps: float) -> bool:
        return kind not in self._timings and num_steps < _LEAST_STEPS

    def choose(
        self, kind: Hashable, member: Member, wanted: Wanted, device: Device, num_steps: Sequence[float], most: int
    ) -> Choice:
        """How many of some trials to compute together.

        Args:
            kind: what their steps have in common: equal kinds take equally long.
            member: one of them, built; only read.
            wanted: its first batch; only read.
            device: where steps are timed.
            num_steps: optimizer steps that each of them has to go; see `steps_of`.
            most: of them that a device has room for.

        Returns:
            The choice, which is in the log too.
        """
        most = min(most, len(num_steps))
        with self._lock:
            choice = self._chosen(kind, member, wanted, device, sum(num_steps), most)
            if choice.size == 1:
                self._refused[kind] = max(sum(num_steps), self._refused.get(kind, 0))
        _LOGGER.info("%s", choice.why)
        return choice

    def _chosen(
        self, kind: Hashable, member: Member, wanted: Wanted, device: Device, num_steps: float, most: int
    ) -> Choice:
        timing = self._timings.get(kind)
        if self._are_few(kind, num_steps):
            return Choice(size=1, why=_too_few(num_steps))
        bench = Bench(member.task, member.built()[0], wanted.batch, self._library, device)
        began = bench.now()
        try:
            if timing is None:
                timing = timed_alone(bench)
            total = num_steps * (timing.alone_seconds + timing.drawing_seconds)
            while (size := next_size(timing, most, total, bench.now() - began)) is not None:
                timing = timing.with_size(size, bench.together(size, self._plans))
        except Exception as error:  # whatever there is to it comes up again where the trial runs
            _LOGGER.info("what fusion would gain cannot be timed", exc_info=True)
            return Choice(size=1, why=f"what it would gain cannot be timed: {type(error).__name__}: {error}")
        self._timings[kind] = timing
        size = chosen_size(timing, most, num_steps)
        return Choice(size=size, why=why(timing, size, most), timing=timing)


def _too_few(num_steps: float) -> str:
    return f"{num_steps:.0f} optimizer steps in all are too few to find out what fusion would gain"


def timed_alone(bench: Bench) -> Timing:
    """What a step of one trial takes."""
    return Timing(alone_seconds=bench.alone(), drawing_seconds=bench.drawing())


def steps_of(member: Member) -> float:
    """Optimizer steps that a trial has to go, as far as its data tells."""
    total = member.progress.num_steps
    return _UNKNOWN_STEPS if total is None else total - member.progress.steps
