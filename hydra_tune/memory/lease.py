"""`Lease`: device memory held by a unit while the unit runs.

A unit has `Pager.lease` (`pager.py`) make a lease, and enters the lease before computing: the lease pins the unit's
blocks, has the pager bring the blocks to the device, and reserves workspace for intermediate tensors. Results become
blocks out of the workspace. The end of the lease unpins the blocks and gives the rest of the workspace back. Units are
in `train/loop/batch_units.py`, `train/loop/training_batch.py`, `train/loop/burst.py`,
`train/parallel/parallel_batch.py`, `train/state/replicas.py`, `fusion/group/multi_step_unit.py` and
`fusion/runtime/paired_unit.py`. While a unit runs, `BlockStore` (`train/state/block_store.py`) makes and absorbs blocks,
`ModelState` (`train/state/model_state.py`) exchanges blocks, `WorkspaceTracker` (`train/loop/workspace_tracker.py`) takes more
workspace, and `GroupCaptureCache` (`fusion/compile/cuda_graph_steps.py`) holds room beyond the unit. The loader's watchdog
(`pool/faults/loader_watchdog.py`) may end the lease of a burst that waits for a batch.

Note: a lease serves a single unit. Nobody may ask an ended lease for room: the room would never be given back. The
module must not know models or steps.

Note: locks. Entering, changing and ending a lease takes the locks of blocks, so a caller must hold neither a block's
lock nor the pool's lock.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

from torch import Tensor

from hydra_tune.memory.activation_offload import SavedTensorSpiller
from hydra_tune.memory.block import Block, BlockKind, storage_identity
from hydra_tune.memory.block_release import drop, pin
from hydra_tune.memory.block_states import BlockState
from hydra_tune.memory.ledger import DeviceCacheReservation
from hydra_tune.observe.trace.turns import WorkerTurn, current_turn, in_turn, note

if TYPE_CHECKING:
    from hydra_tune.memory.pager import Pager


class Lease:
    """Holdings of a running unit: the unit's blocks, pinned and resident, and its workspace on the ledger.

    For a GPU, autograd's own thread calls the lease as well, while the worker waits for a backward pass: the thread
    gives up memory no longer needed by the backward pass. The record still attributes such calls to the worker.

    Attributes:
        has_ended: whether `end` has been called; set before the lease gives anything back.
    """

    def __init__(self, pager: "Pager", blocks: list[Block], workspace_bytes: int) -> None:
        self._pager = pager
        self._blocks = blocks
        self._workspace_bytes = workspace_bytes
        self._storages: dict[int, Block] = {}
        self._turn: WorkerTurn | None = None
        self.has_ended = False
        self._end_lock = threading.Lock()

    def __enter__(self) -> Self:
        self._turn = current_turn()
        for block in self._blocks:
            # All blocks are pinned before room is made, so that no block of the unit is chosen as a victim.
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
            _enter(block, BlockState.COMPUTING)
        self._storages = {storage_identity(block.data): block for block in self._blocks if block.data is not None}
        try:
            if self._pager.begins is not None:
                # After the unit's own blocks are resident: prefetching must not take room from the running unit.
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
        """Give everything back, once; called by the unit's thread, or by the loader's watchdog while the unit draws a batch."""
        with self._end_lock:
            # Only the check is under the lock: giving back takes block locks.
            if self.has_ended:
                return
            self.has_ended = True
        note("end", [block for block in self._blocks if block.dirty])
        self._unpin()
        self._storages = {}
        self._pager.ledger.give_back(self._workspace_bytes)

    def block_of(self, kind: BlockKind, tensor: Tensor) -> Block:
        """Return the block under a tensor: a block of the lease, or a new block made from the workspace.

        Raises:
            BudgetError: the unit made more than its workspace, and the growth does not fit the budget.
        """
        storage = storage_identity(tensor)
        block = self._storages.get(storage)
        if block is None:
            nbytes = self._pager.size_on_ledger(tensor)
            if nbytes > self._workspace_bytes:  # more than seen by the pilot run
                self.grow(nbytes - self._workspace_bytes)
            block = self._pager.adopt(kind, tensor)
            self._workspace_bytes -= nbytes
            block.pinned_for = self._pager  # until the unit ends, like all its blocks
            _enter(block, BlockState.COMPUTING)
            note("adopt", [block], nbytes)
            self._blocks.append(block)
            self._storages[storage] = block
        return block

    def absorb(self, block: Block) -> None:
        """Drop a block while the unit runs; if the block is the lease's own, its room becomes workspace."""
        # The call may come from autograd's thread, which has no turn of its own; the record attributes the event to the
        # unit.
        with in_turn(self._turn), block.lock:
            if block.data is None or self._storages.get(storage_identity(block.data)) is not block:
                drop(block)
                return
            note("drop", [block])
            del self._storages[storage_identity(block.data)]
            block.enter(BlockState.DROPPED)
            self._pager.vacate(block)
            if block.tier is not None:
                block.tier.forget(block)
            block.host = None
            self._workspace_bytes += block.nbytes

    def exchange(self, old: Block | None, new: Block | None) -> None:
        """Replace a block of the lease by a new block on the device; either side may be missing.

        Args:
            old: block of the lease with bytes no longer needed; None: no block goes.
            new: loose block or block on the host, with tensors made by the unit or taken from the old block; None: no
                block comes.

        Raises:
            BudgetError: the growth does not fit the budget.
        """
        needed = (0 if new is None else new.nbytes) - (0 if old is None else old.nbytes)
        if needed > self._workspace_bytes:
            self.grow(needed - self._workspace_bytes)
        self._workspace_bytes -= needed
        # The old block goes first: the new block is loaded into the room of the old block.
        if old is not None:
            self._blocks.remove(old)
            with old.lock:
                old.part()
                old.enter(BlockState.DROPPED)
                self._pager.vacate(old)
                if old.tier is not None:
                    old.tier.forget(old)
                old.pinned_for, old.host = None, None
        if new is not None:
            # Pinned before the load, so that no other thread moves the block in between.
            new.pinned_for = self._pager
            try:
                self._pager.take_new(new)
            except BaseException:
                # The room of the new block is workspace again, which the lease gives back at its end.
                self._workspace_bytes += new.nbytes
                new.pinned_for = None
                drop(new)
                raise
            _enter(new, BlockState.COMPUTING)
            if new.data is not None:
                self._storages[storage_identity(new.data)] = new
            self._blocks.append(new)

    def pause(self) -> None:
        """Let background work go on between two steps of the unit. Call on the worker's thread."""
        if self._pager.pauses is not None:
            self._pager.pauses()

    def owns(self, tensor: Tensor, kinds: tuple[BlockKind, ...]) -> bool:
        """Whether a tensor lies in a block of the lease with a kind among `kinds`."""
        block = self._storages.get(storage_identity(tensor))
        return block is not None and block.kind in kinds

    def would_fit(self, nbytes: int) -> bool:
        """Whether a lease of the same blocks and `nbytes` of workspace fits the device's budget, with nothing else there."""
        # An absorbed block is still listed, but its bytes are workspace now.
        blocks = (block for block in self._blocks if block.state is not BlockState.DROPPED)
        return sum(block.nbytes for block in blocks) + nbytes <= self._pager.ledger.budget_bytes

    @property
    def data(self) -> list[Tensor]:
        """Device memory of the lease's blocks."""
        return [block.data for block in self._blocks if block.data is not None]

    def grow(self, nbytes: int) -> None:
        """Take more workspace.

        Raises:
            BudgetError: the workspace does not fit the budget.
        """
        with in_turn(self._turn):
            note("grow", nbytes=nbytes)
            self._pager.make_room(nbytes, self._blocks, self._workspace_bytes)
        self._workspace_bytes += nbytes

    def have(self, workspace_bytes: int) -> None:
        """Restore the workspace to `workspace_bytes`, if possible, after results of the unit have used up a part."""
        if self._workspace_bytes < workspace_bytes and self.would_fit(workspace_bytes):
            self.grow(workspace_bytes - self._workspace_bytes)

    @property
    def place(self) -> str:
        """Name of the device."""
        return self._pager.device.name

    def hold(self, nbytes: int, let_go: Callable[[], None]) -> DeviceCacheReservation | None:
        """Take room beyond the unit, as of `DeviceCaches.hold`."""
        return self._pager.caches.hold(nbytes, let_go)

    @contextmanager
    def spilling_activations(self) -> Iterator[None]:
        """Context that keeps large tensors saved by autograd on the host, except the lease's own blocks.

        The unit's computation must end inside the context, because the context's end adds the moved bytes to the counts.
        """
        spiller = SavedTensorSpiller(
            self._pager.device, stays=lambda tensor: storage_identity(tensor) in self._storages
        )
        try:
            with spiller.hooks():
                yield
        finally:
            self.count(spiller)

    def count(self, saved: SavedTensorSpiller) -> None:
        """Add the spilled and loaded activations of the unit to the pager's counts."""
        pager = self._pager
        pager.bytes_out[BlockKind.ACTIVATIONS] += saved.bytes_out
        pager.bytes_in[BlockKind.ACTIVATIONS] += saved.bytes_in
        if pager.log is not None:
            pager.log.saved(pager.device.name, saved.bytes_in, saved.bytes_out)

    def _unpin(self) -> None:
        for block in self._blocks:
            with block.lock:
                block.pinned_for = None
                if block.state is BlockState.COMPUTING:
                    block.enter(BlockState.RESIDENT)


def _enter(block: Block, state: BlockState) -> None:
    with block.lock:
        block.enter(state)
