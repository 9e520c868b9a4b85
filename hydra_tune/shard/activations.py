"""Whether a shard's activations wait for its backward, on the device or on the host, or are computed again.

Note: the rule. Computing again costs the seconds of the shard's forward. What is kept costs nothing as long as nothing else
wants its room; otherwise it goes to the host and comes back, which costs two copies. So `"auto"` keeps a shard's activations
where that saves more seconds than two copies take, nothing of them hidden behind other work; and also where it saves any, and
all units of the trial fit beside what is kept, so that it never has to move. Shards from the last on: theirs wait for the
shortest time. What is kept is in the pager's hands like any other block, so a rule that was wrong costs time and never room.

Source: the choice between swap and recompute of mu-TWO (section 4.3), for shards instead of tensors. Differs: idle times are
not weighed, because among what is kept the pager spills first what is needed last.

Differs, on GPUs: what units and copies take there is not known when the plan is made on the host, so `"auto"` recomputes.

Note: no clock. The seconds that are weighed are estimates (`shard/estimate.py`, `devices/link.py`), the same each time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hydra_tune.devices.link import Link
from hydra_tune.shard.outcome import UnitSeconds
from hydra_tune.shard.pilot import Pilot
from hydra_tune.shard.plan import Plan, Shard
from hydra_tune.task import Activations


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What there is to keep activations in.

    Attributes:
        capacity_bytes: the most that one unit may take on a device.
        budget_bytes: of a device.
        trials: that share a device.
        host_bytes: of the host, for one trial; None for as much as it likes.
    """

    capacity_bytes: int
    budget_bytes: int
    trials: int = 1
    host_bytes: int | None = None


def keeping(plan: Plan, pilot: Pilot, wanted: Activations, room: Room) -> Plan:
    """The plan with the activations of all shards kept where they can be and the units still fit a device.

    Args:
        plan: recomputes everywhere.
        pilot: of its step.
        wanted: by the task.
        room: what there is.

    Returns:
        A plan that differs in what its shards do with activations, and in what they cost; `plan` itself if nothing can be kept.
    """
    if wanted == "recompute" or plan.mode != "train":
        return plan
    *before, last = plan.shards
    shards = [_keeping(shard, pilot, wanted, room) for shard in before]
    return replace(plan, shards=(*shards, last)) if any(shard.keeps_activations for shard in shards) else plan


def chosen(
    plan: Plan, kept: Plan, seconds: UnitSeconds, kept_seconds: UnitSeconds, link: Link | None, room: Room
) -> Plan:
    """The plan that keeps activations where that is worth it; see the note above.

    Args:
        plan: recomputes everywhere.
        kept: keeps what can be kept.
        seconds: that the units of `plan` are taken to need.
        kept_seconds: those of `kept`.
        link: how fast copies are taken to be; None where the units' seconds are not those of the devices, so that nothing
            can be compared.
        room: what there is.
    """
    if link is None:
        return plan
    shards = list(plan.shards)
    spare = _spare_host_bytes(plan, room)
    gains = {
        index: _total(seconds, index) - _total(kept_seconds, index)
        for index, shard in enumerate(kept.shards)
        if shard.keeps_activations
    }
    last_first = sorted((index for index, gain in gains.items() if gain > 0), reverse=True)
    paying = [index for index in last_first if gains[index] > _copied_seconds(kept.shards[index], link)]
    for index in (*paying, *(index for index in last_first if index not in paying)):
        tried = [*shards[:index], kept.shards[index], *shards[index + 1 :]]
        has_room = sum(shard.cost.kept_bytes for shard in tried) <= spare
        if has_room and (index in paying or _never_moves(tried, room)):
            shards = tried
    return replace(plan, shards=tuple(shards))


def seconds_of(plan: Plan, seconds: UnitSeconds, kept_seconds: UnitSeconds) -> UnitSeconds:
    """Of the units of a plan that keeps the activations of some shards."""

    def pick(computed: Sequence[float], kept: Sequence[float]) -> tuple[float, ...]:
        flags = (shard.keeps_activations for shard in plan.shards)
        return tuple(b if flag else a for a, b, flag in zip(computed, kept, flags, strict=True))

    return UnitSeconds(
        forward=pick(seconds.forward, kept_seconds.forward), backward=pick(seconds.backward, kept_seconds.backward)
    )


def _keeping(shard: Shard, pilot: Pilot, wanted: Activations, room: Room) -> Shard:
    cost = pilot.cost_keeping(shard.graph.first, shard.graph.last) if shard.has_backward else None
    if cost is None or cost.peak_bytes > room.capacity_bytes:
        return shard
    return replace(shard, cost=cost, activations="spill" if wanted == "spill" else "keep")


def _spare_host_bytes(plan: Plan, room: Room) -> float:
    """What the host has left for kept activations that are spilled, so that keeping them never keeps a trial out.

    Never less than nothing: a graph that refers only to parameters and to values that wait anyway keeps no bytes, and is worth
    keeping wherever the trial's state is.
    """
    if room.host_bytes is None:
        return math.inf
    return max(0, room.host_bytes - sum(shard.cost.state_bytes + shard.cost.held_bytes for shard in plan.shards))


def _total(seconds: UnitSeconds, index: int) -> float:
    return seconds.forward[index] + seconds.backward[index]


def _copied_seconds(shard: Shard, link: Link) -> float:
    """Of sending what a shard keeps to the host and getting it back."""
    return 2 * link.seconds(shard.cost.kept_bytes, shard.cost.kept_blocks)


def _never_moves(shards: Sequence[Shard], room: Room) -> bool:
    """Whether at each unit there is room for what the shards before it have kept."""
    waiting = 0
    for shard in shards:
        if shard.cost.peak_bytes + waiting * room.trials > room.budget_bytes:
            return False
        waiting += shard.cost.kept_bytes
    return True
