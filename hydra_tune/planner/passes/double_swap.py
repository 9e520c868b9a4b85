"""Swapped feature maps that leave the device once more between two uses in the backward, where nothing else helps.

The paper has no such step: its maps stay from the first use in the backward to the last. The copy on the host still
exists, so a map that the backward leaves unchanged need not be copied out again. The map is freed behind a use, and
copied back before the next use. `swap_recompute.py` calls `returned` in a round without candidates, once the segment
has no forward operator left to take out, and simulates the segments again after each change. `planner/ir/lowering.py` turns
each entry of `returns` into an early end of the map and a copy back. A pass must not run a step or read a clock.
"""

from bisect import bisect_left
from collections.abc import Container

from hydra_tune.planner.cost.peak_memory import SegmentMemory, simulated
from hydra_tune.planner.ir.plan_state import ScheduleSegment, SubArraySchedule
from hydra_tune.planner.ir.step_profile import FeatureMap


def absence(schedule: SubArraySchedule, side: int, one: FeatureMap, rank: int) -> tuple[int, int] | None:
    """Return the uses of a feature map before and after a backward operator, if the map may leave in between.

    None where the map may not leave, where the operator uses the map, where no use comes before or none comes after, and
    where the map is away already.
    """
    array, decisions = schedule.arrays[side], schedule.decisions[side]
    if one.name not in array.returning or one.name in decisions.recomputes:
        return None
    uses = decisions.uses(one, array.backward_ranks[one.name])
    index = bisect_left(uses, rank)
    if not 0 < index < len(uses) or uses[index] == rank:
        return None
    last_use, need = uses[index - 1], uses[index]
    absences = decisions.returns.get(one.name, {})
    return None if any(last_use <= departure < need for departure in absences) else (last_use, need)


def returned(
    schedule: SubArraySchedule, segment: ScheduleSegment, memory: SegmentMemory, may_swap: Container[str]
) -> SubArraySchedule | None:
    """Return the schedule with one more map away at the peak; None where no map qualifies.

    `may_swap` holds feature maps of the backward's sub-array that are not swapped and may be.
    """
    side = segment.backward
    if side is None:
        return None
    array, swaps = schedule.arrays[side], schedule.decisions[side].swaps
    options: list[tuple[float, FeatureMap, int, int]] = []
    for name, feature_map in array.maps.items():
        uses = absence(schedule, side, feature_map, memory.peak_backward)
        if uses is not None and feature_map.num_bytes and (name in swaps or name in may_swap):
            # Prefer the map that frees the most bytes for each second of copying back.
            options.append((feature_map.num_bytes / max(feature_map.in_seconds, 1e-12), feature_map, *uses))
    if not options:
        return None
    _, feature_map, last_use, need = max(options, key=lambda option: option[0])
    changed = schedule.copy()
    decisions = changed.decisions[side]
    decisions.swaps.setdefault(feature_map.name, decisions.first_need(feature_map))
    # First without a head start: `_prompt` looks for room in the memory without the map.
    decisions.returns.setdefault(feature_map.name, {})[last_use] = need
    decisions.returns[feature_map.name][last_use] = _prompt(changed, segment, feature_map, last_use, need)
    return changed


def _prompt(schedule: SubArraySchedule, segment: ScheduleSegment, one: FeatureMap, last: int, need: int) -> int:
    """Return the rank before which the copy back begins, as in Algorithm C.

    The copy begins as many operators before the use as are needed to hide the copy, and as leave room for the map.
    """
    assert segment.backward is not None, "it is used there"
    ops, memory = schedule.arrays[segment.backward].backward, simulated(schedule, segment)
    seconds_left, prompt = one.in_seconds, need
    while seconds_left > 0 and prompt - 1 > last and memory.by_rank[prompt - 1] + one.num_bytes <= schedule.limit_bytes:
        prompt -= 1
        seconds_left -= ops[prompt].seconds
    return prompt
