"""Corrects profiles by the measured time of planned steps.

An operator does not take its profiled time in every plan: the machine changes its speed, other data lies in the caches,
and the computing thread is busy with copies as well. So plans are compared by steps that really run. Where
`StepPlanAutotuner` (`fusion/runtime/plan_autotuner.py`) finds a prediction off by more than a fifth during training,
`StepPlanner.replanned` (`fusion/runtime/step_planner.py`) corrects the arrays by the measurements, and plans the trials
once more (§3.2 has no such step).
"""

import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hydra_tune.planner.ir.plan_state import SubArraySchedule
from hydra_tune.planner.ir.step_profile import OperatorProfile, SubArrayProfile
from hydra_tune.planner.search.portfolio import PortfolioPlan, SubArrayPlan

TOLERANCE = 0.2
"""Relative difference between predicted and measured time that triggers a new plan (§3.2's portfolio, ours)."""

_EPSILON = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileCorrection:
    """Measured times relative to profiled times.

    Attributes:
        compute: number of trials in a sub-array -> time of the operators, measured over profiled.
        others: the same ratio for sub-arrays of other sizes.
        swap_seconds: time of the computing thread for each swap, beyond the prediction; negative if the prediction was
            too high.
    """

    compute: Mapping[int, float] = field(default_factory=dict)
    others: float = 1.0
    swap_seconds: float = 0.0

    def array(self, size: int, array: SubArrayProfile) -> SubArrayProfile:
        """Return a sub-array with corrected times.

        Args:
            size: number of trials.
            array: as profiled, or as corrected before.
        """
        # A swap has two copies. The extra time of a copy counts as hand-over, or as copying where the computing thread
        # copies.
        ratio, half = self.compute.get(size, self.others), self.swap_seconds / 2
        extra_seconds = dict.fromkeys(array.at_once, half)

        def slower(ops: tuple[OperatorProfile, ...]) -> tuple[OperatorProfile, ...]:
            return tuple(replace(op, seconds=op.seconds * ratio) for op in ops)

        return replace(
            array,
            forward=slower(array.forward),
            backward=slower(array.backward),
            hand_seconds=max(0.0, array.hand_seconds + half),
            out_seconds={
                name: max(0.0, seconds + extra_seconds.get(name, 0.0)) for name, seconds in array.out_seconds.items()
            },
            in_seconds={
                name: max(0.0, seconds + extra_seconds.get(name, 0.0)) for name, seconds in array.in_seconds.items()
            },
        )

    def seconds(self, part: SubArrayPlan) -> float:
        """Return the seconds that a part would take, without the extra time of its swaps.

        Args:
            part: as planned before the correction.
        """
        ratios = [self.compute.get(size, self.others) for size in part.sizes]
        array_seconds = [array.seconds for array in part.schedule.arrays]
        compute = sum(ratio * seconds for ratio, seconds in zip(ratios, array_seconds, strict=True))
        recompute_seconds = part.times.recompute * statistics.fmean(ratios)
        return compute + recompute_seconds + part.times.stall


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPlan:
    """A member that ran.

    Attributes:
        member: with the predictions after the last correction.
        seconds: measured, of a step of all trials.
    """

    member: PortfolioPlan
    seconds: float


def fitted(trials: Sequence[MeasuredPlan]) -> ProfileCorrection:
    """Return the correction that brings the predictions nearest to the measurements.

    Members without swaps show how long operators take. Other members of the same sub-arrays, if there are any, show how
    much swaps cost. For sub-arrays that run only with swaps, the remaining difference is attributed to the operators.

    Args:
        trials: at least one.
    """
    swapless_trials = [trial for trial in trials if _has_no_swaps(trial.member)] or list(trials)
    correction = _with_compute(ProfileCorrection(), swapless_trials)
    swapping_trials = [trial for trial in trials if trial not in swapless_trials]
    comparable_trials = [
        trial for trial in swapping_trials if _sizes(trial.member) <= correction.compute.keys()
    ] or swapping_trials
    if comparable_trials:
        correction = replace(
            correction, swap_seconds=statistics.median(_rest(correction, trial) for trial in comparable_trials)
        )
    return _with_compute(correction, swapping_trials)


def _with_compute(correction: ProfileCorrection, trials: Sequence[MeasuredPlan]) -> ProfileCorrection:
    """Add the operators' ratio of each sub-array that has no known ratio yet."""
    ratios = [(_ratio(correction, trial), _sizes(trial.member)) for trial in trials]
    compute = dict(correction.compute)
    for size in {size for _, sizes in ratios for size in sizes} - correction.compute.keys():
        # Prefer members of this size alone: the ratio of a member with several sizes mixes the sizes.
        own_ratios = [ratio for ratio, sizes in ratios if sizes == {size}]
        compute[size] = statistics.median(own_ratios or [ratio for ratio, sizes in ratios if size in sizes])
    return replace(correction, compute=compute, others=statistics.median(compute.values()))


def _ratio(correction: ProfileCorrection, trial: MeasuredPlan) -> float:
    """Time of the operators, measured over predicted, if the known cost of swaps is right."""
    stall = sum(part.times.stall for part in trial.member.parts)
    swaps = _num_swaps(trial.member) * correction.swap_seconds
    return max(trial.seconds - stall - swaps, 0.0) / max(trial.member.seconds - stall, _EPSILON)


def _rest(correction: ProfileCorrection, trial: MeasuredPlan) -> float:
    """Seconds that each swap of a member cost beyond the prediction."""
    seconds = sum(correction.seconds(part) for part in trial.member.parts)
    return (trial.seconds - seconds) / _num_swaps(trial.member)


def key_of(member: PortfolioPlan) -> Hashable:
    """Return the decisions of a member; members that do the same have equal keys.

    Args:
        member: of a portfolio.
    """
    return tuple((part.sizes, *_decided(part.schedule)) for part in member.parts)


def _decided(schedule: SubArraySchedule) -> tuple[Hashable, ...]:
    moved = (
        (
            frozenset(one.swaps.items()),
            frozenset((name, recomputation.ops) for name, recomputation in one.recomputes.items()),
            frozenset((name, *prompts.items()) for name, prompts in one.returns.items()),
        )
        for one in schedule.decisions
    )
    all_counts = (schedule.forward_before(one) for one in schedule.segments if one.backward is not None)
    return *moved, *(tuple(counts or ()) for counts in all_counts)


def _sizes(member: PortfolioPlan) -> set[int]:
    return {size for part in member.parts for size in part.sizes}


def _num_swaps(member: PortfolioPlan) -> int:
    return sum(len(decisions.swaps) for part in member.parts for decisions in part.schedule.decisions)


def _has_no_swaps(member: PortfolioPlan) -> bool:
    return not _num_swaps(member)
