"""Placeholders for the nodes of planned graphs that are not operators: draws, copies and deletions.

Each placeholder is the target of a node: `planner/trace/step_graph.py` writes the draws when a step is traced, and
`planner/passes/graph_rewrite.py` writes the rest when graphs are merged. `planner/run/interpreter.py` maps each target
to an action before a merged graph first runs, and `planner/run/copy_engine.py` makes the copies, with views by `view_of`.
`planner/profile/profiling_interpreter.py` runs draws and views for a profile, and `aliasing.py` and
`planner/profile/profiler.py` recognize draws. `planner/ir/verify.py` checks that each copy has one wait, so a new kind of copy
needs a rule there. Calling a placeholder directly raises `AssertionError`. Only `view_of` is a function that runs as written.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor


def draw(number: int) -> Tensor:
    """Random numbers of a step: those of `StepGraph.noise[number]`."""
    _not_called(draw, number)


def offload(value: Tensor, storage: str) -> Any:
    """Begin the copy of a storage to the host, after the computation queued so far; return a handle."""
    _not_called(offload, value, storage)


def offload_at_once(value: Tensor, storage: str) -> Any:
    """Copy as `offload`, where a hand-over takes longer; without a link, a CPU device copies on the computing thread."""
    _not_called(offload_at_once, value, storage)


def release(handle: Any) -> Any:
    """Wait for the copy to the host, free the device memory and return the host copy."""
    _not_called(release, handle)


def prefetch(copy: Any) -> Any:
    """Allocate device memory and begin the copy of a storage back; return a handle."""
    _not_called(prefetch, copy)


def prefetch_at_once(copy: Any) -> Any:
    """Copy as `prefetch`, where a hand-over takes longer; see `offload_at_once`."""
    _not_called(prefetch_at_once, copy)


def arrived(handle: Any) -> Tensor:
    """Wait for the copy back and return the bytes of the storage."""
    _not_called(arrived, handle)


def view_of(storage: Tensor, dtype: torch.dtype, size: list[int], stride: list[int], offset: int) -> Tensor:
    """Return a tensor of the given dtype and geometry on the bytes of a storage."""
    # Not `as_strided`, which would keep the dtype of `storage`.
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage.untyped_storage(), offset, size, stride)


def delete(*values: Tensor) -> None:
    """Mark where the device memory of a storage ends that will be recomputed; `values` are tensors in the storage.

    The interpreter does nothing here. The memory is freed because no later node uses the storage's tensors.
    """
    _not_called(delete, values)


def _not_called(which: Any, *given: Any) -> NoReturn:
    raise AssertionError(f"{which.__name__}{given} is a node for an interpreter, not a function to call")
