"""Takes tensors saved by autograd out of a forward unit's graph, and keeps the tensors as values until the backward.

`taped_forward` (`compute.py`) makes a `KeptActivations` for each forward unit that keeps its graph, and `ShardTape` there
settles and presents the tensors; `ShardChain` (`chain.py`) keeps the storages between both. The pilot (`shard/cost/pilot.py`)
catches `NotKeepableError`, and such a shard is recomputed.

Note: places of saved tensors. Most saved tensors are views of the unit's operands: parameters, buffers, the batch,
values of earlier shards. The graph refers to such a tensor by the position of the operand, and reads the operand at its
place during the backward unit. Storages made by the unit itself are kept once for all saved tensors on the storage.
Between the two units a graph holds no memory of the unit's device. A tensor on another device, such as a scalar on the
host, stays with the graph itself.

Note: fidelity to autograd. A graph without hooks keeps its saved tensors alive, refuses a tensor overwritten in place
meanwhile, and frees each tensor after its node has run. Every packed tensor therefore comes with a counter that shares
the tensor's version. A storage is given up together with the last packed tensor on the storage, in mid-backward, so the
peak equals the peak of a backward without hooks.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hydra_tune.memory.activation_offload import counter_of, overwritten
from hydra_tune.memory.block import TensorGeometry, storage_identity, whole_storage


class NotKeepableError(Exception):
    """Autograd saves more than a view of plain memory; such a shard is recomputed."""


class _KeptStorage:
    """A storage made by the unit and saved by autograd; dies with the last packed tensor on the storage.

    Attributes:
        tensor: keeps the memory alive during the forward unit; None afterwards.
        number: name of the storage after the forward unit.
        on_free: receives the number when the object dies.
    """

    __slots__ = ("__weakref__", "number", "on_free", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.number = -1
        self.on_free: Callable[[int], None] | None = None

    def __del__(self) -> None:
        # Runs in mid-backward on the thread of autograd, as soon as the last packed tensor goes.
        if self.on_free is not None:
            self.on_free(self.number)


@dataclass(frozen=True, slots=True)
class _PackedKeptTensor:
    """A saved tensor as the position of its operand, as its storage, or as the tensor itself if not stored here."""

    held: int | _KeptStorage | Tensor
    geometry: TensorGeometry
    counter: Tensor
    version: int


@dataclass(slots=True)
class _BackwardTensorSource:
    """Places of all tensors during the backward unit."""

    given: Sequence[Tensor]
    kept: Callable[[int], Tensor]


@dataclass(slots=True)
class KeptActivations:
    """Tensors saved by a forward unit's graph.

    Args:
        given: operands of the unit; the backward unit must list its operands in the same order.
    """

    given: Sequence[Tensor]
    _device: torch.device | None = field(init=False)
    _positions: dict[int, int] = field(init=False)
    _storages: "weakref.WeakValueDictionary[int, _KeptStorage]" = field(init=False)
    _present: _BackwardTensorSource | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._device = next((tensor.device for tensor in self.given), None)
        self._positions = {}
        for position, tensor in enumerate(self.given):
            self._positions.setdefault(storage_identity(tensor), position)
        self._storages = weakref.WeakValueDictionary()

    def hooks(self) -> AbstractContextManager[object]:
        """Context in which autograd saves tensors through this object."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def settle(self) -> dict[int, Tensor]:
        """Release all memory after the forward unit.

        Returns:
            By number, the whole storages still needed by the graph, as flat uint8 tensors; to be kept by the caller.
        """
        flats: dict[int, Tensor] = {}
        for number, storage in enumerate(list(self._storages.values())):
            assert storage.tensor is not None, "settled once"
            flats[number] = whole_storage(storage.tensor)
            storage.tensor, storage.number = None, number
        # The operands may move to another place before the backward unit, which lists them anew.
        self.given, self._positions = (), {}
        return flats

    def present(self, given: Sequence[Tensor], kept: Callable[[int], Tensor], on_free: Callable[[int], None]) -> None:
        """Provide the tensors for the backward unit.

        `kept` returns the storage kept under a number, as a flat tensor; until `absent`, `on_free` receives the number
        of each storage no longer needed by the graph.
        """
        self._present = _BackwardTensorSource(given, kept)
        for storage in list(self._storages.values()):
            storage.on_free = on_free

    def absent(self) -> None:
        """Stop providing tensors after the backward unit has run or failed."""
        self._present = None
        for storage in list(self._storages.values()):
            storage.on_free = None

    def _pack(self, tensor: Tensor) -> _PackedKeptTensor:
        """Pack a tensor for autograd; the tensor is detached, because a node must not keep itself alive."""
        # A conjugate or negative flag is not part of a geometry, so the backward unit would read other values.
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            raise NotKeepableError(
                f"a saved tensor of layout {tensor.layout} and type {tensor.dtype} is not plain memory"
            )
        return _PackedKeptTensor(self._held(tensor), TensorGeometry.of(tensor), counter_of(tensor), tensor._version)  # noqa: SLF001

    def _held(self, tensor: Tensor) -> int | _KeptStorage | Tensor:
        if not tensor.untyped_storage().nbytes() or tensor.device != self._device:
            return tensor.detach()  # for example, a scalar on the host in a unit on a GPU
        key = storage_identity(tensor)
        position = self._positions.get(key)
        if position is not None:
            return position
        # Weak: only the packed tensors keep the storage alive, so the storage ends with the last packed tensor.
        storage = self._storages.get(key)
        if storage is None:
            storage = self._storages[key] = _KeptStorage(tensor.detach())
        return storage

    def _unpack(self, packed: _PackedKeptTensor) -> Tensor:
        """Return a saved tensor to a backward pass.

        Raises:
            RuntimeError: the tensor was overwritten in place after saving; the message is autograd's own.
        """
        version = packed.counter._version  # noqa: SLF001
        if version != packed.version:
            raise overwritten(packed.geometry, version, packed.version)
        place = packed.held
        if isinstance(place, Tensor):
            return place
        assert self._present is not None, "a graph is read in its backward unit only"
        source = self._present.given[place] if isinstance(place, int) else self._present.kept(place.number)
        empty = torch.empty(0, dtype=packed.geometry.dtype, device=source.device)
        geometry = packed.geometry
        return empty.set_(source.untyped_storage(), geometry.offset, geometry.shape, geometry.stride)
