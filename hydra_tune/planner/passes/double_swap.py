"""Swapped feature maps that leave the device once more between two uses in the backward, where nothing else helps.

The paper has no such step: its maps stay from the first use in the backward to the last. The copy on the host still
exists, so a map that the backward leaves unchanged need not be copied out again. The map is freed behind a use, and
copied back before the next use.
"""

from bisect import bisect_left
from collections.abc import Container

from hydra_tune.planner.cost.peak_memory import SegmentMemory, simulated
from hydra_tune.planner.ir.plan_state import ScheduleSegment, SubArraySchedule
from hydra_tune.planner.ir.step_profile import FeatureMap


def absence(schedule: SubArraySchedule, side: int, one: FeatureMap, rank: int) -> tuple[int, int] | None:
    """Return the uses of a feature map before and after a backward operator, if the map may leave in between.

    None where the map may not leave, where the operator uses the map, and where the map is away already.

    Args:
        schedule: the decisions.
        side: index of the sub-array.
        one: the feature map.
        rank: of the operator.
    """
    array, decided = schedule.arrays[side], schedule.decisions[side]
    if one.name not in array.returning or one.name in decided.recomputes:
        return None
    uses = decided.uses(one, array.backward_ranks[one.name])
    behind = bisect_left(uses, rank)
    if not 0 < behind < len(uses) or uses[behind] == rank:
        return None
    last, need = uses[behind - 1], uses[behind]
    known = decided.returns.get(one.name, {})
    return None if any(last <= left < need for left in known) else (last, need)


def returned(
    schedule: SubArraySchedule, segment: ScheduleSegment, memory: SegmentMemory, may_swap: Container[str]
) -> SubArraySchedule | None:
    """Return the schedule with one more map away at the peak; None where no map qualifies.

    Args:
        schedule: the decisions; left as it is.
        segment: of the schedule.
        memory: of the segment.
        may_swap: feature maps of the backward's sub-array that are not swapped and may be.
    """
    side = segment.backward
    if side is None:
        return None
    array, swaps = schedule.arrays[side], schedule.decisions[side].swaps
    found: list[tuple[float, FeatureMap, int, int]] = []
    for name, one in array.maps.items():
        around = absence(schedule, side, one, memory.peak_backward)
        if around is not None and one.num_bytes and (name in swaps or name in may_swap):
            # Prefer the map that frees the most bytes for each second of copying back.
            found.append((one.num_bytes / max(one.in_seconds, 1e-12), one, *around))
    if not found:
        return None
    _, one, last, need = max(found, key=lambda each: each[0])
    changed = schedule.copy()
    decided = changed.decisions[side]
    decided.swaps.setdefault(one.name, decided.first_need(one))
    # First without a head start: `_prompt` looks for room in the memory without the map.
    decided.returns.setdefault(one.name, {})[last] = need
    decided.returns[one.name][last] = _prompt(changed, segment, one, last, need)
    return changed


def _prompt(schedule: SubArraySchedule, segment: ScheduleSegment, one: FeatureMap, last: int, need: int) -> int:
    """Return the rank before which the copy back begins, as in Algorithm C.

    The copy begins as many operators before the use as are needed to hide the copy, and as leave room for the map.
    """
    assert segment.backward is not None, "it is used there"
    ops, memory = schedule.arrays[segment.backward].backward, simulated(schedule, segment)
    rest, prompt = one.in_seconds, need
    while rest > 0 and prompt - 1 > last and memory.by_rank[prompt - 1] + one.num_bytes <= schedule.limit_bytes:
        prompt -= 1
        rest -= ops[prompt].seconds
    return prompt
