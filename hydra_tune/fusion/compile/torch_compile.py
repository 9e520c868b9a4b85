"""Compile a group's traced step with `torch.compile`: optional, since compiling often takes longer than a whole search.

The compiled code is run once beside the trace, on synthetic inputs. If the compiler fails, or the losses or gradients
differ by more than a thousandth of the largest number, the group runs the trace, and the log gives the reason. `trace_step`
(`batched_plan.py`) calls `compiled_trace` right after tracing a training step for CPU devices if `fusion_compile` names a
compiler; the caller holds the capture gate alone. `cuda_graph_steps.py` compares a recorded step by `difference`.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hydra_tune.batched.joint_graph import JointTrace
from hydra_tune.shard.capture.step_capture import describe
from hydra_tune.shard.execute.compute import ShardOperands
from hydra_tune.shard.partition.subgraph import compiled

_LOGGER = logging.getLogger("hydra_tune.fusion")
_TOLERANCE = 1e-3  # relative to a tensor's largest value


def compiled_trace(
    trace: JointTrace, backend: str, operands: ShardOperands, written: Sequence[int], count: int
) -> JointTrace:
    """Return the trace with compiled code, or the trace unchanged if compiling fails or gives other numbers.

    Nothing else may compute meanwhile.
    """
    code = compiled(trace.pure, backend, written)
    start = time.perf_counter()
    try:
        # The code may overwrite operands, so each run gets operands of its own.
        error = difference(trace.pure(*_filled(trace, operands, count)), code(*_filled(trace, operands, count)))
    except Exception as raised:  # noqa: BLE001 - compilers fail in many ways, and the trace still runs
        error = f"the compiler fails: {describe(raised)}"
    if error:
        _LOGGER.warning("a group's step is not compiled by %s: %s", backend, error)
        return trace
    seconds = time.perf_counter() - start
    _LOGGER.info("the step of a group of %d was compiled by %s in %.1f s", count, backend, seconds)
    return replace(trace, code=code)


def _filled(trace: JointTrace, operands: ShardOperands, count: int) -> list[Tensor]:
    """Return synthetic operands and noise: numbers from 0 to 0.1, and zeros for integers, which are valid indices."""
    # A separate generator with a fixed seed: both runs see equal inputs, and no trial's stream advances.
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for tensor in [*operands.all, *trace.room_for_noise(count, operands.all[0].device)]:
        values = torch.zeros_like(tensor, requires_grad=False)
        if values.is_floating_point():
            values.copy_(0.1 * torch.rand(values.shape, generator=generator, dtype=values.dtype))
        tensors.append(values)
    return tensors


def difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> str:
    """Describe how computed tensors differ from expected tensors; empty if they agree."""
    for expected_tensor, found_tensor in zip(expected, found, strict=True):
        # Equal infinities and two NaN agree, for a member may have diverged.
        differ = (expected_tensor != found_tensor) & ~(expected_tensor.isnan() & found_tensor.isnan())
        if not differ.any():
            continue
        kind = torch.promote_types(expected_tensor.dtype, torch.int16)  # booleans cannot be subtracted
        numbers = expected_tensor.to(kind)
        largest = numbers.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
        largest_error = (numbers - found_tensor.to(kind))[differ].abs().max().item()
        if not largest_error <= _TOLERANCE * max(largest, 1e-6):
            return f"its numbers are off by {largest_error:.3g}, of tensors of up to {largest:.3g}"
    return ""
