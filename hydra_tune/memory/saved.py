"""What autograd saves for a backward, kept on the host until the backward asks for it.

For units that run the user's own code and therefore cannot be cut or recomputed: their activations are spilled instead.

Note: as autograd would. Without hooks autograd keeps a saved tensor alive and, when the backward reads it, refuses one that
was overwritten in place meanwhile, which it sees by a version counter that all views of the tensor share. With hooks it checks
nothing. So each packed tensor comes with a *counter*: an empty tensor that shares the version counter and holds no memory. What
is unpacked shares the counter as well, so that a backward that overwrites what it was given is noticed too. And as long as the
saved storage is alive for other reasons, the backward reads that storage and not the copy, as it would without hooks.
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
from hydra_tune.memory.block import Geometry, whole_storage

SMALL_BYTES = 4096  # storages below stay on the device: a copy would cost more than the room is worth


class HostCopy:
    """The bytes of one storage on the host, for all saved tensors that are views of it.

    Args:
        tensor: a tensor on the storage.
        host: the copied bytes.
    """

    def __init__(self, tensor: Tensor, host: Tensor) -> None:
        self.host = host
        self._counter, self._version = counter_of(tensor), tensor._version  # noqa: SLF001 - torch has no other name for it
        # Weak references also keep the storages' addresses from being used again.
        self._original = _weak(tensor.untyped_storage())
        self._loaded: StorageWeakRef | None = None

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor is a view of the copied storage, and nobody has overwritten that since.

        Views with a counter of their own (`unsafe_chunk`, which GRUs are made of) have a copy of their own.
        """
        known = [self._original.cdata] if self._loaded is None else [self._original.cdata, self._loaded.cdata]
        same = tensor.untyped_storage()._cdata in known  # noqa: SLF001 - the storage's identity
        unchanged = self._version == tensor._version == self._counter._version  # noqa: SLF001
        return same and unchanged and _share_counter(self._counter, tensor)

    def storage(self) -> torch.UntypedStorage | None:
        """A storage on the device with these bytes, if there is one still."""
        found = _alive(self._original)
        return found if found is not None or self._loaded is None else _alive(self._loaded)

    def loaded(self, storage: torch.UntypedStorage) -> None:
        """The bytes are on the device again."""
        self._loaded = _weak(storage)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Packed:
    """A saved tensor: where its bytes are, and how it was when it was saved."""

    bytes: HostCopy | Tensor
    geometry: Geometry
    counter: Tensor
    version: int


class SavedTensors:
    """Sends what autograd saves to the host.

    Args:
        device: the device that the unit runs on.
        stays: whether a tensor's storage stays on the device anyway (state, the batch), so that it is only referred to.

    Attributes:
        bytes_out, bytes_in: bytes spilled and loaded so far.
        peak_bytes: the most the copies have taken on the host at once.
    """

    def __init__(self, device: Device, stays: Callable[[Tensor], bool]) -> None:
        self.bytes_out = 0
        self.bytes_in = 0
        self.peak_bytes = 0
        self._host_bytes = 0
        self._device = device
        self._stays = stays
        self._copies: weakref.WeakValueDictionary[int, HostCopy] = weakref.WeakValueDictionary()

    def hooks(self) -> AbstractContextManager[object]:
        """Autograd saves through this object while the context is entered."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> Packed:
        """Called by autograd when it saves a tensor; detached, because a node must not keep itself alive."""
        held = self._copy_of(tensor) if self._moves(tensor) else tensor.detach()
        return Packed(held, Geometry.of(tensor), counter_of(tensor), tensor._version)  # noqa: SLF001

    def unpack(self, packed: Packed) -> Tensor:
        """Called by autograd when a backward reads a saved tensor.

        Raises:
            RuntimeError: the tensor was overwritten in place after it was saved, as autograd itself would say.
        """
        present = packed.counter._version  # noqa: SLF001
        if present != packed.version:
            raise overwritten(packed.geometry, present, packed.version)
        held = packed.bytes
        if isinstance(held, Tensor):
            return held
        tensor = packed.counter.detach()
        tensor.data = packed.geometry.view(self._on_device(held))
        return tensor

    def _moves(self, tensor: Tensor) -> bool:
        """Whether a tensor is an ordinary one on the device, and large enough."""
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_quantized
        return (
            plain
            and tensor.device.type == self._device.torch_device.type
            and not (tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())  # noqa: SLF001
            and tensor.untyped_storage().nbytes() >= SMALL_BYTES
            and not self._stays(tensor)
        )

    def _copy_of(self, tensor: Tensor) -> HostCopy:
        key = tensor.untyped_storage()._cdata  # noqa: SLF001 - the storage's identity
        copy = self._copies.get(key)
        if copy is None or not copy.holds(tensor):
            copy = self._spill(tensor)
            self._copies[key] = copy
        return copy

    def _spill(self, tensor: Tensor) -> HostCopy:
        flat = whole_storage(tensor.detach())
        nbytes = flat.numel()
        host = self._device.on_host(lambda: self._device.host_empty(nbytes))
        self._device.spill([(flat, host)])
        copy = HostCopy(tensor, host)
        weakref.finalize(copy, self._let_go, nbytes)
        self.bytes_out += nbytes
        self._host_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._host_bytes)
        return copy

    def _let_go(self, nbytes: int) -> None:
        self._host_bytes -= nbytes

    def _on_device(self, copy: HostCopy) -> torch.UntypedStorage:
        storage = copy.storage()
        if storage is None:
            flat = self._device.empty(copy.host.numel())
            self._device.load([(copy.host, flat)])
            self.bytes_in += flat.numel()
            storage = flat.untyped_storage()
            copy.loaded(storage)
            # A backward may save it again, for a second derivative.
            self._copies[storage._cdata] = copy  # noqa: SLF001
        return storage


class SheddingTensors(SavedTensors):
    """Keeps what autograd saves where it is, until somebody needs the room: then it goes to the host, and all that follows.

    Gradients of `torch.func`, which refuse hooks, run as they do where there are none: what they save stays where it is.

    Args:
        device, stays: as of `SavedTensors`.
        kept: told of each tensor that is to stay where it is; may have all of them go to the host (`shed`).

    Attributes:
        is_shedding: whether that has happened.
    """

    def __init__(self, device: Device, stays: Callable[[Tensor], bool], kept: Callable[[Tensor], None]) -> None:
        super().__init__(device, stays)
        self.is_shedding = False
        self._note_kept = kept
        self._kept: weakref.WeakSet[Packed] = weakref.WeakSet()

    def hooks(self) -> AbstractContextManager[object]:
        """Autograd saves through this object while the context is entered, but for what gradients of `torch.func` save."""
        _let_transforms_by()
        return super().hooks()

    def pack(self, tensor: Tensor) -> Packed:
        """Called by autograd when it saves a tensor."""
        if self.is_shedding or not self._moves(tensor):
            return super().pack(tensor)
        self._note_kept(tensor)
        if self._has_shed():
            return super().pack(tensor)
        packed = Packed(tensor.detach(), Geometry.of(tensor), counter_of(tensor), tensor._version)  # noqa: SLF001
        self._kept.add(packed)
        return packed

    def _has_shed(self) -> bool:
        return self.is_shedding  # which may have changed meanwhile

    def shed(self) -> None:
        """Send all that is kept to the host, and all that will be saved."""
        if self.is_shedding:
            return
        self.is_shedding = True
        for packed in list(self._kept):
            if isinstance(packed.bytes, Tensor):
                packed.bytes = self._copy_of(packed.bytes)
        self._kept.clear()


class _Suspended(threading.local):
    """The hooks that a transform on this thread has put aside."""

    saved: SheddingTensors | None = None


_SUSPENDED = _Suspended()


@functools.cache
def _let_transforms_by() -> None:
    """Have `torch.func` put hooks of `SheddingTensors` aside for as long as it wants none, where it would refuse to run.

    Only these, and only where they are the innermost: with hooks of the user's own it refuses as it would in a plain loop.
    """
    torch_hooks: Any = torch._C._autograd  # noqa: SLF001 - torch has no public name for any of these
    disable, enable = torch_hooks._saved_tensors_hooks_disable, torch_hooks._saved_tensors_hooks_enable  # noqa: SLF001
    push, pop = torch_hooks._push_saved_tensors_default_hooks, torch_hooks._pop_saved_tensors_default_hooks  # noqa: SLF001

    @functools.wraps(disable)
    def disable_around(*arguments: Any) -> None:
        hooks = torch_hooks._top_saved_tensors_default_hooks(True)  # noqa: SLF001
        saved = None if hooks is None else getattr(hooks[0], "__self__", None)
        if not isinstance(saved, SheddingTensors):
            disable(*arguments)
            return
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


def overwritten(geometry: Geometry, present: int, expected: int) -> RuntimeError:
    """What autograd says of a saved tensor that was overwritten in place."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{geometry.dtype} {list(geometry.shape)}] is at version {present}; expected version {expected} instead"
    )


def counter_of(tensor: Tensor) -> Tensor:
    """An empty tensor that shares a tensor's version counter and none of its memory."""
    counter = tensor.detach()
    counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter


def _share_counter(counter: Tensor, tensor: Tensor) -> bool:
    """Whether two tensors have one version counter: what moves one moves the other."""
    before = tensor._version  # noqa: SLF001
    with _unsafe_preserve_version_counter(counter):
        torch.autograd.graph.increment_version(counter)
        return tensor._version != before  # noqa: SLF001


def _weak(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _alive(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)  # noqa: SLF001
