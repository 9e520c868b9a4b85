"""`GeometryFakeMode`: fake tensors for repeated runs of the same operators, which cost a fraction of torch's own.

The pilot (`shard/cost/pilot.py`) makes a mode for each captured step, and runs hundreds of candidate shards of the step, whose
operators and geometries recur. Torch remembers the results of an operator on fake tensors, too, but spends most of the time
on its key. The key here holds the geometry of plain fake tensors and plain values alone, and the memory lasts as long as the
mode. All other operands, operators that write, and results that are neither new memory nor a view of the first operand take
torch's own way.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from typing_extensions import override

_NO_KEYWORDS: Mapping[str, Any] = MappingProxyType({})
_SETTING = frozenset(
    {
        torch.ops.aten.set_.source_Storage,
        torch.ops.aten.set_.source_Storage_storage_offset,
        torch.ops.aten.set_.source_Tensor,
        torch.ops.aten.set_.source_Tensor_storage_offset,
    }
)
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True, slots=True)
class _ResultGeometry:
    """Geometry of a result; `offset` is that of a view of the first operand, and None for new memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | None
    dtype: torch.dtype
    device: torch.device

    def again(self, mode: FakeTensorMode, first: Any) -> Tensor:
        """Make the result once more."""
        if self.offset is None:
            bare = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        else:
            bare = torch.empty(0, dtype=self.dtype, device="meta")
            bare.set_(first.untyped_storage(), self.offset, self.shape, self.stride)
        return FakeTensor(mode, bare, self.device)


class GeometryFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Mode of fake tensors that remembers the geometry of results, and keeps no storage alive.

    Torch's own memory keeps each storage to which a tensor was set.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        # By operator and arguments: whether the results are a tuple, and their geometry; None for operators to run again.
        self._known: dict[Hashable, tuple[bool, tuple[_ResultGeometry, ...]] | None] = {}

    @override
    def dispatch(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = _NO_KEYWORDS
    ) -> Any:
        """Run an operator; arguments as of `__torch_dispatch__`."""
        if func in _SETTING:
            was_enabled, self.cache_enabled = self.cache_enabled, False
            try:
                return super().dispatch(func, types, args, kwargs)
            finally:
                self.cache_enabled = was_enabled
        key = None
        if func.namespace == "aten" and not func._schema.is_mutable:  # noqa: SLF001
            key = _key_of(func, (*args, *kwargs, *kwargs.values()), self)
        if key is None:
            return super().dispatch(func, types, args, kwargs)
        if key not in self._known:
            result = super().dispatch(func, types, args, kwargs)
            self._known[key] = self._geometries(func, args, kwargs, result)
            return result
        known = self._known[key]
        if known is None:
            return super().dispatch(func, types, args, kwargs)
        results = tuple([geometry.again(self, args[0] if args else None) for geometry in known[1]])
        return results if known[0] else results[0]

    def _geometries(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> tuple[bool, tuple[_ResultGeometry, ...]] | None:
        """Return the geometry of results that can be made again without the operator; None for others."""
        results = result if isinstance(result, tuple) else (result,)
        operands = {_identity(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor)}
        storages: set[int] = set()
        geometries = []
        for tensor in results:
            if type(tensor) is not FakeTensor or tensor.constant is not None:
                return None
            if tensor.requires_grad or not _is_plain(tensor) or any(tensor is value for value in args):
                return None
            if _identity(tensor) in storages:
                return None
            storages.add(_identity(tensor))
            is_view = func.is_view and _identity(args[0]) == _identity(tensor)
            if is_view != (_identity(tensor) in operands):
                return None
            geometry = _ResultGeometry(
                tuple(tensor.shape),
                tensor.stride(),
                int(tensor.storage_offset()) if is_view else None,
                tensor.dtype,
                tensor.fake_device,
            )
            if (
                not is_view
                and geometry.again(self, None).untyped_storage().nbytes() != tensor.untyped_storage().nbytes()
            ):
                return None
            geometries.append(geometry)
        return isinstance(result, tuple), tuple(geometries)


def _key_of(func: Any, values: Sequence[Any], mode: FakeTensorMode) -> Hashable | None:
    """Facts of an operator's arguments that decide the geometry of its results; None if there may be others."""
    key: list[Hashable] = [func]
    places: dict[int, int] = {}
    for value in values:
        if isinstance(value, FakeTensor):
            # A known value may decide the results.
            if value.fake_mode is not mode or value.constant is not None or not _is_plain(value):
                return None
            place = places.setdefault(id(value), len(places))
            geometry = value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device
            key.append((place, geometry, value.requires_grad))
        elif isinstance(value, list | tuple):
            if not all(type(part) in (int, bool, float) for part in value):
                return None
            key.append(tuple((type(part), repr(part)) for part in value))
        elif isinstance(value, _PLAIN):
            # By `repr` and type: 1, 1.0 and True are equal, as are 0.0 and -0.0.
            key.append((type(value), repr(value)))
        else:
            return None
    return tuple(key)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


def _identity(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - the storage's identity
