"""`GroupSizeChooser`: decide for `fusion="auto"` how many fusable trials compute together, by timing real steps.

`ExecutorSettings` (`pool/runtime/settings.py`) makes the chooser of a pool, and `GroupMatcher`
(`pool/fusion/group_matcher.py`) asks the chooser when a job looks for members of a new group;
`fusion/runtime/planned_group_size.py` and `GroupMatcher` use `steps_of`, and `pool/dry_run/fusion_report.py` times steps by
`timed_alone` and on an `UntracedPlanFactory`. The module must not train a group: `group_timing.py` runs steps, on copies.

Note: a lock is held while steps are timed, and `refuse` waits for the lock too, so no caller may hold the pool's lock.
"""

import logging
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hydra_tune.devices.device import Device
from hydra_tune.errors import UnfusableError
from hydra_tune.fusion.compile.batched_plan_cache import GroupPlanFactory
from hydra_tune.fusion.group.member import MemberBatchRequest, MemberTrial
from hydra_tune.fusion.matching.group_size_policy import FusionStepTimes, chosen_size, next_size, why
from hydra_tune.fusion.matching.group_timing import FusionBenchmark
from hydra_tune.shard.partition.plan_cache import PlanLibrary, PreparedPlan

_LOGGER = logging.getLogger("hydra_tune.fusion")
_LEAST_STEPS = 400  # for all trials together; timing a trial's step costs about ten steps
_UNKNOWN_STEPS = 1000  # assumed for a trial whose data has unknown length


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSizeChoice:
    """A choice of group size.

    Attributes:
        size: number of trials to compute together; 1: no fusion.
        timing: the measurements; None if nothing was timed.
    """

    size: int
    why: str
    timing: FusionStepTimes | None = None


class UntracedPlanFactory(GroupPlanFactory):
    """Plans that run operator by operator, since tracing a step takes longer than timing it."""

    @staticmethod
    def trace(
        prepared: PreparedPlan,
        state: dict[str, Tensor],
        inputs: tuple[Tensor, ...],
        count: int,
        *,
        divisor: int = 1,
        may_compile: bool = True,
        place: torch.device | None = None,
    ) -> None:
        """Do nothing."""


class GroupSizeChooser:
    """Times steps on the requesting device, and caches the results. Thread-safe; requests are answered one at a time."""

    def __init__(self, library: PlanLibrary) -> None:
        self._library = library
        self._plans = UntracedPlanFactory(library)
        self._lock = threading.Lock()
        self._timings: dict[Hashable, FusionStepTimes] = {}
        # Optimizer steps of all trials together, for which fusion did not pay, by kind and number of trials.
        self._refused: dict[Hashable, dict[int, float]] = {}

    def refuse(self, kind: Hashable, num_steps: float, most: int) -> None:
        """Refuse a kind of trial at once if the answer is already known.

        Args:
            kind: as of `choose`.
            num_steps: upper bound on the remaining optimizer steps of all trials of the kind together.
            most: upper bound on the number of these trials.

        Raises:
            UnfusableError: so few steps of so few trials did not gain before, or the steps are too few to justify timing.
        """
        with self._lock:
            refused = self._refused.get(kind, {})
            if any(most <= number and num_steps <= steps for number, steps in refused.items()):
                raise UnfusableError("trials of its kind do not gain by being computed together, as was found before")
            if self._are_few(kind, num_steps):
                raise UnfusableError(_too_few(num_steps))

    def _are_few(self, kind: Hashable, num_steps: float) -> bool:
        return kind not in self._timings and num_steps < _LEAST_STEPS

    def choose(
        self,
        kind: Hashable,
        member: MemberTrial,
        wanted: MemberBatchRequest,
        device: Device,
        num_steps: Sequence[float],
        most: int,
    ) -> GroupSizeChoice:
        """Choose how many trials to compute together; the members and batches are only read."""
        most = min(most, len(num_steps))
        with self._lock:
            # The lock is held while steps are timed: concurrent probes would disturb each other's times.
            choice = self._chosen(kind, member, wanted, device, sum(num_steps), most)
            if choice.size == 1:
                # If so many steps did not pay, fewer steps of as many trials, or of fewer, will not pay either.
                refused = self._refused.setdefault(kind, {})
                refused[most] = max(sum(num_steps), refused.get(most, 0))
        _LOGGER.info("%s", choice.why)
        return choice

    def _chosen(
        self,
        kind: Hashable,
        member: MemberTrial,
        wanted: MemberBatchRequest,
        device: Device,
        num_steps: float,
        most: int,
    ) -> GroupSizeChoice:
        timing = self._timings.get(kind)
        if self._are_few(kind, num_steps):
            return GroupSizeChoice(size=1, why=_too_few(num_steps))
        bench = FusionBenchmark(member.task, member.built()[0], wanted.batch, self._library, device)
        began = bench.now()
        try:
            if timing is None:
                timing = timed_alone(bench)
            # All remaining work without fusion, of which the measurements may cost a share.
            total = num_steps * (timing.alone_seconds + timing.drawing_seconds)
            while (size := next_size(timing, most, total, bench.now() - began)) is not None:
                timing = timing.with_size(size, bench.together(size, self._plans))
        except Exception as error:  # a genuine error comes up again where the trial runs
            _LOGGER.info("timing what fusion would gain has failed", exc_info=True)
            if timing is None or not timing.group_seconds:
                return GroupSizeChoice(
                    size=1, why=f"timing what it would gain has failed: {type(error).__name__}: {error}"
                )
            # A larger group failed, out of memory for example; the smaller groups timed before may gain all the same.
        self._timings[kind] = timing
        size = chosen_size(timing, most, num_steps)
        return GroupSizeChoice(size=size, why=why(timing, size, most), timing=timing)


def _too_few(num_steps: float) -> str:
    return f"{num_steps:.0f} optimizer steps in all are too few to find out what fusion would gain"


def timed_alone(bench: FusionBenchmark) -> FusionStepTimes:
    """Time a step of a single trial."""
    return FusionStepTimes(alone_seconds=bench.alone(), drawing_seconds=bench.drawing())


def steps_of(member: MemberTrial) -> float:
    """Return the remaining optimizer steps of a trial, as far as its data has a known length."""
    total = member.progress.num_steps
    return _UNKNOWN_STEPS if total is None else total - member.progress.steps
