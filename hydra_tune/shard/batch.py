"""Batches as trees: their tensor leaves, and the signature a capture is valid for.

An exported graph is valid for one batch structure only: shapes, dtypes and every plain Python value in the batch are baked
into it. The signature holds all of these.
"""

import ctypes
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hydra_tune.errors import TaskError

_MEMCMP = ctypes.CDLL(None).memcmp
_MEMCMP.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def plain_mappings(batch: Any) -> Any:
    """The batch with every mapping that is not a dict made one (tokenizers return such), which export requires."""
    if isinstance(batch, Mapping):
        return {key: plain_mappings(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(plain_mappings(value) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(plain_mappings(value) for value in batch)
    return batch


class _Marker(Enum):
    TENSOR = "tensor"


TENSOR = _Marker.TENSOR


@dataclass(frozen=True, slots=True)
class Leaves:
    """A batch taken apart: its tensors in tree order, and all the rest."""

    tensors: tuple[Tensor, ...]
    signature: Hashable
    spec: pytree.TreeSpec
    values: tuple[Any, ...]  # TENSOR where a tensor was
    copies: tuple[tuple[Tensor, Tensor], ...]  # (as in the batch, as in `tensors`), where these are not one

    def hand_back(self) -> None:
        """Let what has changed in the tensors show in the batch, where a tensor had to be copied.

        What has not changed is not written: others may be computing with the batch, or it may be memory that takes no writes.
        """
        for original, copy in self.copies:
            if not same_bits(original, copy):
                original.copy_(copy)

    def rebuild(self, tensors: tuple[Tensor, ...]) -> Any:
        """The batch again, with other tensors in the places of its own."""
        fresh = iter(tensors)
        return pytree.tree_unflatten([next(fresh) if v is TENSOR else v for v in self.values], self.spec)

    def without_tensors(self) -> "Leaves":
        """The same structure, keeping no tensor alive."""
        return replace(self, tensors=(), copies=())


def copied(batch: Any) -> Any:
    """The same batch in tensors of its own."""
    leaves = flatten(batch)
    return leaves.rebuild(tuple(tensor.clone() for tensor in leaves.tensors))


def flatten(batch: Any) -> Leaves:
    """Take a batch apart.

    Args:
        batch: any nesting of tuples, lists and dicts of tensors and plain Python values.

    Raises:
        TaskError: a leaf that no capture could be keyed by (it is not hashable), or a tensor that is not dense.
    """
    found, spec = pytree.tree_flatten(plain_mappings(batch))
    values = [_compact(value) if isinstance(value, Tensor) else value for value in found]
    key: list[Hashable] = [str(spec)]
    for value in values:
        if isinstance(value, Tensor):
            key.append(("tensor", tuple(value.shape), value.stride(), value.dtype, value.requires_grad))
        else:
            key.append((type(value).__qualname__, _hashable(value)))
    tensors = tuple(value for value in values if isinstance(value, Tensor))
    places = tuple(TENSOR if isinstance(value, Tensor) else value for value in values)
    copies = tuple((a, b) for a, b in zip(found, values, strict=True) if a is not b)
    return Leaves(tensors=tensors, signature=tuple(key), spec=spec, values=places, copies=copies)


def _compact(tensor: Tensor) -> Tensor:
    """The tensor with a storage of its own: a slice of a data set must not drag the whole set to a device."""
    if tensor.is_nested:
        raise TaskError(
            "a batch may hold dense tensors, and one of this batch's is nested, whose samples differ in length; pad it in the "
            "loader's collate_fn (torch.nested.to_padded_tensor(tensor, 0.0)), with the lengths or a mask beside it, or give "
            "its values and offsets as tensors of their own"
        )
    if tensor.layout is not torch.strided:
        raise TaskError(
            f"a batch may hold dense tensors, and one of this batch's is of layout {tensor.layout}; give tensor.to_dense(), or "
            "its indices and values as tensors of their own, from which the step makes it"
        )
    if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        return tensor
    return tensor.clone()


def _hashable(value: object) -> Hashable:
    if isinstance(value, Hashable):
        return value
    raise TaskError(f"a batch may hold tensors and plain values, not {type(value).__name__}; make it a tensor")


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of the whole storage under a tensor: what keeping the tensor alive keeps alive."""
    return tensor.untyped_storage().nbytes()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal to the last bit, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    # What is conjugate or negative by a flag alone has other bytes than it says.
    left, right = (each.detach().resolve_conj().resolve_neg().contiguous() for each in (a, b))
    if left.is_cpu and right.is_cpu:
        # Not an operator: modes that watch what a unit computes on see none of it, and it takes no memory.
        return not _MEMCMP(left.data_ptr(), right.data_ptr(), left.numel() * left.element_size())
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
