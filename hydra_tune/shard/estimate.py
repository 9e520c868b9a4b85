"""How long a plan's units take on a core, by their arithmetic: what is decided beforehand is decided by this, and by no clock.

Note: one core for all. Units that are timed once, on a machine that does other work besides, are off by more than what there is
to decide: keeping activations instead of computing them again saves one forward of three. And the same task should train in the
same way every time, and as its plan says. So the core, like the copies (`devices/link.py`), is taken to be an ordinary one.
"""

from collections.abc import Sequence

from torch.utils.flop_counter import FlopCounterMode

from hydra_tune.shard.outcome import UnitSeconds
from hydra_tune.shard.pilot import Pilot
from hydra_tune.shard.plan import Plan

_FLOPS_PER_SECOND = 2e10  # of products in float32, of the sizes that one core is given
_BYTES_PER_SECOND = 4e9  # written by operators that are no products
_NODE_SECONDS = 5e-6  # of each operator, whatever its size
_BACKWARD = 2  # times the arithmetic of the forward: a product for each operand


def estimated_seconds(pilot: Pilot, plan: Plan, kept: Plan) -> tuple[UnitSeconds, UnitSeconds]:
    """Of the units of two plans on one core of a host; those of a GPU are far less.

    A unit takes the time of its products, and of writing what it makes. It is a guess: good enough to tell whether it is
    quicker to compute a shard's activations again than to copy them.

    Args:
        pilot: of the step.
        plan: one of them.
        kept: cut in the same places, keeps activations of other shards.

    Returns:
        Seconds of both.
    """
    forward = []
    for shard in plan.shards:
        with FlopCounterMode(display=False) as flops:
            made_bytes = pilot.try_forward(shard.graph)
        nodes = shard.graph.last - shard.graph.first
        products = flops.get_total_flops() / _FLOPS_PER_SECOND
        forward.append(products + made_bytes / _BYTES_PER_SECOND + nodes * _NODE_SECONDS)
    return _with_backward(plan, forward), _with_backward(kept, forward)


def _with_backward(plan: Plan, forward: Sequence[float]) -> UnitSeconds:
    times = [_BACKWARD + (not shard.keeps_activations) for shard in plan.shards]
    backward = tuple(count * seconds for count, seconds in zip(times, forward, strict=True))
    return UnitSeconds(forward=tuple(forward), backward=backward)
