"""How long a plan's units may take, where nobody runs them: from their arithmetic, and how fast this host's core is at it."""

import functools
import time
from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode

from hydra_tune.shard.outcome import UnitSeconds
from hydra_tune.shard.pilot import Pilot
from hydra_tune.shard.plan import Plan

_SIDE, _ROUNDS = 384, 3
_COPY_BYTES = 8 << 20
_BACKWARD = 2  # times the arithmetic of the forward: a product for each operand


def estimated_seconds(plan: Plan, pilot: Pilot) -> UnitSeconds:
    """Of the units of a plan on one core of the host; those of a GPU are far less.

    A unit takes the time of its products, and of writing what it makes. It is a guess: good enough to tell whether it is
    quicker to compute a shard's activations again than to copy them.
    """
    flops_per_second, bytes_per_second = _speed()
    forward, backward = [], []
    for shard in plan.shards:
        with FlopCounterMode(display=False) as counter:
            made_bytes = pilot.try_forward(shard.graph)
        seconds = counter.get_total_flops() / flops_per_second + made_bytes / bytes_per_second
        forward.append(seconds)
        backward.append((_BACKWARD + (not shard.keeps_activations)) * seconds)
    return UnitSeconds(forward=tuple(forward), backward=tuple(backward))


@functools.cache
def _speed() -> tuple[float, float]:
    """Products and copies of this core: operations and bytes a second."""
    left, right = torch.ones(_SIDE, _SIDE), torch.ones(_SIDE, _SIDE)
    source, target = (torch.zeros(_COPY_BYTES, dtype=torch.uint8) for _ in range(2))
    flops = 2 * _SIDE**3 / _fastest(lambda: torch.mm(left, right))
    return flops, _COPY_BYTES / _fastest(lambda: target.copy_(source))


def _fastest(run: Callable[[], object]) -> float:
    found = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return max(min(found), 1e-9)
