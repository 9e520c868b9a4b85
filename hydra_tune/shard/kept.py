"""What autograd saves in a forward unit, taken out of its graph and kept as values of the step until the backward unit.

Note: where a saved tensor is. Most are views of what the unit was given: parameters, buffers, the batch, values of earlier
shards. These are only referred to, by their place among the operands, and read where the operands are when the backward unit
runs: nothing is stored twice, and a parameter or buffer that was moved between devices meanwhile is found. What the unit made
itself is kept by storage, once for all saved tensors that are views of it. Between the two units a graph holds no memory.

Note: as autograd would. A graph without hooks keeps what it saved alive, refuses it when it was overwritten in place
meanwhile, and lets each tensor go when its node has run. So every packed tensor comes with a counter that shares its version,
and a storage is given up with the last packed tensor on it, in mid-backward: the peak is that of a backward without hooks.

Knows tensors only: fake ones in the pilot, views of leased blocks in the pool.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hydra_tune.memory.block import Geometry, storage_identity, whole_storage
from hydra_tune.memory.saved import counter_of, overwritten


class NotKeepableError(Exception):
    """Autograd saves something that is more than a view of plain memory; such a shard is recomputed."""


class _Storage:
    """One storage that the unit made and autograd has saved; ends with the last packed tensor on it.

    Attributes:
        tensor: keeps the memory as long as the forward unit runs; None afterwards.
        number: what the memory is called from then on.
        on_free: told the number when this ends.
    """

    __slots__ = ("__weakref__", "number", "on_free", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.number = -1
        self.on_free: Callable[[int], None] | None = None

    def __del__(self) -> None:
        if self.on_free is not None:
            self.on_free(self.number)


@dataclass(frozen=True, slots=True)
class _Packed:
    """A saved tensor: the position of the operand it is a view of, the storage it lies on, or itself if that has none here."""

    held: int | _Storage | Tensor
    geometry: Geometry
    counter: Tensor
    version: int


@dataclass(slots=True)
class _Present:
    """Where everything is while the backward unit runs."""

    given: Sequence[Tensor]
    kept: Callable[[int], Tensor]


@dataclass(slots=True)
class KeptTensors:
    """What one forward unit's graph has saved.

    Args:
        given: the unit's operands, in an order that the backward unit's are given in as well.
    """

    given: Sequence[Tensor]
    _device: torch.device | None = field(init=False)
    _positions: dict[int, int] = field(init=False)
    _storages: "weakref.WeakValueDictionary[int, _Storage]" = field(init=False)
    _present: _Present | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._device = next((tensor.device for tensor in self.given), None)
        self._positions = {}
        for position, tensor in enumerate(self.given):
            self._positions.setdefault(storage_identity(tensor), position)
        self._storages = weakref.WeakValueDictionary()

    def hooks(self) -> AbstractContextManager[object]:
        """Autograd saves through this object while the context is entered."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def settle(self) -> dict[int, Tensor]:
        """The forward unit has run: all memory is let go of.

        Returns:
            By number, the whole storages that the graph still needs, as flat uint8 tensors; to be kept by the caller.
        """
        flats: dict[int, Tensor] = {}
        for number, storage in enumerate(list(self._storages.values())):
            assert storage.tensor is not None, "settled once"
            flats[number] = whole_storage(storage.tensor)
            storage.tensor, storage.number = None, number
        self.given, self._positions = (), {}
        return flats

    def present(self, given: Sequence[Tensor], kept: Callable[[int], Tensor], on_free: Callable[[int], None]) -> None:
        """The backward unit runs.

        Args:
            given: the operands, where they are now.
            kept: number -> the storage kept under it, as a flat tensor.
            on_free: told the number of each storage that the graph needs no longer; until `absent`.
        """
        self._present = _Present(given, kept)
        for storage in list(self._storages.values()):
            storage.on_free = on_free

    def absent(self) -> None:
        """The backward unit has run, or failed: nothing is read or told any more."""
        self._present = None
        for storage in list(self._storages.values()):
            storage.on_free = None

    def _pack(self, tensor: Tensor) -> _Packed:
        """Called by autograd when it saves a tensor; detached, because a node must not keep itself alive."""
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            raise NotKeepableError(
                f"a saved tensor of layout {tensor.layout} and type {tensor.dtype} is not plain memory"
            )
        return _Packed(self._held(tensor), Geometry.of(tensor), counter_of(tensor), tensor._version)  # noqa: SLF001

    def _held(self, tensor: Tensor) -> int | _Storage | Tensor:
        if not tensor.untyped_storage().nbytes() or tensor.device != self._device:
            return tensor.detach()  # a number on the host, in a unit on a GPU
        key = storage_identity(tensor)
        position = self._positions.get(key)
        if position is not None:
            return position
        storage = self._storages.get(key)
        if storage is None:
            storage = self._storages[key] = _Storage(tensor.detach())
        return storage

    def _unpack(self, packed: _Packed) -> Tensor:
        """Called by autograd when a backward reads a saved tensor.

        Raises:
            RuntimeError: the tensor was overwritten in place after it was saved, as autograd itself would say.
        """
        version = packed.counter._version  # noqa: SLF001
        if version != packed.version:
            raise overwritten(packed.geometry, version, packed.version)
        held = packed.held
        if isinstance(held, Tensor):
            return held
        assert self._present is not None, "a graph is read in its backward unit only"
        source = self._present.given[held] if isinstance(held, int) else self._present.kept(held.number)
        empty = torch.empty(0, dtype=packed.geometry.dtype, device=source.device)
        geometry = packed.geometry
        return empty.set_(source.untyped_storage(), geometry.offset, geometry.shape, geometry.stride)
