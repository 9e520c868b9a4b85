"""The traced step of a group, compiled: an option, for compilers take longer over one step than many a search over all of them.

What is compiled is run once beside what it was made of, on numbers of its own. Where the compiler fails, or makes something
else of it, the step runs as it was traced, and the log says so.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hydra_tune.fusion.tracing import Traced
from hydra_tune.shard.capture import describe
from hydra_tune.shard.compute import Operands
from hydra_tune.shard.split import compiled

_LOGGER = logging.getLogger("hydra_tune.fusion")
_TOLERANCE = 1e-3  # of a tensor's largest value


def compiled_trace(trace: Traced, backend: str, operands: Operands, written: Sequence[int], count: int) -> Traced:
    """A trace that a compiler has made code of; the same trace where it cannot. To be called while nothing else computes.

    Args:
        trace: the step.
        backend: of `torch.compile`.
        operands: tensors of the sizes that it is run on; only their geometry counts.
        written: positions of the operands that it overwrites.
        count: members.
    """
    made = compiled(trace.pure, backend, written)
    start = time.perf_counter()
    try:
        error = difference(trace.pure(*_filled(trace, operands, count)), made(*_filled(trace, operands, count)))
    except Exception as raised:  # noqa: BLE001 - compilers fail in many ways, and the step can do without
        error = f"the compiler fails: {describe(raised)}"
    if error:
        _LOGGER.warning("a group's step is not compiled by %s: %s", backend, error)
        return trace
    seconds = time.perf_counter() - start
    _LOGGER.info("the step of a group of %d was compiled by %s in %.1f s", count, backend, seconds)
    return replace(trace, code=made)


def _filled(trace: Traced, operands: Operands, count: int) -> list[Tensor]:
    """Operands and noise of these sizes: small positive numbers, and whole numbers that are valid wherever one counts."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for tensor in [*operands.all, *(one.room(count, operands.all[0].device) for one in trace.noise)]:
        own = torch.zeros_like(tensor, requires_grad=False)
        if own.is_floating_point():
            own.copy_(0.1 * torch.rand(own.shape, generator=generator, dtype=own.dtype))
        found.append(own)
    return found


def difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> str:
    """What is wrong with what a compiler's code gives; nothing, if nothing is."""
    for one, other in zip(expected, found, strict=True):
        largest = one.abs().max().item() if one.numel() else 0.0
        off = (one - other).abs().max().item() if one.numel() else 0.0
        if not off <= _TOLERANCE * max(largest, 1e-6):
            return f"its numbers are off by {off:.3g}, of tensors of up to {largest:.3g}"
    return ""
