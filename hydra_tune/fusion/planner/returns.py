"""Swapped feature maps that the backward uses twice or more: taken away once more between two uses, where nothing else helps.

Not in the paper, whose maps stay from their first use in the backward to the last. The copy on the host is still there, and
what the backward leaves as it is need not be sent away again: it is freed behind one use, and copied back before the next.
"""

from bisect import bisect_left
from collections.abc import Container

from hydra_tune.fusion.planner.arrays import FeatureMap
from hydra_tune.fusion.planner.memory import Memory, simulated
from hydra_tune.fusion.planner.schedule import Schedule, Segment


def absence(schedule: Schedule, side: int, one: FeatureMap, rank: int) -> tuple[int, int] | None:
    """The uses of a feature map around a backward operator, where it may be away between them and is not yet.

    Args:
        schedule: what has been decided.
        side: of which sub-array.
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


def returned(schedule: Schedule, segment: Segment, memory: Memory, may_swap: Container[str]) -> Schedule | None:
    """The schedule with one map more that is away at its peak; None where there is none.

    Args:
        schedule: what has been decided; left as it is.
        segment: of it.
        memory: of that.
        may_swap: feature maps of its backward's sub-array that are not swapped and may be.
    """
    side = segment.backward
    if side is None:
        return None
    array, swaps = schedule.arrays[side], schedule.decisions[side].swaps
    found: list[tuple[float, FeatureMap, int, int]] = []
    for name, one in array.maps.items():
        around = absence(schedule, side, one, memory.peak_backward)
        if around is not None and one.num_bytes and (name in swaps or name in may_swap):
            found.append((one.num_bytes / max(one.in_seconds, 1e-12), one, *around))
    if not found:
        return None
    _, one, last, need = max(found, key=lambda each: each[0])
    changed = schedule.copy()
    decided = changed.decisions[side]
    decided.swaps.setdefault(one.name, decided.first_need(one))
    decided.returns.setdefault(one.name, {})[last] = need
    decided.returns[one.name][last] = _prompt(changed, segment, one, last, need)
    return changed


def _prompt(schedule: Schedule, segment: Segment, one: FeatureMap, last: int, need: int) -> int:
    """As in Algorithm C, where the copy begins: as many operators before the use as hide it and leave room for the map."""
    assert segment.backward is not None, "it is used there"
    ops, memory = schedule.arrays[segment.backward].backward, simulated(schedule, segment)
    rest, prompt = one.in_seconds, need
    while rest > 0 and prompt - 1 > last and memory.by_rank[prompt - 1] + one.num_bytes <= schedule.limit_bytes:
        prompt -= 1
        rest -= ops[prompt].seconds
    return prompt
