"""Blocks: the pieces in which a trial's bytes move. A block is one flat buffer, on the host, on one device, or on both.

A *group* is a block that long-lived tensors (parameters, buffers, optimizer state) are views of; moving it points them at
the new place. A *value* is a view of a block that lives for a step: an activation at a cut, a gradient, a batch tensor.
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

from hydra_tune.devices.copying import Copy
from hydra_tune.devices.device import Device
from hydra_tune.memory.readers import Readers
from hydra_tune.memory.states import FOLLOWING, NUM_KEPT, State, impossible
from hydra_tune.memory.tenant import Tenant


class Kind(StrEnum):
    """What a block holds; bytes moved are counted by it.

    Boundaries are what crosses cuts: values forward, and their gradients backward. A value that is kept for its own shard's
    backward as well is one of the activations. Gradients are those of parameters.
    """

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    BOUNDARIES = "boundaries"
    GRADIENTS = "gradients"
    INPUTS = "inputs"


_NUMBERS = itertools.count()


class Home(Protocol):
    """What a block is told of the pager whose device it is on."""

    device: Device

    def discard(self, block: "Block") -> None:
        """What is on its way there is not wanted any more."""

    def call_off(self, block: "Block") -> bool:
        """As `discard`, if the copy has not begun; returns whether it had not."""

    def settle(self, block: "Block") -> None:
        """Have what is under way of a block there, or from there, over: somebody wants the room of its host copy."""

    def finish_leaving(self, block: "Block", *, keep: bool = False, is_noted: bool = True) -> None:
        """Have what is being written back in the background over, or called off."""

    def write_back(self, block: "Block") -> None:
        """Make the host copy present; the device copy stays."""

    def release(self, block: "Block") -> None:
        """Give up the device copy."""


@dataclass(slots=True)
class Coming:
    """Bytes on their way to a device.

    Args:
        home: of the device.
        host: host memory that they are copied from; None: from the device that has the block until they are there.
        data: device memory that they are copied to.
        copy: copies them.
        lease: number of the unit beside which they were sent.
    """

    home: Home
    host: Tensor | None
    data: Tensor
    copy: Copy
    lease: int


class Tier(Protocol):
    """What a block is told of the tier that counts its host copy and may keep its bytes on disk (`memory/host.py`)."""

    def provide(self, block: "Block", device: Device) -> None:
        """Give it an empty host copy."""

    def written(self, block: "Block") -> None:
        """Its host copy has new bytes."""

    def recall(self, block: "Block", device: Device | None = None) -> None:
        """Give it a host copy of what is on disk, if its bytes are there only."""

    def loaded(self, block: "Block") -> None:
        """What `recall` has given has been copied to a device."""

    def forget(self, block: "Block") -> None:
        """Nothing of it is to be held any more."""


class Block:
    """One flat buffer.

    Invariants, under `lock`: at least one of `host`, `data` and the file of its `tier` holds the present bytes; `dirty` means
    that only `data` does; `data` lies on the device of the pager `home`; a block pinned for a pager stays on
    that pager's device, and is on its way there if it is elsewhere. What is `coming` in the background is nobody's yet: a
    block that comes has no `home`, and its host copy is the present one; or it is still at home on another device, and stays as
    it is there until somebody has seen the copy over. What is `leaving` is written back there, and stays as it is until
    somebody has seen that over: here and `dirty`.

    Args:
        kind: what it holds.
        size: its bytes.
        alignment: of the device; the ledger counts whole multiples.
        state: what it is at first.

    Attributes:
        state: what it is now (`memory/states.py`).
        past: what it was before, the last last.
    """

    __slots__ = (
        "coming", "data", "dirty", "home", "host", "kind", "leaving", "lock", "nbytes", "number", "owner", "past", "pinned_for",
        "size", "state", "tenant", "tier",
    )  # fmt: skip

    def __init__(self, kind: Kind, size: int, alignment: int, state: State = State.HOST) -> None:
        self.number = next(_NUMBERS)  # for records of a run
        self.kind = kind
        self.owner: int | None = None  # the trial
        self.size = size
        self.nbytes = -(-size // alignment) * alignment  # what the ledger counts
        self.host: Tensor | None = None
        self.data: Tensor | None = None
        self.home: Home | None = None
        self.dirty = False
        self.pinned_for: object = None
        self.tier: Tier | None = None
        self.tenant: Tenant | None = None  # whose it is, where that is known
        self.coming: Coming | None = None
        self.leaving: Copy | None = None
        self.lock = threading.RLock()
        self.state = state
        self.past: deque[State] = deque(maxlen=NUM_KEPT)

    def enter(self, state: State) -> None:
        """It is in another state now. Called under `lock`.

        Raises:
            BlockStateError: that cannot be.
        """
        if state not in FOLLOWING[self.state]:
            raise impossible(self.kind, self.number, self.owner, [*self.past, self.state], state)
        self.past.append(self.state)
        self.state = state

    is_loose = False

    def is_shared(self) -> bool:
        """Whether memory of a loose block is known to something else."""
        return False

    def moved(self) -> None:
        """Called under `lock` after `data` or `host` changed."""

    def part(self) -> None:
        """Let go of what lies on it, which another block has now, or nobody."""

    def gather(self, device: Device) -> None:
        """Fill the host copy of a loose block."""
        raise NotImplementedError(f"block {self.number} ({self.kind}) is never loose")

    def announce(self, place: str | None) -> None:
        """Called under `lock` when the block is on its way to a device, or is not any more (None)."""

    def put_host(self, flat: Tensor) -> None:
        """Take host memory for the host copy. Under `lock`, inside `device.on_host`."""
        self.host = flat

    def free_host(self, on_disk: Callable[[], Tensor] | None) -> None:
        """Give up the host copy. Under `lock`, inside `device.on_host`.

        Args:
            on_disk: gives the bytes as a view of a file; None if only the device has them, or nobody wants them any more.
        """
        del on_disk
        self.host = None

    @property
    def place(self) -> str | None:
        """Name of the device the block is on, or None."""
        return None if self.home is None else self.home.device.name


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a tensor lies in a flat buffer; `offset` in elements of its dtype."""

    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def view(self, flat: Tensor) -> Tensor:
        """The tensor as a view of a flat uint8 buffer."""
        return flat.view(self.dtype).as_strided(self.shape, self.stride, self.offset)


def lay_out(tensors: Sequence[Tensor], alignment: int) -> tuple[list[Slot], int]:
    """Slots for tensors in one flat buffer, each aligned as if it were allocated alone, and the buffer's bytes.

    Strides are kept (channels_last stays channels_last) where the tensor is dense; other tensors are laid out contiguous.
    """
    slots, position = [], 0
    for tensor in tensors:
        dense = tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)
        stride = tensor.stride() if dense else tensor.contiguous().stride()
        slots.append(Slot(position // tensor.element_size(), tensor.shape, tuple(stride), tensor.dtype))
        position += -(-tensor.numel() * tensor.element_size() // alignment) * alignment
    return slots, position


class Group(Block):
    """A block that long-lived tensors are views of.

    Note: loose groups. Tensors that lie where their device computes, as the host's own tensors do for a CPU device, stay in
    their own storages until something else needs the room: a *loose* group counts their bytes and has no buffer. The first
    spill gathers the tensors in host memory, and from then on the group is like any other. Where something else shares their
    memory (a numpy array, a detached tensor, another parameter), a copy would tear the two apart: then the tensors stay where
    they are, and the group merely counts as one on the host. So whatever the user's code holds of its tensors stays true.

    Note: strays. The user's code may give a tensor other memory (`p.data = ...`, `module.double()`): then that is what counts,
    and no longer the bytes in the buffer. So a move leaves such a tensor where it is, until `collect` has put it back into the
    buffer or another group has taken it. What several trials have in common (`Readers`) stays where it is as well.

    Attributes:
        is_loose: whether the tensors have their own storages.
        shard: the shard whose parameters these are, if it is one shard's.
        on_moved: told the name of the device, or None, after each move.

    Args:
        kind: what it holds.
        tensors: their bytes are taken over; afterwards their `.data` follows the block.
        device: whose host memory (pinned, for a GPU) and alignment to use. Call inside `device.on_host`.
        readers: of the tensors; None: nobody reads them but units.
        is_loose: whether the group begins loose.
    """

    __slots__ = (
        "_common", "_host_views", "_places", "_readers", "_slots", "_strides", "is_loose", "on_moved", "shard", "tensors",
    )  # fmt: skip

    def __init__(
        self,
        kind: Kind,
        tensors: Sequence[Tensor],
        device: Device,
        readers: Readers | None = None,
        *,
        is_loose: bool = False,
    ) -> None:
        self._readers = Readers() if readers is None else readers
        self._slots, nbytes = lay_out(tensors, device.alignment)
        super().__init__(kind, nbytes, device.alignment)
        self.tensors = list(tensors)
        self.shard: int | None = None
        self.on_moved: Callable[[str | None], None] | None = None
        self.is_loose = is_loose
        self._strides = [tensor.stride() for tensor in self.tensors]
        self._places: list[
            tuple[int, int]
        ] = []  # storage and offset, where the tensors were left; none while it is loose
        self._common: set[int] = set()  # by `id`, what has been found to be another trial's as well
        if kind is not Kind.OPTIMIZER:
            self._readers.hold(self.tensors)
        if is_loose:
            self._host_views: list[Tensor] = []
            return
        self.host = device.host_empty(nbytes)
        # Made once, here: on a worker thread, a view of host memory would look like device memory.
        self._host_views = [slot.view(self.host) for slot in self._slots]
        for view, tensor in zip(self._host_views, self.tensors, strict=True):
            view.copy_(tensor.detach())
        self.moved()

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors as they lie in another flat buffer of the same bytes."""
        return [slot.view(flat) for slot in self._slots]

    def put_host(self, flat: Tensor) -> None:
        """Take host memory for the host copy, which the tensors are to be views of."""
        super().put_host(flat)
        self._host_views = self.views(flat)

    def free_host(self, on_disk: Callable[[], Tensor] | None) -> None:
        """Give up the host copy; while the tensors are on no device they are views of the file, right for whoever looks."""
        flat = None if on_disk is None else on_disk()
        super().free_host(on_disk)
        self._host_views = [] if flat is None else self.views(flat)
        if self.data is None:
            self.moved()

    def part(self) -> None:
        """Let go of the tensors, which another group has now, or nobody."""
        if self.kind is not Kind.OPTIMIZER:
            self._readers.let_go(self.tensors)
        self.tensors, self._slots, self._strides, self._places, self._host_views = [], [], [], [], []

    def is_shared(self) -> bool:
        """Whether memory of its tensors is known to something else, or to several of them, or is not as it was."""
        if self.strays() or self._readers.in_common(self.tensors):
            return True
        storages = [tensor.untyped_storage() for tensor in self.tensors]
        owned = len({storage._cdata for storage in storages}) == len(storages)  # noqa: SLF001 - the storage's identity
        sizes = (tensor.numel() * tensor.element_size() for tensor in self.tensors)
        return (
            not owned
            or any(storage.nbytes() != size for storage, size in zip(storages, sizes, strict=True))
            or any(_num_users(storage) > _sole_user() for storage in storages)
        )

    def gather(self, device: Device) -> None:
        """Copy the tensors of a loose group to its host copy; the tensors stay where they are until `moved`."""
        device.spill([(tensor.detach(), view) for tensor, view in zip(self.tensors, self._host_views, strict=True)])

    def moved(self) -> None:
        """Point the tensors at where the bytes are."""
        if self.is_loose and (self.home is not None or (self.host is None and self.state is not State.DROPPED)):
            self.announce(self.place)  # the tensors are where they were
            return
        strays = set(map(id, self.strays()))
        self.is_loose = False
        flat = self.data
        views = self._host_views if flat is None else self.views(flat)
        views = views or [self._left_over(tensor) for tensor in self.tensors]
        moving = [pair for pair in zip(self.tensors, views, strict=True) if id(pair[0]) not in strays | self._common]
        self._common |= self._readers.point([tensor for tensor, _ in moving], [view for _, view in moving])
        self._places = [_place_of(view) for view in views]
        self.announce(self.place)

    def _left_over(self, tensor: Tensor) -> Tensor:
        """What is left of a tensor whose group is given up: nothing, unless others may have it, for nobody trains it."""
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
            with contextlib.suppress(RuntimeError):  # out of memory, or a device that has failed
                return torch.empty_like(tensor, device="cpu").copy_(tensor.detach())
        return tensor.data.new_empty(0)

    def strays(self) -> list[Tensor]:
        """The tensors that the user's code has given another form, or memory elsewhere than in the buffer."""
        places = self._places or itertools.repeat(None)
        strides = [slot.stride for slot in self._slots] if self._places else self._strides
        entries = zip(self.tensors, self._slots, strides, places, strict=False)
        return [
            tensor
            for tensor, slot, stride, place in entries
            if not (_is_alike(tensor, slot) and tensor.stride() == stride and _is_at(tensor, place))
            and id(tensor) not in self._common
        ]

    def collect(self) -> list[Tensor]:
        """Put strays back into the buffer; returns those whose form is another now, which cannot be.

        Under `lock`, or while a unit has the block pinned.
        """
        found = set(map(id, self.strays()))
        if not found or self.is_loose:
            return []
        views = self._host_views if self.data is None else self.views(self.data)
        entries = list(zip(self.tensors, self._slots, views, strict=True))
        entries = [entry for entry in entries if id(entry[0]) in found]
        alike = [(tensor, view) for tensor, slot, view in entries if _is_alike(tensor, slot)]
        fresh = [  # what lies elsewhere in the buffer is taken out before anything is written there
            tensor.detach().clone() if storage_identity(tensor) == storage_identity(view) else tensor.detach()
            for tensor, view in alike
        ]
        with torch.no_grad():
            for (_, view), value in zip(alike, fresh, strict=True):
                view.copy_(value)
        self._readers.point([tensor for tensor, _ in alike], [view for _, view in alike])
        if self.data is not None:
            self.dirty = True
        elif self.tier is not None and self.host is not None:
            self.tier.written(self)
        return [tensor for tensor, slot, _ in entries if not _is_alike(tensor, slot)]

    def own_memory(self, shared: set[int]) -> None:
        """Give each tensor of a loose group memory of its own, if it has none, or if its storage is one of `shared`."""
        for tensor in self.tensors:
            storage = tensor.untyped_storage()
            if storage_identity(tensor) in shared or storage.nbytes() != tensor.numel() * tensor.element_size():
                self._readers.point([tensor], [tensor.detach().clone()])

    def let_go(self) -> None:
        """Leave each tensor with memory of its own, as the module's class had made it; only `drop` may follow.

        Under `lock`, on the host. The memory is the caller's, so that it is plain: not pinned, and on nobody's ledger.
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
        """Say where the block is, or will be."""
        if self.on_moved is not None:
            self.on_moved(place)


def _is_alike(tensor: Tensor, slot: Slot) -> bool:
    return tensor.layout is torch.strided and tensor.shape == slot.shape and tensor.dtype == slot.dtype


def _is_at(tensor: Tensor, place: tuple[int, int] | None) -> bool:
    return place is None or not tensor.numel() or _place_of(tensor) == place


def _place_of(tensor: Tensor) -> tuple[int, int]:
    return storage_identity(tensor), int(tensor.storage_offset())


def _num_users(storage: torch.UntypedStorage) -> int:
    """Tensors and other holders of a storage, as far as torch counts them."""
    count: int = torch._C._storage_Use_Count(storage._cdata)  # noqa: SLF001 - no public name
    return count


@functools.cache
def _sole_user() -> int:
    """What is counted where one tensor has a storage to itself."""
    tensor = torch.empty(1)  # which lives while its users are counted
    return _num_users(tensor.untyped_storage())


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where a tensor lies in its storage; `offset` in elements of its dtype."""

    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> "Geometry":
        """A tensor's geometry."""
        return Geometry(int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype)

    def view(self, storage: torch.UntypedStorage, device: torch.device | None = None) -> Tensor:
        """The tensor in a storage of the same contents.

        Args:
            storage: the storage.
            device: where it is; None: as it says itself, which is wrong of a fake tensor's.
        """
        empty = torch.empty(0, dtype=self.dtype, device=device or storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


class Value:
    """A view of a block: what a store keeps under a key. Holds no memory itself."""

    __slots__ = ("_geometry", "block")

    def __init__(self, block: Block, tensor: Tensor) -> None:
        self.block = block
        self._geometry = Geometry.of(tensor)

    def tensor(self) -> Tensor:
        """The value on the device its block is on."""
        data = self.block.data
        assert data is not None, "the block is not on a device"
        return self._geometry.view(data.untyped_storage(), data.device)

    def host_tensor(self) -> Tensor:
        """The value on the host, where its block is."""
        host = self.block.host
        assert host is not None, "the block is not on the host"
        assert self.block.home is None, "the block is on a device"
        return self._geometry.view(host.untyped_storage(), host.device)


def storage_identity(tensor: Tensor) -> int:
    """The same for all tensors that lie on one storage."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - torch has no other name for it


def whole_storage(tensor: Tensor) -> Tensor:
    """The storage under a tensor as a flat uint8 tensor."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage())
