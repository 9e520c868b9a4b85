"""Nodes of planned graphs that are no operators: what is drawn, moved, deleted. They are names for an interpreter."""

from typing import Any, NoReturn

import torch
from torch import Tensor


def draw(number: int) -> Tensor:
    """A step's random numbers.

    Args:
        number: of `StepGraph.noise`.
    """
    _not_called(draw, number)


def offload(value: Tensor, storage: str) -> Any:
    """Begin to copy a storage to the host, behind what has been computed; gives a handle."""
    _not_called(offload, value, storage)


def offload_at_once(value: Tensor, storage: str) -> Any:
    """As `offload`, by the thread that computes: the copy has ended when the next node runs."""
    _not_called(offload_at_once, value, storage)


def release(handle: Any) -> Any:
    """Wait for the copy to the host and free the device's memory; gives the copy."""
    _not_called(release, handle)


def prefetch(copy: Any) -> Any:
    """Take device memory and begin to copy a storage back; gives a handle."""
    _not_called(prefetch, copy)


def prefetch_at_once(copy: Any) -> Any:
    """As `prefetch`, by the thread that computes."""
    _not_called(prefetch_at_once, copy)


def arrived(handle: Any) -> Tensor:
    """Wait for the copy back; gives the storage's bytes."""
    _not_called(arrived, handle)


def view_of(storage: Tensor, dtype: torch.dtype, size: list[int], stride: list[int], offset: int) -> Tensor:
    """A tensor in bytes that have come back."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage.untyped_storage(), offset, size, stride)


def delete(*values: Tensor) -> None:
    """Free a storage that will be recomputed; `values` are all tensors in it."""
    _not_called(delete, values)


def _not_called(which: Any, *given: Any) -> NoReturn:
    raise AssertionError(f"{which.__name__}{given} is a node for an interpreter, not a function to call")
