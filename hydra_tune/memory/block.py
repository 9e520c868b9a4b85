"""Blocks: the units of transfer of a trial's bytes.

A block is one flat buffer on the host, on one device, or on both; a host tier may also keep the bytes in a file.

A *group* is a block under long-lived tensors (parameters, buffers, optimizer state); the tensors are views of the
buffer, and moving the group points the tensors at the new place. A *value* is a view of a block that lives for one
step: an activation at a cut, a gradient, a batch tensor.

`TensorGroups` (`train/state/tensor_groups.py`) makes the groups when a trial's tensors are laid out for a plan, and
`ModelState` (`train/state/model_state.py`) makes new groups where the user's own code has made new tensors. Blocks of
values are made by `BlockStore` (`train/state/block_store.py`) for a batch, and by `Lease` (`lease.py`) for a unit's
results. `ParameterReplicas` (`train/state/replicas.py`) makes read-only copies of groups, and `shared/shared_block.py` has the
blocks of tensors that trials share. `Pager` (`pager.py`) moves all blocks when a unit needs the bytes or the room, and
`BlockPrefetcher` (`prefetch.py`) ahead of the need. `HostTier` (`host/host_tier.py`) moves host copies to files, and
`block_release.py` brings blocks home and drops blocks. `shard/fake/fake_memo.py`, `shard/execute/saved_activations.py` and
`train/checkpoint/snapshot.py` use the geometries and layouts. The module must not import the pager or the host tier, which
both import blocks: a block knows both by `PagerInterface` and `HostTierInterface`.

Note: locks. A thread that changes a block's state or place holds the block's own `lock`.
"""

import contextlib
import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor, nn

from hydra_tune.devices.copying import BackgroundCopy
from hydra_tune.devices.device import Device
from hydra_tune.memory.block_states import FOLLOWING, NUM_KEPT, BlockState, impossible
from hydra_tune.memory.deferred_free import TrialTensorReaders
from hydra_tune.memory.trial_context import TrialMemoryContext


class BlockKind(StrEnum):
    """Content of a block; the counts of moved bytes are kept per kind.

    Boundaries cross the cuts between shards: values in the forward pass and their gradients in the backward pass. A
    value also kept for the backward of its own shard counts as an activation. Gradients are gradients of parameters.
    """

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    BOUNDARIES = "boundaries"
    GRADIENTS = "gradients"
    INPUTS = "inputs"


_NUMBERS = itertools.count()


class PagerInterface(Protocol):
    """View of a pager from a block on the pager's device."""

    device: Device

    def discard(self, block: "Block") -> None:
        """Drop an incoming copy of the block."""

    def call_off(self, block: "Block") -> bool:
        """Drop an incoming copy if the copy has not begun; return whether the copy was dropped."""

    def settle(self, block: "Block") -> None:
        """Finish all copies of a block to and from the device, so that the room of its host copy can be used."""

    def finish_leaving(self, block: "Block", *, keep: bool = False, is_noted: bool = True) -> None:
        """Finish or cancel a background write-back."""

    def write_back(self, block: "Block") -> None:
        """Bring the host copy up to date; the device copy stays."""

    def release(self, block: "Block") -> None:
        """Free the device copy."""


@dataclass(slots=True)
class IncomingTransfer:
    """Bytes on the way to a device.

    Args:
        host: host memory to copy from; None: the source is the device that holds the block until the end of the copy.
        lease: number of the unit beside which the copy was started.
    """

    home: PagerInterface
    host: Tensor | None
    data: Tensor
    copy: BackgroundCopy
    lease: int


class HostTierInterface(Protocol):
    """View of the host tier from a block: counts host copies and may keep bytes on disk (`memory/host/host_tier.py`).

    A read-only copy of a group has a tier of its own kind, which lends the group's host copy (`train/state/replicas.py`).
    """

    def provide(self, block: "Block", device: Device) -> None:
        """Give the block an empty host copy."""

    def written(self, block: "Block") -> None:
        """Note that the host copy has new bytes, so that a file of older bytes is stale."""

    def recall(self, block: "Block", device: Device | None = None) -> None:
        """Read the block from disk into a new host copy if no other copy exists."""

    def loaded(self, block: "Block") -> None:
        """Note that the host copy has been copied to a device."""

    def forget(self, block: "Block") -> None:
        """Release everything the tier holds for the block."""


class Block:
    """One flat buffer.

    Invariants, under `lock`: At least one of `host`, `data` and the file of `tier` holds the present bytes; `dirty`
    means that only `data` does. Of a loose group the tensors hold the bytes, and of a `SharedBlockHandle`
    (`memory/shared/shared_block.py`) other blocks. The unit that has pinned a block may set `dirty` without the lock.
    `data` lies on the device of the pager `home`. A block pinned for a pager stays on the
    pager's device, or is being brought there. A background copy in `coming` changes nothing until a thread has seen the
    end of the copy: an incoming block either has no `home` and a current host copy, or still has its `home` on another
    device and stays unchanged there. A background write-back in `leaving` changes nothing either: until a thread has
    seen the end, the block is resident and `dirty`.

    Args:
        alignment: alignment of the device in bytes; the ledger counts whole multiples.

    Attributes:
        state: present state (`memory/block_states.py`).
        pinned_for: the pager whose unit needs the block, or the `HostBlockPin` (`block_release.py`) of work on the host;
            None: the block may move.
    """

    __slots__ = (
        "coming", "data", "dirty", "home", "host", "kind", "leaving", "lock", "nbytes", "number", "owner", "past", "pinned_for",
        "size", "state", "tenant", "tier",
    )  # fmt: skip

    def __init__(self, kind: BlockKind, size: int, alignment: int, state: BlockState = BlockState.HOST) -> None:
        self.number = next(_NUMBERS)  # identifies the block in records and file names
        self.kind = kind
        self.owner: int | None = None  # the trial
        self.size = size
        self.nbytes = -(-size // alignment) * alignment  # what the ledger counts
        self.host: Tensor | None = None
        self.data: Tensor | None = None
        self.home: PagerInterface | None = None
        self.dirty = False
        self.pinned_for: object = None
        self.tier: HostTierInterface | None = None
        self.tenant: TrialMemoryContext | None = None  # owner of the bytes, if known
        self.coming: IncomingTransfer | None = None
        self.leaving: BackgroundCopy | None = None
        # Reentrant: `Lease.absorb`, for example, calls `drop` with the lock held.
        self.lock = threading.RLock()
        self.state = state
        self.past: deque[BlockState] = deque(maxlen=NUM_KEPT)

    def enter(self, state: BlockState) -> None:
        """Change to another state. Call under `lock`.

        Raises:
            BlockStateError: the present state does not allow the change.
        """
        if state not in FOLLOWING[self.state]:
            raise impossible(self.kind, self.number, self.owner, [*self.past, self.state], state)
        self.past.append(self.state)
        self.state = state

    is_loose = False
    lies_in_place = False  # whether a load takes the host copy itself for the device's

    def at(self, pager: PagerInterface) -> "Block":
        """Return the block that a unit on the pager's device needs: the block itself, unless it stands for others."""
        del pager
        return self

    def is_shared(self) -> bool:
        """Whether other objects know of the memory of a loose block."""
        return False

    def moved(self) -> None:
        """React to a change of `data` or `host`. Called under `lock`."""

    def part(self) -> None:
        """Release the tensors on the block, which now belong to another block or to nobody."""

    def gather(self, device: Device) -> None:
        """Fill the host copy of a loose block."""
        raise NotImplementedError(f"block {self.number} ({self.kind}) is never loose")

    def announce(self, place: str | None) -> None:
        """React to the start of a copy to a device, or to its end (None). Called under `lock`."""

    def put_host(self, flat: Tensor) -> None:
        """Set the memory of the host copy. Call under `lock`, inside `device.on_host`."""
        self.host = flat

    def free_host(self, on_disk: Callable[[], Tensor] | None) -> None:
        """Drop the host copy. Call under `lock`, inside `device.on_host`.

        Args:
            on_disk: returns the bytes as a view of a file; None if only the device has the bytes, or nobody needs the
                bytes any more.
        """
        del on_disk
        self.host = None

    @property
    def place(self) -> str | None:
        """Name of the device with the block, or None."""
        return None if self.home is None else self.home.device.name


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Place of a tensor in a flat buffer; `offset` in elements of the tensor's dtype."""

    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def view(self, flat: Tensor) -> Tensor:
        """Return the tensor as a view of a flat uint8 buffer."""
        return flat.view(self.dtype).as_strided(self.shape, self.stride, self.offset)


def lay_out(tensors: Sequence[Tensor], alignment: int) -> tuple[list[TensorSlot], int]:
    """Return slots for tensors in one flat buffer, each aligned as if allocated alone, and the buffer's size in bytes.

    Dense tensors keep their strides (channels_last stays channels_last); other tensors are laid out contiguous.
    """
    slots, position = [], 0
    for tensor in tensors:
        dense = tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)
        stride = tensor.stride() if dense else tensor.contiguous().stride()
        slots.append(TensorSlot(position // tensor.element_size(), tensor.shape, tuple(stride), tensor.dtype))
        position += -(-tensor.numel() * tensor.element_size() // alignment) * alignment
    return slots, position


class TensorBlock(Block):
    """A block under long-lived tensors, which are views of the block.

    Note: loose groups. Tensors that already lie where their device computes, such as host tensors for a CPU device,
    keep their own storages until the block has to leave. Such a *loose* group counts the bytes and has no buffer.
    The first write-back gathers the tensors in host memory, and from then on the group is like any other. If another object
    shares the memory (a numpy array, a detached tensor, another parameter), a copy would separate the two. The tensors
    then stay in place, and the group merely counts as a group on the host.

    Note: strays. The user's code may give a tensor other memory (`p.data = ...`, `module.double()`). From then on the
    other memory counts, and the bytes in the buffer are stale. A move leaves such a stray tensor in place until
    `collect` copies the tensor back into the buffer, or until another group takes the tensor. Tensors common to several
    trials (`TrialTensorReaders`) stay in place as well.

    Attributes:
        is_loose: whether the tensors have their own storages.
        shard: shard of the parameters, if all belong to one shard.
        on_moved: receives the name of the device with the block, or None, after each move, and the name of the device to
            which a background copy begins.

    Args:
        tensors: tensors to take over; afterwards their `.data` follows the block.
        device: device whose host memory (pinned, for a GPU) and alignment to use. Call inside `device.on_host`, unless
            the group begins loose.
        readers: readers of the tensors; None: only units read the tensors.
    """

    __slots__ = (
        "_common", "_host_views", "_places", "_readers", "_slots", "_strides", "is_loose", "on_moved", "shard", "tensors",
    )  # fmt: skip

    def __init__(
        self,
        kind: BlockKind,
        tensors: Sequence[Tensor],
        device: Device,
        readers: TrialTensorReaders | None = None,
        *,
        is_loose: bool = False,
    ) -> None:
        self._readers = TrialTensorReaders() if readers is None else readers
        self._slots, nbytes = lay_out(tensors, device.alignment)
        super().__init__(kind, nbytes, device.alignment)
        self.tensors = list(tensors)
        self.shard: int | None = None
        self.on_moved: Callable[[str | None], None] | None = None
        self.is_loose = is_loose
        self._strides = [tensor.stride() for tensor in self.tensors]
        # Storage and offset of each tensor after the last move; empty while the group is loose.
        self._places: list[tuple[int, int]] = []
        self._common: set[int] = set()  # by `id`: tensors found to belong to another trial as well
        if kind is not BlockKind.OPTIMIZER:
            # Optimizer state belongs to a single trial, and `TrialTensorReaders` would take the state for untrained
            # parameters.
            self._readers.hold(self.tensors)
        if is_loose:
            self._host_views: list[Tensor] = []
            return
        self.host = device.host_empty(nbytes)
        # Created once, here: on a worker thread, a view of host memory would look like device memory.
        self._host_views = [slot.view(self.host) for slot in self._slots]
        for view, tensor in zip(self._host_views, self.tensors, strict=True):
            view.copy_(tensor.detach())
        self.moved()

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the tensors as views of another flat buffer with the same bytes."""
        return [slot.view(flat) for slot in self._slots]

    def put_host(self, flat: Tensor) -> None:
        """Set the memory of the host copy, and prepare the views for the tensors."""
        super().put_host(flat)
        self._host_views = self.views(flat)

    def free_host(self, on_disk: Callable[[], Tensor] | None) -> None:
        """Drop the host copy; tensors on no device become views of the file, so reading the tensors stays correct."""
        flat = None if on_disk is None else on_disk()
        super().free_host(on_disk)
        self._host_views = [] if flat is None else self.views(flat)
        if self.data is None:
            self.moved()

    def part(self) -> None:
        """Release the tensors, which now belong to another group or to nobody."""
        if self.kind is not BlockKind.OPTIMIZER:
            self._readers.let_go(self.tensors)
        self.tensors, self._slots, self._strides, self._places, self._host_views = [], [], [], [], []

    def is_shared(self) -> bool:
        """Whether other objects or several of the tensors share the memory, or the memory is no longer as laid out."""
        if self.strays() or self._readers.in_common(self.tensors):
            return True
        # A numpy array, a view or another tensor on a storage shows in the size or in the use count of the storage.
        storages = [tensor.untyped_storage() for tensor in self.tensors]
        are_storages_distinct = len({storage._cdata for storage in storages}) == len(storages)  # noqa: SLF001 - the storage's identity
        sizes = (tensor.numel() * tensor.element_size() for tensor in self.tensors)
        return (
            not are_storages_distinct
            or any(storage.nbytes() != size for storage, size in zip(storages, sizes, strict=True))
            or any(_num_users(storage) > _sole_user() for storage in storages)
        )

    def is_buffer_shared(self) -> bool:
        """Whether others than the tensors of the group hold the device's buffer, such as views of the tensors."""
        if self.data is None:
            return False
        outside = {id(tensor) for tensor in self.strays()} | self._common
        num_own = sum(id(tensor) not in outside for tensor in self.tensors)
        return _num_users(self.data.untyped_storage()) > _sole_user() + num_own

    def gather(self, device: Device) -> None:
        """Copy the tensors of a loose group to its host copy; the tensors stay in place until `moved`."""
        device.spill([(tensor.detach(), view) for tensor, view in zip(self.tensors, self._host_views, strict=True)])

    def moved(self) -> None:
        """Point the tensors at the present place of the bytes."""
        if self.is_loose and (self.home is not None or (self.host is None and self.state is not BlockState.DROPPED)):
            self.announce(self.place)  # still loose: the tensors have not moved
            return
        # Strays are found before the places change: afterwards every tensor would look like a stray.
        strays = set(map(id, self.strays()))
        self.is_loose = False
        flat = self.data
        views = self._host_views if flat is None else self.views(flat)
        # Without views, neither a device nor the host nor a file has the bytes: the group has been dropped.
        views = views or [self._left_over(tensor) for tensor in self.tensors]
        moving = [pair for pair in zip(self.tensors, views, strict=True) if id(pair[0]) not in strays | self._common]
        self._common |= self._readers.point([tensor for tensor, _ in moving], [view for _, view in moving])
        self._places = [_place_of(view) for view in views]
        self.announce(self.place)

    def _left_over(self, tensor: Tensor) -> Tensor:
        """Remaining memory for a tensor of a dropped group: empty, except for an untrained parameter.

        Another trial may share a parameter without `requires_grad`, so such a parameter keeps its bytes in plain CPU
        memory.
        """
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
            with contextlib.suppress(RuntimeError):  # out of memory, or a failed device: then nothing can be kept
                return torch.empty_like(tensor, device="cpu").copy_(tensor.detach())
        return tensor.data.new_empty(0)

    def strays(self) -> list[Tensor]:
        """Tensors with another shape, stride or dtype than at the last move, or with memory outside the buffer."""
        places = self._places or itertools.repeat(None)
        strides = [slot.stride for slot in self._slots] if self._places else self._strides
        entries = zip(self.tensors, self._slots, strides, places, strict=False)
        # Tensors of several trials never move with the block, so their other place does not make them strays.
        return [
            tensor
            for tensor, slot, stride, place in entries
            if not (_is_alike(tensor, slot) and tensor.stride() == stride and _is_at(tensor, place))
            and id(tensor) not in self._common
        ]

    def collect(self) -> list[Tensor]:
        """Copy strays back into the buffer; return tensors with a new shape or dtype, for which no copy is possible.

        Call under `lock`, or while a unit has the block pinned.
        """
        stray_ids = set(map(id, self.strays()))
        if not stray_ids or self.is_loose:
            return []
        views = self._host_views if self.data is None else self.views(self.data)
        entries = list(zip(self.tensors, self._slots, views, strict=True))
        entries = [entry for entry in entries if id(entry[0]) in stray_ids]
        alike = [(tensor, view) for tensor, slot, view in entries if _is_alike(tensor, slot)]
        fresh = [  # copied first if elsewhere in the buffer, before any write there
            tensor.detach().clone() if storage_identity(tensor) == storage_identity(view) else tensor.detach()
            for tensor, view in alike
        ]
        with torch.no_grad():
            for (_, view), value in zip(alike, fresh, strict=True):
                view.copy_(value)
        self._readers.point([tensor for tensor, _ in alike], [view for _, view in alike])
        # The copy with the new bytes is the only right copy now: on the device, or on the host with a stale file.
        if self.data is not None:
            self.dirty = True
        elif self.tier is not None and self.host is not None:
            self.tier.written(self)
        return [tensor for tensor, slot, _ in entries if not _is_alike(tensor, slot)]

    def own_memory(self, shared: set[int]) -> None:
        """Give each tensor of a loose group its own memory, unless the tensor alone fills a storage outside `shared`."""
        for tensor in self.tensors:
            storage = tensor.untyped_storage()
            if storage_identity(tensor) in shared or storage.nbytes() != tensor.numel() * tensor.element_size():
                self._readers.point([tensor], [tensor.detach().clone()])

    def let_go(self) -> None:
        """Give each tensor its own memory, as created by the module's class; only `drop` may follow.

        Call under `lock`, with the block on the host. The new memory belongs to the caller, so the memory is plain:
        neither pinned nor on a ledger.
        """
        strays = set(map(id, self.strays())) | self._common
        owned = [
            tensor.detach().to("cpu", copy=True)
            if id(tensor) in strays
            else torch.empty_strided(slot.shape, slot.stride, dtype=slot.dtype, device="cpu").copy_(view)
            for tensor, slot, view in zip(self.tensors, self._slots, self._host_views, strict=True)
        ]
        self._readers.point(self.tensors, owned)
        self.part()

    def announce(self, place: str | None) -> None:
        """Report the present or future place of the block to `on_moved`."""
        if self.on_moved is not None:
            self.on_moved(place)


def _is_alike(tensor: Tensor, slot: TensorSlot) -> bool:
    return tensor.layout is torch.strided and tensor.shape == slot.shape and tensor.dtype == slot.dtype


def _is_at(tensor: Tensor, place: tuple[int, int] | None) -> bool:
    return place is None or not tensor.numel() or _place_of(tensor) == place


def _place_of(tensor: Tensor) -> tuple[int, int]:
    return storage_identity(tensor), int(tensor.storage_offset())


def _num_users(storage: torch.UntypedStorage) -> int:
    count: int = torch._C._storage_Use_Count(storage._cdata)  # noqa: SLF001 - no public name
    return count


@functools.cache
def _sole_user() -> int:
    """Use count of a storage with a single tensor."""
    tensor = torch.empty(1)  # must stay alive during the count
    return _num_users(tensor.untyped_storage())


@dataclass(frozen=True, slots=True)
class TensorGeometry:
    """Place of a tensor in its storage; `offset` in elements of the tensor's dtype."""

    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> "TensorGeometry":
        """Return the geometry of a tensor; a sparse one has no place in a storage, but a shape and a dtype."""
        if tensor.layout is not torch.strided:
            return TensorGeometry(0, tensor.shape, (), tensor.dtype)
        return TensorGeometry(int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype)

    def view(self, storage: torch.UntypedStorage, device: torch.device | None = None) -> Tensor:
        """Return a tensor with this geometry on a storage of the same contents.

        Args:
            storage: storage under the tensor.
            device: device of the storage; None: as reported by the storage, which is wrong for a fake tensor's storage.
        """
        empty = torch.empty(0, dtype=self.dtype, device=device or storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


class BlockTensorView:
    """A view of a block, kept by a store under a key; holds no memory itself."""

    __slots__ = ("_geometry", "block")

    def __init__(self, block: Block, tensor: Tensor) -> None:
        self.block = block
        self._geometry = TensorGeometry.of(tensor)

    def tensor(self) -> Tensor:
        """Return the value on the device of its block."""
        data = self.block.data
        assert data is not None, "the block is not on a device"
        return self._geometry.view(data.untyped_storage(), data.device)

    def host_tensor(self) -> Tensor:
        """Return the value on the host; the block must be on the host and on no device."""
        host = self.block.host
        assert host is not None, "the block is not on the host"
        assert self.block.home is None, "the block is on a device"
        return self._geometry.view(host.untyped_storage(), host.device)


def storage_identity(tensor: Tensor) -> int:
    """Return a number equal for all tensors on one storage."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - torch has no other name for it


def whole_storage(tensor: Tensor) -> Tensor:
    """Return the storage under a tensor as a flat uint8 tensor."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage())
