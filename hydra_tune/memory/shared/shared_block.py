"""Copies of shared tensors on devices: one copy a device for all trials that need the tensor there.

`SharedTensors` (`train/state/shared_state.py`) makes a `SharedBlockHandle` for each shared tensor of a trial, and has the
handles leave. `TensorGroups` (`train/state/tensor_groups.py`) lists the handles among the blocks of the trial's units, and so
does `ParameterReplicas` (`train/state/replicas.py`). A pager that leases or prefetches blocks asks each block for the block on
its own device (`Block.at`): a handle leads to the copy there, and any other block is meant itself.

A copy is a block like any other, with two differences. A copy's bytes come from the shared file and never change, so
the copy is always clean, and the file's own memory serves as the host copy. And the copy belongs to no trial: the copy
goes with the last trial that has a handle that leads to the copy. A device runs one unit at a time, so one unit at most
computes with a copy.

Note: locks. `_LOCK` guards the table of copies and their `users`; a thread takes a handle's lock before `_LOCK`. The module
must not know models.
"""

import threading
import weakref

from hydra_tune.memory.block import Block, BlockKind, PagerInterface
from hydra_tune.memory.block_release import drop
from hydra_tune.memory.shared.shared_file import SharedTensor

_LOCK = threading.Lock()
# Weak: the handles of the trials keep a copy alive.
_COPIES: "weakref.WeakValueDictionary[tuple[SharedTensor, PagerInterface], SharedBlockCopy]" = (
    weakref.WeakValueDictionary()
)


class SharedBlockCopy(Block):
    """A shared tensor on a device.

    Attributes:
        lies_in_place: whether the device computes with the bytes of the file itself, so that a load only counts them.
    """

    __slots__ = ("__weakref__", "lies_in_place", "users")

    def __init__(self, source: SharedTensor, alignment: int) -> None:
        super().__init__(BlockKind.PARAMETERS, source.flat.numel(), alignment)
        self.host = source.flat
        self.users: set[SharedBlockHandle] = set()
        self.lies_in_place = False


class SharedBlockHandle(Block):
    """A trial's share of a shared tensor; holds no bytes itself.

    Args:
        may_lie_in_place: whether a device that computes on host tensors may use the bytes of the file itself.
    """

    __slots__ = ("_copies", "_may_lie_in_place", "source")

    def __init__(self, source: SharedTensor, owner: int, alignment: int, *, may_lie_in_place: bool) -> None:
        super().__init__(BlockKind.PARAMETERS, source.flat.numel(), alignment)
        self.owner = owner
        self.source = source
        self._may_lie_in_place = may_lie_in_place
        self._copies: dict[PagerInterface, SharedBlockCopy] | None = {}  # None: the share is given up

    def at(self, pager: PagerInterface) -> Block:
        """Return the copy on the pager's device, made if there is none; the handle itself once the share is given up."""
        with self.lock:
            if self._copies is None:
                return self
            copy = self._copies.get(pager)
            if copy is None:
                copy = self._copies[pager] = self._joined(pager)
        if copy.home is None and copy.coming is None:
            copy.lies_in_place = self._may_lie_in_place and pager.device.keeps_tensors
        return copy

    def _joined(self, pager: PagerInterface) -> SharedBlockCopy:
        with _LOCK:
            copy = _COPIES.get((self.source, pager))
            if copy is None:
                copy = _COPIES[self.source, pager] = SharedBlockCopy(self.source, pager.device.alignment)
            copy.users.add(self)
        return copy

    def leave(self) -> None:
        """Give the share up, and free the copies that no other trial uses; no unit of the trial may run.

        A trial gives all shares up at its end, and earlier the shares in parameters that are shared no more.
        """
        with self.lock:
            copies, self._copies = self._copies or {}, None
        for pager, copy in copies.items():
            with _LOCK:
                copy.users.discard(self)
                is_last = not copy.users
                if is_last:
                    del _COPIES[self.source, pager]
            if is_last:
                drop(copy)
