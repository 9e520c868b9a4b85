"""Chooses for each shard whether its activations are kept for the backward (on the device or on the host) or recomputed.

`PlanLibrary` (`shard/partition/plan_cache.py`) chooses when the cut of a new plan is known; `step_estimate.py` chooses
likewise when a step's cost is predicted. `ShardPlanConstraints.room` (`shard/partition/budget.py`) makes the
`ActivationBudget`.

Note: the rule. Recomputing costs the time of the shard's forward. Keeping costs nothing while nothing else needs the
room; otherwise the activations go to the host and come back, at the cost of two copies. With `"auto"`, a shard's
activations are kept if keeping saves more seconds than two copies take, with no copy time hidden behind other work. The
activations are also kept if keeping saves any time and all units of the trial fit beside all kept activations, so that
the activations never move. All kept activations must also fit the trial's host memory. The shards that pay for their copies
are tried first, then the others, in both cases from the last to the first, because the activations of the last shard wait
for the shortest time. The pager handles kept activations like any other block.

Source: the choice between swap and recompute of mu-TWO (section 4.3), for shards instead of tensors. Differs: idle
times are not weighed, because the pager spills the kept activations with the most distant next use first.

Differs, on GPUs: the host does not know the GPU's seconds when a plan is made. The plan recomputes, but keeps activations
that never move. Once all units of the plan have run, `MeasuredActivationChoice` weighs the measured seconds of the forwards
against the measured speed of copies (`train/timing/shared_times.py` asks), and `TrialPlanCache` (`train/loop/plan_cache.py`)
goes on with the chosen plan. All choices give the same bits.

Note: no clock on CPU devices. The weighed seconds are estimates (`shard/cost/compute_estimate.py`,
`devices/hardware/link.py`), equal on each run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hydra_tune.devices.hardware.link import LinkCostModel
from hydra_tune.shard.cost.pilot import ShardPilot
from hydra_tune.shard.partition.plan import Shard, ShardPlan
from hydra_tune.shard.verify.step_outcome import UnitSeconds
from hydra_tune.task import Activations


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationBudget:
    """Room for keeping activations.

    Attributes:
        capacity_bytes: most bytes for a single unit on a device.
        budget_bytes: budget of a device.
        trials: number of trials that share a device.
        host_bytes: host memory for a single trial; None: unlimited.
    """

    capacity_bytes: int
    budget_bytes: int
    trials: int = 1
    host_bytes: int | None = None


def keeping(plan: ShardPlan, pilot: ShardPilot, wanted: Activations, room: ActivationBudget) -> ShardPlan:
    """Return the plan with the activations of each shard kept where keeping is possible and the units still fit a device.

    `plan` recomputes everywhere.

    Returns:
        A plan with other `activations` and costs of its shards; `plan` itself if nothing can be kept.
    """
    if wanted == "recompute" or plan.mode != "train":
        return plan
    # The last shard has no separate forward unit, so there is nothing to keep.
    *before, last = plan.shards
    shards = [_keeping(shard, pilot, wanted, room) for shard in before]
    return replace(plan, shards=(*shards, last)) if any(shard.keeps_activations for shard in shards) else plan


def chosen(
    plan: ShardPlan,
    kept: ShardPlan,
    seconds: UnitSeconds,
    kept_seconds: UnitSeconds,
    link: LinkCostModel | None,
    room: ActivationBudget,
) -> ShardPlan:
    """Return the plan that keeps activations where keeping is worthwhile; see the note above.

    `plan` recomputes everywhere, and `kept` keeps all that can be kept. Without `link`, where the units' seconds are
    not seconds of the devices, no copy can be weighed.
    """
    shards = list(plan.shards)
    spare = _spare_host_bytes(plan, room)
    gains = {
        index: _total(seconds, index) - _total(kept_seconds, index)
        for index, shard in enumerate(kept.shards)
        if shard.keeps_activations
    }
    last_first = sorted((index for index, gain in gains.items() if gain > 0), reverse=True)
    paying = [
        index for index in last_first if link is not None and gains[index] > _copied_seconds(kept.shards[index], link)
    ]
    # Shards that pay for their copies choose first; the others are kept only in room that nothing else needs.
    for index in (*paying, *(index for index in last_first if index not in paying)):
        candidate_shards = [*shards[:index], kept.shards[index], *shards[index + 1 :]]
        has_room = sum(shard.cost.kept_bytes for shard in candidate_shards) <= spare
        if has_room and (index in paying or _never_moves(candidate_shards, room)):
            shards = candidate_shards
    return replace(plan, shards=tuple(shards)) if any(shard.keeps_activations for shard in shards) else plan


class MeasuredActivationChoice:
    """A choice that waits for measurements: made once for all trials that run a plan.

    Args:
        plan: plan that recomputes everywhere.
        kept: plan that keeps everything that can be kept.
    """

    def __init__(self, plan: ShardPlan, kept: ShardPlan, link: LinkCostModel, room: ActivationBudget) -> None:
        self._plan, self._kept, self._link, self._room = plan, kept, link, room

    def made(self, running: ShardPlan, seconds: UnitSeconds) -> tuple[ShardPlan, UnitSeconds]:
        """Return the chosen plan, and the expected seconds of its units.

        `seconds` are the measured seconds of the units of `running`.
        """
        forward, backward = seconds.forward, seconds.backward
        kept_flags = [shard.keeps_activations for shard in running.shards]
        # A backward unit that recomputes runs the forward of its shard once more.
        computed = [b + f if is_kept else b for f, b, is_kept in zip(forward, backward, kept_flags, strict=True)]
        saved = [max(0.0, b - f) for f, b in zip(forward, computed, strict=True)]
        recomputing = UnitSeconds(forward=forward, backward=tuple(computed))
        keeping_all = UnitSeconds(forward=forward, backward=tuple(saved))
        plan = chosen(self._plan, self._kept, recomputing, keeping_all, self._link, self._room)
        return plan, seconds_of(plan, recomputing, keeping_all)


def seconds_of(plan: ShardPlan, seconds: UnitSeconds, kept_seconds: UnitSeconds) -> UnitSeconds:
    """Return the seconds of the units of a plan that keeps the activations of some shards."""

    def pick(computed: Sequence[float], kept: Sequence[float]) -> tuple[float, ...]:
        flags = (shard.keeps_activations for shard in plan.shards)
        return tuple(b if flag else a for a, b, flag in zip(computed, kept, flags, strict=True))

    return UnitSeconds(
        forward=pick(seconds.forward, kept_seconds.forward), backward=pick(seconds.backward, kept_seconds.backward)
    )


def _keeping(shard: Shard, pilot: ShardPilot, wanted: Activations, room: ActivationBudget) -> Shard:
    cost = pilot.cost_keeping(shard.graph.first, shard.graph.last) if shard.has_backward else None
    if cost is None or cost.peak_bytes > room.capacity_bytes:
        return shard
    return replace(shard, cost=cost, activations="spill" if wanted == "spill" else "keep")


def _spare_host_bytes(plan: ShardPlan, room: ActivationBudget) -> float:
    """Host memory left for kept activations that are spilled, so that keeping never keeps a trial out.

    Never below zero: a graph that refers only to parameters and to waiting values keeps no bytes, and is worth keeping
    wherever the trial's state is.
    """
    if room.host_bytes is None:
        return math.inf
    return max(0, room.host_bytes - sum(shard.cost.state_bytes + shard.cost.held_bytes for shard in plan.shards))


def _total(seconds: UnitSeconds, index: int) -> float:
    return seconds.forward[index] + seconds.backward[index]


def _copied_seconds(shard: Shard, link: LinkCostModel) -> float:
    """Seconds for sending a shard's kept activations to the host and back."""
    return 2 * link.seconds(shard.cost.kept_bytes, shard.cost.kept_blocks)


def _never_moves(shards: Sequence[Shard], room: ActivationBudget) -> bool:
    """Whether each unit has room beside the kept activations of all earlier shards."""
    waiting = 0
    for shard in shards:
        # Every trial of the device may have as many activations waiting at the same time.
        if shard.cost.peak_bytes + waiting * room.trials > room.budget_bytes:
            return False
        waiting += shard.cost.kept_bytes
    return True
