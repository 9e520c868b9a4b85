"""Keeps tensors saved by autograd on the host until the backward pass reads them.

Units that run the user's own code cannot be cut or recomputed, so their activations are spilled instead: `BatchUnits`
(`train/loop/batch_units.py`) has the `Lease` (`lease.py`) of such a unit spill if the unit's plan says so.
`train/loop/direct.py` spills once a step finds no more room, or in every step of a model that can be cut no finer
(`LazySavedTensorSpiller`). `train/own_loop/unit_memory.py` only counts saved tensors with a `LazySavedTensorSpiller`, and
never spills. `shard/cost/eager_pilot.py` measures a spiller, and checks a subclass, in real runs of copies of the model, and
`shard/execute/saved_activations.py` uses the version counters. The module must not know models or steps.

Each unit, or each step of the user's own, has a spiller of its own, without a lock, because autograd's threads call the
spiller only while the unit's thread waits. `HostMemoryQuota` (`train/state/host_quota.py`) reserves the host memory that the
pilot has measured (`spilled_bytes`), and `Lease.count` adds the moved bytes to the pager's figures.

Note: fidelity to autograd. Without hooks, autograd keeps a saved tensor alive and refuses a tensor overwritten in place
before the backward pass. Autograd detects the overwrite by a version counter shared by all views of the tensor. With
hooks, autograd checks nothing. Each packed tensor therefore comes with a *counter*: an empty tensor that shares the
version counter and holds no memory. An unpacked tensor shares the counter as well, so a backward pass that overwrites
its input is noticed too. While other references keep the saved storage alive, the backward pass reads the storage and
not the copy, as without hooks.
"""

import functools
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.multiprocessing.reductions import StorageWeakRef

from hydra_tune.devices.device import Device
from hydra_tune.memory.block import TensorGeometry, whole_storage

SMALL_BYTES = 4096  # smaller storages stay on the device: a copy would cost more than the room is worth


class SavedStorageCopy:
    """Host copy of a storage, shared by the saved tensors on the storage with one version counter, until an overwrite."""

    def __init__(self, tensor: Tensor, host: Tensor) -> None:
        self.host = host
        self._counter, self._version = counter_of(tensor), tensor._version  # noqa: SLF001 - torch has no other name for it
        # Weak references also keep the addresses of the storages from being reused.
        self._original = _weak(tensor.untyped_storage())
        self._loaded: StorageWeakRef | None = None

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor is a view of the copied storage, unchanged since the copy.

        Views with a separate version counter (`unsafe_chunk`, as used by GRUs) need a separate copy.
        """
        storage_ids = [self._original.cdata] if self._loaded is None else [self._original.cdata, self._loaded.cdata]
        is_same_storage = tensor.untyped_storage()._cdata in storage_ids  # noqa: SLF001 - the storage's identity
        is_unchanged = self._version == tensor._version == self._counter._version  # noqa: SLF001
        return is_same_storage and is_unchanged and _share_counter(self._counter, tensor)

    def storage(self) -> torch.UntypedStorage | None:
        """Storage on the device with these bytes, or None if no such storage is alive."""
        original = _alive(self._original)
        return original if original is not None or self._loaded is None else _alive(self._loaded)

    def loaded(self, storage: torch.UntypedStorage) -> None:
        """Note that `storage` holds the bytes on the device again."""
        self._loaded = _weak(storage)


@dataclass(slots=True, eq=False, weakref_slot=True)
class PackedSavedTensor:
    """A saved tensor: place of the bytes, and geometry and version at the time of saving."""

    bytes: SavedStorageCopy | Tensor
    geometry: TensorGeometry
    counter: Tensor
    version: int


class SavedTensorSpiller:
    """Sends large tensors saved by autograd to the host.

    Args:
        stays: whether a tensor's storage stays on the device anyway (state, the batch), so that a reference is enough.
    """

    def __init__(self, device: Device, stays: Callable[[Tensor], bool]) -> None:
        self.bytes_out = 0
        self.bytes_in = 0
        self.peak_bytes = 0
        self._host_bytes = 0
        self._device = device
        self._stays = stays
        self._copies: weakref.WeakValueDictionary[int, SavedStorageCopy] = weakref.WeakValueDictionary()

    def use(self, device: Device) -> None:
        """Send tensors that are saved from now on from another device."""
        self._device = device

    def hooks(self) -> AbstractContextManager[object]:
        """Context in which autograd saves tensors through this object."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> PackedSavedTensor:
        """Pack a tensor for autograd; the tensor is detached, because a node must not keep itself alive."""
        place = self._copy_of(tensor) if self._moves(tensor) else tensor.detach()
        return PackedSavedTensor(place, TensorGeometry.of(tensor), counter_of(tensor), tensor._version)  # noqa: SLF001

    def unpack(self, packed: PackedSavedTensor) -> Tensor:
        """Return a saved tensor to a backward pass.

        Raises:
            RuntimeError: the tensor was overwritten in place after saving; the message is autograd's own.
        """
        present = packed.counter._version  # noqa: SLF001
        if present != packed.version:
            raise overwritten(packed.geometry, present, packed.version)
        place = packed.bytes
        if isinstance(place, Tensor):
            return place
        # Detached from the counter and not new: the result must share the version counter of the saved tensor.
        tensor = packed.counter.detach()
        tensor.data = packed.geometry.view(self._on_device(place))
        return tensor

    def _moves(self, tensor: Tensor) -> bool:
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_quantized
        return (
            plain
            and tensor.device.type == self._device.torch_device.type
            and not (tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())  # noqa: SLF001
            and tensor.untyped_storage().nbytes() >= SMALL_BYTES
            and not self._stays(tensor)
        )

    def _copy_of(self, tensor: Tensor) -> SavedStorageCopy:
        key = tensor.untyped_storage()._cdata  # noqa: SLF001 - the storage's identity
        copy = self._copies.get(key)
        # A storage overwritten since the last save needs a new copy; the old copy stays with the earlier saved tensors.
        if copy is None or not copy.holds(tensor):
            copy = self._spill(tensor)
            self._copies[key] = copy
        return copy

    def _spill(self, tensor: Tensor) -> SavedStorageCopy:
        flat = whole_storage(tensor.detach())
        nbytes = flat.numel()
        host = self._device.on_host(lambda: self._device.host_empty(nbytes))
        self._device.spill([(flat, host)])
        copy = SavedStorageCopy(tensor, host)
        # The copy dies with the last packed tensor, so no explicit release is needed when a graph is freed.
        weakref.finalize(copy, self._let_go, nbytes)
        self.bytes_out += nbytes
        self._host_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._host_bytes)
        return copy

    def _let_go(self, nbytes: int) -> None:
        self._host_bytes -= nbytes

    def _on_device(self, copy: SavedStorageCopy) -> torch.UntypedStorage:
        storage = copy.storage()
        if storage is None:
            flat = self._device.empty(copy.host.numel())
            self._device.load([(copy.host, flat)])
            self.bytes_in += flat.numel()
            storage = flat.untyped_storage()
            copy.loaded(storage)
            # A backward pass may save the loaded tensor again, for a second derivative.
            self._copies[storage._cdata] = copy  # noqa: SLF001
        return storage


class LazySavedTensorSpiller(SavedTensorSpiller):
    """Keeps saved tensors in place until room is needed; from then on moves saved tensors, earlier ones too, like its base.

    Gradients of `torch.func` refuse hooks and run as without hooks: their saved tensors stay in place.

    Args:
        kept: receives each large tensor that is to stay in place; may send all such tensors to the host (`shed`).
    """

    def __init__(self, device: Device, stays: Callable[[Tensor], bool], kept: Callable[[Tensor], None]) -> None:
        super().__init__(device, stays)
        self.is_shedding = False
        self._note_kept = kept
        self._kept: weakref.WeakSet[PackedSavedTensor] = weakref.WeakSet()

    def hooks(self) -> AbstractContextManager[object]:
        """Context in which autograd saves tensors through this object, except tensors saved by gradients of `torch.func`."""
        _let_transforms_by()
        return super().hooks()

    def pack(self, tensor: Tensor) -> PackedSavedTensor:
        """Pack a tensor for autograd, in place or on the host."""
        if self.is_shedding or not self._moves(tensor):
            return super().pack(tensor)
        self._note_kept(tensor)
        if self._has_shed():
            return super().pack(tensor)
        packed = PackedSavedTensor(tensor.detach(), TensorGeometry.of(tensor), counter_of(tensor), tensor._version)  # noqa: SLF001
        self._kept.add(packed)
        return packed

    def _has_shed(self) -> bool:
        # Read anew through a method: `_note_kept` may have called `shed`, which type checkers do not see.
        return self.is_shedding

    def shed(self) -> None:
        """Send all kept tensors, and all large tensors saved from now on that do not stay anyway, to the host."""
        if self.is_shedding:
            return
        self.is_shedding = True
        for packed in list(self._kept):
            if isinstance(packed.bytes, Tensor):
                packed.bytes = self._copy_of(packed.bytes)
        self._kept.clear()


class _SuspendedHooks(threading.local):
    """Hooks put aside by a transform on this thread."""

    saved: LazySavedTensorSpiller | None = None


_SUSPENDED = _SuspendedHooks()


@functools.cache
def _let_transforms_by() -> None:
    """Have `torch.func` put hooks of `LazySavedTensorSpiller` aside where `torch.func` would otherwise refuse to run.

    Only hooks of `LazySavedTensorSpiller` are put aside, and only as the innermost hooks: with hooks of the user,
    `torch.func` refuses as in a plain loop.
    """
    torch_hooks: Any = torch._C._autograd  # noqa: SLF001 - torch has no public name for any of these
    disable, enable = torch_hooks._saved_tensors_hooks_disable, torch_hooks._saved_tensors_hooks_enable  # noqa: SLF001
    push, pop = torch_hooks._push_saved_tensors_default_hooks, torch_hooks._pop_saved_tensors_default_hooks  # noqa: SLF001

    @functools.wraps(disable)
    def disable_around(*arguments: Any) -> None:
        """Take off hooks of `LazySavedTensorSpiller` before torch disables hooks; put them on again if torch refuses."""
        hooks = torch_hooks._top_saved_tensors_default_hooks(True)  # noqa: SLF001
        saved = None if hooks is None else getattr(hooks[0], "__self__", None)
        if not isinstance(saved, LazySavedTensorSpiller):
            disable(*arguments)
            return
        # The hooks come off first, because `disable` refuses while any hooks are on.
        pop()
        try:
            disable(*arguments)
        except BaseException:
            push(saved.pack, saved.unpack)
            raise
        _SUSPENDED.saved = saved

    @functools.wraps(enable)
    def enable_again() -> None:
        enable()
        saved, _SUSPENDED.saved = _SUSPENDED.saved, None
        if saved is not None:
            push(saved.pack, saved.unpack)

    torch_hooks._saved_tensors_hooks_disable = disable_around  # noqa: SLF001
    torch_hooks._saved_tensors_hooks_enable = enable_again  # noqa: SLF001


def overwritten(geometry: TensorGeometry, present: int, expected: int) -> RuntimeError:
    """Autograd's error for a saved tensor that was overwritten in place."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{geometry.dtype} {list(geometry.shape)}] is at version {present}; expected version {expected} instead"
    )


def counter_of(tensor: Tensor) -> Tensor:
    """Return an empty tensor that shares a tensor's version counter and none of the memory; a sparse one is not emptied."""
    # `detach` shares the version counter, and a new `.data` replaces the memory without replacing the counter.
    counter = tensor.detach()
    # A sparse tensor takes no dense `.data`, and stays in place as a whole.
    if tensor.layout is not torch.strided:
        return counter
    counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter


def _share_counter(counter: Tensor, tensor: Tensor) -> bool:
    """Whether two tensors share a version counter: incrementing a shared counter shows on both."""
    before = tensor._version  # noqa: SLF001
    # The context restores the counter, so that the probe itself does not count as an overwrite.
    with _unsafe_preserve_version_counter(counter):
        torch.autograd.graph.increment_version(counter)
        return tensor._version != before  # noqa: SLF001


def _weak(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _alive(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)  # noqa: SLF001
