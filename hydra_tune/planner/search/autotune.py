"""Corrects profiles by the measured time of a planned step.

An operator does not take its profiled time in every plan: the machine changes its speed, other data lies in the caches,
and the computing thread is busy with copies as well. So plans are compared by steps that really run. Where
`StepPlanAutotuner` (`fusion/runtime/plan_autotuner.py`) finds a prediction off by more than a fifth during training,
`StepPlanner.replanned` (`fusion/runtime/step_planner.py`) corrects the arrays by the measurement, and plans the trials
once more (§3.2 has no such step). `key_of` tells ways apart that make different decisions. The module must not know groups
or devices: a step is profiles, plans and seconds here.
"""

from collections.abc import Hashable
from dataclasses import replace

from hydra_tune.planner.ir.plan_state import SubArraySchedule
from hydra_tune.planner.ir.step_profile import OperatorProfile, SubArrayProfile
from hydra_tune.planner.search.portfolio import PortfolioPlan, SubArrayPlan

TOLERANCE = 0.2
"""Difference of a measured from the predicted time, over the predicted, above which plans are made again; not in the paper."""

_EPSILON = 1e-12


def operator_ratio(part: SubArrayPlan, seconds: float) -> float:
    """Return the time of the operators of a part, measured over predicted, from the measured `seconds` of a step.

    The predicted stalls (waits for copies, hand-overs and small copies) are taken off both times, because a single
    measurement cannot tell stalls from operators.
    """
    stall = part.times.stall
    return max(seconds - stall, 0.0) / max(part.times.seconds - stall, _EPSILON)


def slowed(array: SubArrayProfile, ratio: float) -> SubArrayProfile:
    """Return a sub-array whose operators take `ratio` times as long."""

    def slower(ops: tuple[OperatorProfile, ...]) -> tuple[OperatorProfile, ...]:
        return tuple(replace(op, seconds=op.seconds * ratio) for op in ops)

    return replace(array, forward=slower(array.forward), backward=slower(array.backward))


def key_of(member: PortfolioPlan) -> Hashable:
    """Return a key of a member's decisions; members with equal keys do the same."""
    return tuple((part.sizes, *_decided(part.schedule)) for part in member.parts)


def _decided(schedule: SubArraySchedule) -> tuple[Hashable, ...]:
    moved = (
        (
            frozenset(one.swaps.items()),
            frozenset((name, recomputation.ops) for name, recomputation in one.recomputes.items()),
            frozenset((name, *prompts.items()) for name, prompts in one.returns.items() if prompts),
        )
        for one in schedule.decisions
    )
    all_counts = (schedule.forward_before(one) for one in schedule.segments if one.backward is not None)
    return *moved, *(tuple(counts or ()) for counts in all_counts)
