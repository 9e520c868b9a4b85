"""Estimates the time of a plan's units on a core from their arithmetic, without a clock.

`PlanLibrary` (`shard/partition/plan_cache.py`) estimates a new plan to choose the activations, or where the plan cannot
be timed; `step_estimate.py` and `shard/partition/partition_planner.py` estimate candidates.

Note: the same core for all. Times measured once, on a machine with other work, err by more than the difference to be
decided: keeping activations instead of recomputing saves one forward, a quarter of a shard's time. Besides, the same
task should train in the same way every time, as planned. The core, like the copies (`devices/hardware/link.py`), is
therefore assumed to be an ordinary core.
"""

from collections.abc import Sequence

from torch.utils.flop_counter import FlopCounterMode

from hydra_tune.shard.cost.pilot import ShardPilot
from hydra_tune.shard.partition.plan import ShardPlan
from hydra_tune.shard.verify.step_outcome import UnitSeconds

_FLOPS_PER_SECOND = 2e10  # of float32 matrix products, of sizes usual for a single core
_BYTES_PER_SECOND = 4e9  # of operators' results, those of products included
_NODE_SECONDS = 5e-6  # overhead of each operator, whatever its size
_BACKWARD = 2  # times the arithmetic of the forward: a product per operand


class _WithoutModules:
    """In place of torch's tracker of modules, whose hooks of all modules would show in the steps of other threads."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        """Track nothing."""

    def __exit__(self, *_: object) -> None:
        """Track nothing."""


def estimated_seconds(pilot: ShardPilot, plan: ShardPlan, kept: ShardPlan) -> tuple[UnitSeconds, UnitSeconds]:
    """Estimate the seconds of the units of two plans on a core of a host; a GPU's seconds are far less.

    Both plans are cut in the same places.

    Returns:
        Seconds of the units of both plans.
    """
    forward = []
    for shard in plan.shards:
        flops = FlopCounterMode(display=False)
        flops.mod_tracker = _WithoutModules()  # type: ignore[assignment]
        with flops:
            made_bytes = pilot.try_forward(shard.graph)
        nodes = shard.graph.last - shard.graph.first
        products = flops.get_total_flops() / _FLOPS_PER_SECOND
        forward.append(products + made_bytes / _BYTES_PER_SECOND + nodes * _NODE_SECONDS)
    return _with_backward(plan, forward), _with_backward(kept, forward)


def _with_backward(plan: ShardPlan, forward: Sequence[float]) -> UnitSeconds:
    # A recompute adds one forward.
    times = [_BACKWARD + (not shard.keeps_activations) for shard in plan.shards]
    backward = tuple(count * seconds for count, seconds in zip(times, forward, strict=True))
    return UnitSeconds(forward=tuple(forward), backward=backward)
