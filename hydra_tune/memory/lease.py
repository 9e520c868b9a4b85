"""`Lease`: what a unit holds of a device's memory while it runs."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

from torch import Tensor

from hydra_tune.memory.block import Block, Kind, storage_identity
from hydra_tune.memory.home import drop, pin
from hydra_tune.memory.saved import SavedTensors
from hydra_tune.memory.states import State
from hydra_tune.observe.turns import Turn, current_turn, in_turn, note

if TYPE_CHECKING:
    from hydra_tune.memory.pager import Held, Pager


class Lease:
    """What a running unit holds: its blocks, pinned and on the device, and its workspace on the ledger.

    Attributes:
        has_ended: whether nothing is held any more.

    Of a GPU it is asked on autograd's own thread as well, while the worker waits for a backward: there memory is given up that
    the backward needs no longer. That is noted as the worker's doing all the same.
    """

    def __init__(self, pager: "Pager", blocks: list[Block], workspace_bytes: int) -> None:
        self._pager = pager
        self._blocks = blocks
        self._workspace_bytes = workspace_bytes
        self._storages: dict[int, Block] = {}
        self._turn: Turn | None = None
        self.has_ended = False
        self._end_lock = threading.Lock()

    def __enter__(self) -> Self:
        self._turn = current_turn()
        for block in self._blocks:
            pin(block, self._pager)
        self._pager.owner = next((block.owner for block in self._blocks if block.owner is not None), None)
        note("lease", self._blocks, self._workspace_bytes)
        try:
            self._pager.bring(self._blocks, self._workspace_bytes)
        except BaseException:
            self._unpin()
            raise
        self._pager.ready_ns = self._pager.ready_ns or time.perf_counter_ns()
        for block in self._blocks:
            _enter(block, State.COMPUTING)
        self._storages = {storage_identity(block.data): block for block in self._blocks if block.data is not None}
        try:
            if self._pager.begins is not None:
                self._pager.begins()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Give everything back, if that has not been done: by the unit's own thread, or by whoever it keeps waiting."""
        with self._end_lock:
            if self.has_ended:
                return
            self.has_ended = True
        note("end", [block for block in self._blocks if block.dirty])
        self._unpin()
        self._storages = {}
        self._pager.ledger.give_back(self._workspace_bytes)

    def block_of(self, kind: Kind, tensor: Tensor) -> Block:
        """The block under a tensor: one of the lease's own, or a new one made from the workspace.

        Raises:
            BudgetError: the unit made more than its workspace.
        """
        storage = storage_identity(tensor)
        block = self._storages.get(storage)
        if block is None:
            nbytes = self._pager.size_on_ledger(tensor)
            if nbytes > self._workspace_bytes:  # more than the pilot has seen
                self.grow(nbytes - self._workspace_bytes)
            block = self._pager.adopt(kind, tensor)
            self._workspace_bytes -= nbytes
            block.pinned_for = self._pager  # until the unit ends, like all it works on
            _enter(block, State.COMPUTING)
            note("adopt", [block], nbytes)
            self._blocks.append(block)
            self._storages[storage] = block
        return block

    def absorb(self, block: Block) -> None:
        """Give up all of a block's bytes while the unit runs: if it is one of the lease's own, its room is workspace now."""
        with in_turn(self._turn), block.lock:
            if block.data is None or self._storages.get(storage_identity(block.data)) is not block:
                drop(block)
                return
            note("drop", [block])
            del self._storages[storage_identity(block.data)]
            block.enter(State.DROPPED)
            self._pager.vacate(block)
            if block.tier is not None:
                block.tier.forget(block)
            block.host = None
            self._workspace_bytes += block.nbytes

    def exchange(self, old: Block | None, new: Block | None) -> None:
        """Have a new block on the device in place of one of the lease's own, whose tensors it has now, or in place of nothing.

        Args:
            old: one of the lease's blocks, whose bytes nobody needs any more; None: none goes.
            new: loose or on the host, with tensors that the unit has made or that were the other's; None: none comes.

        Raises:
            BudgetError: what it counts beyond the other does not fit the budget.
        """
        needed = (0 if new is None else new.nbytes) - (0 if old is None else old.nbytes)
        if needed > self._workspace_bytes:
            self.grow(needed - self._workspace_bytes)
        self._workspace_bytes -= needed
        if old is not None:
            self._blocks.remove(old)
            with old.lock:
                old.part()
                old.enter(State.DROPPED)
                self._pager.vacate(old)
                if old.tier is not None:
                    old.tier.forget(old)
                old.pinned_for, old.host = None, None
        if new is not None:
            new.pinned_for = self._pager
            self._pager.take_new(new)
            _enter(new, State.COMPUTING)
            if new.data is not None:
                self._storages[storage_identity(new.data)] = new
            self._blocks.append(new)

    def pause(self) -> None:
        """The unit is between two of its steps, on the worker's thread."""
        if self._pager.pauses is not None:
            self._pager.pauses()

    def owns(self, tensor: Tensor, kinds: tuple[Kind, ...]) -> bool:
        """Whether a tensor lies in one of the lease's blocks of these kinds."""
        block = self._storages.get(storage_identity(tensor))
        return block is not None and block.kind in kinds

    def would_fit(self, nbytes: int) -> bool:
        """Whether a lease of the same blocks and so many bytes beside them fits the device."""
        return sum(block.nbytes for block in self._blocks) + nbytes <= self._pager.ledger.budget_bytes

    @property
    def data(self) -> list[Tensor]:
        """The memory of the blocks on the device."""
        return [block.data for block in self._blocks if block.data is not None]

    def grow(self, nbytes: int) -> None:
        """Take more workspace.

        Raises:
            BudgetError: it does not fit the budget.
        """
        with in_turn(self._turn):
            note("grow", nbytes=nbytes)
            self._pager.make_room(nbytes, self._blocks, self._workspace_bytes)
        self._workspace_bytes += nbytes

    def have(self, workspace_bytes: int) -> None:
        """Have as much workspace again, if it fits, after some of it has gone to blocks of what the unit has made."""
        if self._workspace_bytes < workspace_bytes and self.would_fit(workspace_bytes):
            self.grow(workspace_bytes - self._workspace_bytes)

    @property
    def place(self) -> str:
        """The name of the device."""
        return self._pager.device.name

    def hold(self, nbytes: int, let_go: Callable[[], None]) -> "Held | None":
        """Take room beyond the unit, as of `Pager.hold`."""
        return self._pager.hold(nbytes, let_go)

    @contextmanager
    def spilling_activations(self) -> Iterator[None]:
        """What autograd saves meanwhile, beyond the lease's own blocks, is kept on the host; the unit has to end inside."""
        saved = SavedTensors(self._pager.device, stays=lambda tensor: storage_identity(tensor) in self._storages)
        try:
            with saved.hooks():
                yield
        finally:
            self.count(saved)

    def count(self, saved: SavedTensors) -> None:
        """Activations of the unit have gone to the host, and come back."""
        pager = self._pager
        pager.bytes_out[Kind.ACTIVATIONS] += saved.bytes_out
        pager.bytes_in[Kind.ACTIVATIONS] += saved.bytes_in
        if pager.log is not None:
            pager.log.saved(pager.device.name, saved.bytes_in, saved.bytes_out)

    def _unpin(self) -> None:
        for block in self._blocks:
            with block.lock:
                block.pinned_for = None
                if block.state is State.COMPUTING:
                    block.enter(State.RESIDENT)


def _enter(block: Block, state: State) -> None:
    """What a pinned block is now."""
    with block.lock:
        block.enter(state)
