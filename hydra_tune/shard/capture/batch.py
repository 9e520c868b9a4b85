"""Batches as trees: their tensor leaves, and the signature for which a capture is valid.

The signature holds all of a batch that a graph bakes in: shapes, strides, dtypes, needs of gradients, containers and every
plain Python value.

`SingleTrial` (`train/single_trial.py`) flattens each batch before looking up a plan, `OwnCodeTrial`
(`train/own_code_trial.py`) the pieces for which a plan may be found, `MemberBatchRequest` (`fusion/group/member.py`) each
batch of a fused trial, and `PlanLibrary` (`shard/partition/plan_cache.py`) the batch for which a plan is made.
`train/loop/plan_cache.py`, `train/loop/microbatch_choice.py`, `train/data/index_gather.py`, pilot runs
(`shard/cost/eager_pilot.py`) and checks (`shard/verify/`) flatten batches as well. `capture` (`step_capture.py`) exports
`plain_mappings` of a batch; `train/data/handles.py` and `train/loop/microbatches.py` move and cut batches by `rebuilt`. Checks,
checkpoints and `train/state/block_store.py` compare tensors by `same_bits`.

Note: threads. Any thread may flatten a batch: a lock covers the registration of dataclasses with torch alone.
"""

import copy
import ctypes
import dataclasses
import functools
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hydra_tune.errors import TaskError
from hydra_tune.shard.python_state.number_inputs import num_inputs

_MEMCMP = ctypes.CDLL(None).memcmp
_MEMCMP.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_REGISTERING = threading.Lock()  # torch refuses a class that another thread has registered meanwhile


class AttributeDict(dict[Any, Any]):
    """A mapping of a batch, in place of a mapping of another class, which export does not take.

    Items are attributes too, as in a tokenizer's result (`batch.input_ids`).
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"the batch has no item {name!r}: a step that is captured or runs whole gets a dict in place of a mapping of "
                "another class, whose items are attributes too but which has no other attributes; read items alone, or raise "
                "device_memory until the trial runs as it is",
                name=name,
                obj=self,
            ) from None


def mapping_like(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """Return other items for a mapping of a batch: as a dict, with attributes unless the mapping itself is a dict."""
    return items if type(mapping) is dict else AttributeDict(items)


def _unflattened(values: Iterable[Any], keys: list[Any]) -> AttributeDict:
    return AttributeDict(zip(keys, values, strict=True))


pytree.register_pytree_node(
    AttributeDict,
    lambda each: (list(each.values()), list(each)),
    _unflattened,
    serialized_type_name="hydra_tune.AttributeDict",
    flatten_with_keys_fn=lambda each: ([(pytree.MappingKey(key), value) for key, value in each.items()], list(each)),
)


class NumberedBatch(NamedTuple):
    """A batch, and the inputs that Python computes from numbers which the step reads besides.

    `NumberInputs` (`shard/python_state/number_inputs.py`) fills the inputs, float64 tensors of one element.
    """

    batch: Any
    inputs: tuple[Tensor, ...]
    places: tuple[str, ...]

    @classmethod
    def of(cls, batch: Any, places: tuple[str, ...]) -> "NumberedBatch":
        """Return a batch with room for the inputs of some numbers."""
        return cls(batch, tuple(torch.zeros((), dtype=torch.float64) for _ in range(num_inputs(places))), places)


def places_of(batch: Any) -> tuple[str, ...]:
    """Return the places of the numbers for which a batch has inputs."""
    return batch.places if isinstance(batch, NumberedBatch) else ()


def unnumbered(batch: Any) -> Any:
    """Return a batch as the user's code gets it."""
    return batch.batch if isinstance(batch, NumberedBatch) else batch


def fields_of(value: Any) -> dict[str, Any] | None:
    """Return the fields of an instance of a dataclass; None for all other values."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)}


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container of a batch with changed items; return all other values as they are."""
    if isinstance(value, Mapping):
        return mapping_like(value, {key: change(item) for key, item in value.items()})
    # The constructor of a named tuple takes the values one by one, not an iterable.
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(change(item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(change(item) for item in value)
    fields = fields_of(value)
    if fields is None:
        return value
    changed = copy.copy(value)
    for name, item in fields.items():
        object.__setattr__(changed, name, change(item))  # a frozen dataclass refuses `setattr`
    return changed


def plain_mappings(batch: Any) -> Any:
    """Return the batch with a dict for every mapping, as required by export (tokenizers return other mappings).

    Export also has to know each dataclass of the batch.
    """
    if fields_of(batch) is not None:
        _make_known(type(batch))
    return rebuilt(batch, plain_mappings)


def _make_known(kind: type) -> None:
    """Have torch take instances of a dataclass apart, without running the class's own code to make others."""
    with _REGISTERING:
        if kind not in pytree.SUPPORTED_NODES:
            _register(kind)


def _register(kind: type) -> None:
    def made(values: Iterable[Any], names: list[str]) -> Any:
        each: Any = object.__new__(kind)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(each, name, value)
        return each

    def apart(each: Any) -> tuple[list[Any], list[str]]:
        fields = fields_of(each) or {}
        return list(fields.values()), list(fields)

    def with_keys(each: Any) -> tuple[list[tuple[Any, Any]], list[str]]:
        values, names = apart(each)
        return list(zip(map(pytree.GetAttrKey, names), values, strict=True)), names

    name = f"{kind.__module__}.{kind.__qualname__}"
    pytree.register_pytree_node(kind, apart, made, serialized_type_name=name, flatten_with_keys_fn=with_keys)


class _LeafMarker(Enum):
    TENSOR = "tensor"


TENSOR = _LeafMarker.TENSOR


@dataclass(frozen=True, slots=True)
class BatchLeaves:
    """A batch taken apart: its tensors in tree order, compact and dense, and the rest."""

    tensors: tuple[Tensor, ...]
    signature: Hashable
    spec: pytree.TreeSpec
    values: tuple[Any, ...]  # TENSOR where a tensor was
    copies: tuple[tuple[Tensor, Tensor], ...]  # (tensor of the batch, tensor in `tensors`), where the two differ

    def hand_back(self) -> None:
        """Copy changes of the tensors back to the batch, where a tensor had to be copied.

        Unchanged tensors are not written: other threads may be computing with the batch, or the memory may be
        read-only.
        """
        for original, own in self.copies:
            if not same_bits(original, own):
                original.copy_(own)

    def rebuild(self, tensors: tuple[Tensor, ...]) -> Any:
        """Return the batch with other tensors in place of its own."""
        fresh = iter(tensors)
        return pytree.tree_unflatten([next(fresh) if v is TENSOR else v for v in self.values], self.spec)

    def without_tensors(self) -> "BatchLeaves":
        """Return the same structure without tensors, to keep no tensor alive."""
        return replace(self, tensors=(), copies=())


def copied(batch: Any) -> Any:
    """Return a copy of the batch with new tensors."""
    leaves = flatten(batch)
    return leaves.rebuild(tuple(tensor.clone() for tensor in leaves.tensors))


def structure(batch: Any) -> tuple[str, list[Any]]:
    """Return the containers of a batch in words, and the leaves themselves."""
    leaves, spec = pytree.tree_flatten(plain_mappings(batch))
    return str(spec), leaves


def containers(batch: Any) -> set[int]:
    """Return the identities of the mappings, lists and dataclasses of a batch, which a step may change."""
    items = batch if isinstance(batch, Mapping) else fields_of(batch)
    if items is not None:
        return {id(batch)}.union(*map(containers, items.values()))
    if isinstance(batch, list):
        return {id(batch)}.union(*map(containers, batch))
    return set().union(*map(containers, batch)) if isinstance(batch, tuple) else set()


def flatten(batch: Any) -> BatchLeaves:
    """Take a batch apart.

    Args:
        batch: any nesting of tuples, lists, mappings and dataclasses of tensors and plain Python values.

    Raises:
        TaskError: a leaf that is no tensor is not hashable, so no capture could be keyed by the leaf, or a tensor is not
            dense.
    """
    batch_leaves, spec, spec_text = _taken_apart(batch)
    values = [_compact(value) if isinstance(value, Tensor) else value for value in batch_leaves]
    key: list[Hashable] = [spec_text]
    for value in values:
        if isinstance(value, Tensor):
            # With the stride: operators such as `reshape` take other branches for other strides.
            key.append(("tensor", tuple(value.shape), value.stride(), value.dtype, value.requires_grad))
        else:
            # With the class, because 1, 1.0 and True are equal keys, but different constants of a graph.
            key.append((type(value).__qualname__, _hashable(value)))
    tensors = tuple(value for value in values if isinstance(value, Tensor))
    marked_values = tuple(TENSOR if isinstance(value, Tensor) else value for value in values)
    copies = tuple((a, b) for a, b in zip(batch_leaves, values, strict=True) if a is not b)
    return BatchLeaves(tensors=tensors, signature=tuple(key), spec=spec, values=marked_values, copies=copies)


def _taken_apart(batch: Any) -> tuple[list[Any], pytree.TreeSpec, str]:
    """Return the leaves of a batch, the tree, and the tree in words."""
    kind: Any = type(batch)
    # The usual batches, at half the cost of a general tree, because each batch of each fused trial comes here.
    if kind in (tuple, list) and all(type(value) is Tensor for value in batch):
        return list(batch), *_spec_of(kind, len(batch))
    if kind is dict and all(type(key) is str and type(value) is Tensor for key, value in batch.items()):
        return list(batch.values()), *_spec_of(kind, tuple(batch))
    batch_leaves, spec = pytree.tree_flatten(plain_mappings(batch))
    return batch_leaves, spec, str(spec)


@functools.lru_cache
def _spec_of(kind: Any, size: int | tuple[str, ...]) -> tuple[pytree.TreeSpec, str]:
    """Return the tree of a tuple or list of `size` leaves, or of a dict of leaves with the keys `size`."""
    spec = pytree.tree_structure(kind([0] * size) if isinstance(size, int) else dict.fromkeys(size, 0))
    return spec, str(spec)


def refuse_nested(tensor: Tensor) -> None:
    """Refuse a nested tensor, whose sizes nobody can plan with.

    Raises:
        TaskError: the tensor is nested.
    """
    if tensor.is_nested:
        raise TaskError(
            "a batch may hold dense tensors only, but a tensor of this batch is nested: its samples differ in length; pad the "
            "tensor in the loader's collate_fn (torch.nested.to_padded_tensor(tensor, 0.0)), with the lengths or a mask beside "
            "it, or give its values and offsets as separate tensors"
        )


def _compact(tensor: Tensor) -> Tensor:
    """Return a dense tensor with a storage of its size: a slice of a data set must not drag the whole set to a device."""
    refuse_nested(tensor)
    if tensor.layout is not torch.strided:
        raise TaskError(
            f"a batch may hold dense tensors only, but a tensor of this batch is of layout {tensor.layout}; give "
            "tensor.to_dense(), or give its indices and values as separate tensors, from which the step makes the tensor"
        )
    if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        return tensor
    return tensor.clone()


def _hashable(value: object) -> Hashable:
    if isinstance(value, float):  # in words, because 0.0 and -0.0 are equal, and NaN is not equal to itself
        return float.hex(value)
    if isinstance(value, Hashable):
        return value
    raise TaskError(f"a batch may hold tensors and plain values, not {type(value).__name__}; make it a tensor")


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of the whole storage under a tensor, all kept alive by the tensor."""
    return tensor.untyped_storage().nbytes()


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, in type and shape as well; a NaN equals nothing."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal to the last bit, NaN included, in type and shape as well."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    # The bytes of a tensor with a conjugate or negative flag differ from its values.
    left, right = (each.detach().resolve_conj().resolve_neg().contiguous() for each in (a, b))
    if left.is_cpu and right.is_cpu:
        # By `memcmp`, which dispatch modes around a unit do not see.
        return not _MEMCMP(left.data_ptr(), right.data_ptr(), left.numel() * left.element_size())
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
