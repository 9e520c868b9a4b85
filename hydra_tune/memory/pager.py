"""The pager: brings blocks to its device before a unit runs, and makes room by spilling what has not been used longest.

Every resident block and every running unit's workspace is on the ledger, so that their sum never exceeds the budget. A clean
block is dropped to make room, a dirty one written back first. A block is on one device at most.

Note: locks. A unit pins its blocks, then makes room, then loads. Pinning waits for a block's lock and holds only that one;
making room locks one victim at a time and skips those pinned for this device; loading locks one block and needs no room any
more. Nobody waits for one block's lock while holding another's. A block that is pinned for another device but still here may be
spilled like any other, for that device loads it from the host as well: so two units that want each other's blocks cannot wait
for each other's room. What a pager still waits for is a block being fetched from it at this moment.
"""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from torch import Tensor

from hydra_tune.devices.device import Device
from hydra_tune.errors import BudgetError
from hydra_tune.memory.block import Block, Kind, whole_storage
from hydra_tune.memory.ledger import Ledger
from hydra_tune.memory.saved import SavedTensors
from hydra_tune.observe.turns import current_turn
from hydra_tune.quantities import format_bytes

_PATIENCE_SECONDS = 0.05  # between looks at blocks that another device is fetching from here


class Pager:
    """Loads to and spills from one device.

    Args:
        device: whose memory it manages.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.ledger = Ledger(device.name, device.budget_bytes)
        self.bytes_in: Counter[Kind] = Counter()
        self.bytes_out: Counter[Kind] = Counter()
        self._resident: OrderedDict[int, Block] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    @property
    def resident_bytes(self) -> int:
        """Bytes of all blocks on the device."""
        with self._lock:
            return sum(block.nbytes for block in self._resident.values())

    def lease(self, blocks: Iterable[Block], workspace_bytes: int) -> "Lease":
        """Blocks on the device and room to work, for the length of a `with`.

        Raises:
            BudgetError: the blocks and the workspace do not fit the budget together.
        """
        return Lease(self, list(dict.fromkeys(blocks)), workspace_bytes)

    def bring(self, blocks: Sequence[Block], workspace_bytes: int) -> None:
        """Load pinned blocks and take the workspace."""
        missing = [block for block in blocks if block.home is not self]
        self.make_room(sum(block.nbytes for block in missing) + workspace_bytes, blocks)
        taken = 0
        try:
            for block in missing:
                self._fetch(block)
                taken += block.nbytes
        except BaseException:
            self.ledger.give_back(sum(block.nbytes for block in missing) + workspace_bytes - taken)
            raise
        with self._lock:
            for block in blocks:
                self._resident.move_to_end(id(block))

    def adopt(self, kind: Kind, tensor: Tensor) -> Block:
        """A block of the storage a unit made; its bytes must already be on the ledger."""
        flat = whole_storage(tensor)
        block = Block(kind, flat.numel(), self.device.alignment)
        block.data, block.home, block.dirty = flat, self, True
        with self._lock:
            self._resident[id(block)] = block
        return block

    def size_on_ledger(self, tensor: Tensor) -> int:
        """Bytes the ledger counts for a tensor's storage."""
        return -(-tensor.untyped_storage().nbytes() // self.device.alignment) * self.device.alignment

    def write_back(self, block: Block) -> None:
        """Make the host copy present; the device copy stays. Call under the block's lock."""
        start = time.perf_counter_ns()
        data = block.data
        if data is None or not block.dirty:
            return
        if block.host is None:
            size = block.size
            block.host = self.device.on_host(lambda: self.device.host_empty(size))
        self.device.spill([(data, block.host)])
        _note("out", [block], block.size, since_ns=start)
        self.bytes_out[block.kind] += block.size
        block.dirty = False

    def release(self, block: Block) -> None:
        """Give up the device copy, which must be clean or no longer wanted. Call under the block's lock."""
        self.vacate(block)
        self.ledger.give_back(block.nbytes)

    def vacate(self, block: Block) -> None:
        """As `release`, but the room stays taken."""
        with self._lock:
            self._resident.pop(id(block), None)
        block.data, block.home, block.dirty = None, None, False
        block.moved()

    def _fetch(self, block: Block) -> None:
        """Move a pinned block here, from the host or from another device; its room is taken already."""
        with block.lock:
            other = block.home
            if isinstance(other, Pager):
                other.write_back(block)
                other.release(block)
            start = time.perf_counter_ns()
            assert block.host is not None, "a block that is nowhere"
            data = self.device.empty(block.size)
            self.device.load([(block.host, data)])
            _note("in", [block], block.size, since_ns=start)
            self.bytes_in[block.kind] += block.size
            block.data, block.home, block.dirty = data, self, False
            block.moved()
        with self._lock:
            self._resident[id(block)] = block

    def make_room(self, nbytes: int, wanted: Sequence[Block], held_bytes: int = 0) -> None:
        """Take bytes on the ledger, spilling as needed.

        Args:
            nbytes: to take.
            wanted: blocks that have to stay.
            held_bytes: workspace that is taken already and has to stay.

        Raises:
            BudgetError: all that is more than the budget.
        """
        here = sum(block.nbytes for block in wanted if block.home is self) + held_bytes
        if nbytes + here > self.ledger.budget_bytes:
            raise BudgetError(
                f"a shard unit needs {format_bytes(nbytes + here)} at once, but device {self.device.name} has a budget of "
                f"{format_bytes(self.ledger.budget_bytes)}; lower batch_size or raise device_memory"
            )
        while not self.ledger.try_take(nbytes):
            if not self._spill_one():
                # What is left here is being fetched by other devices' units at this moment.
                self.ledger.wait_for_room(_PATIENCE_SECONDS)

    def _spill_one(self) -> bool:
        """Spill the block not used for longest; False if there is none to spill."""
        with self._lock:
            candidates = list(self._resident.values())
        for block in candidates:
            if block.pinned_for is self or not block.lock.acquire(blocking=False):
                continue
            try:
                if block.pinned_for is self or block.home is not self:
                    continue
                if not block.dirty:
                    _note("free", [block])
                self.write_back(block)
                self.release(block)
            finally:
                block.lock.release()
            return True
        return False


class Lease:
    """What a running unit holds: its blocks, pinned and on the device, and its workspace on the ledger."""

    def __init__(self, pager: Pager, blocks: list[Block], workspace_bytes: int) -> None:
        self._pager = pager
        self._blocks = blocks
        self._workspace_bytes = workspace_bytes
        self._storages: dict[int, Block] = {}

    def __enter__(self) -> Self:
        for block in self._blocks:
            with block.lock:
                assert block.pinned_for in (None, self._pager), "two units of one trial at once"
                block.pinned_for = self._pager
        _note("lease", self._blocks, self._workspace_bytes)
        try:
            self._pager.bring(self._blocks, self._workspace_bytes)
        except BaseException:
            self._unpin()
            raise
        self._storages = {_identity(block.data): block for block in self._blocks if block.data is not None}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _note("end", [block for block in self._blocks if block.dirty])
        self._unpin()
        self._storages = {}
        self._pager.ledger.give_back(self._workspace_bytes)

    def block_of(self, kind: Kind, tensor: Tensor) -> Block:
        """The block under a tensor: one of the lease's own, or a new one made from the workspace.

        Raises:
            BudgetError: the unit made more than its workspace.
        """
        block = self._storages.get(_identity(tensor))
        if block is None:
            nbytes = self._pager.size_on_ledger(tensor)
            if nbytes > self._workspace_bytes:
                self._pager.ledger.take(nbytes - self._workspace_bytes, f"a {kind.value} block beyond the pilot's")
                self._workspace_bytes = nbytes
            self._workspace_bytes -= nbytes
            block = self._pager.adopt(kind, tensor)
            block.pinned_for = self._pager  # until the unit ends, like all it works on
            _note("adopt", [block], nbytes)
            self._blocks.append(block)
            self._storages[_identity(tensor)] = block
        return block

    def absorb(self, block: Block) -> None:
        """Give up all of a block's bytes while the unit runs: if it is one of the lease's own, its room is workspace now."""
        with block.lock:
            if block.data is None or self._storages.get(_identity(block.data)) is not block:
                drop(block)
                return
            _note("drop", [block])
            del self._storages[_identity(block.data)]
            self._pager.vacate(block)
            block.host = None
            self._workspace_bytes += block.nbytes

    def owns(self, tensor: Tensor, kinds: tuple[Kind, ...]) -> bool:
        """Whether a tensor lies in one of the lease's blocks of these kinds."""
        block = self._storages.get(_identity(tensor))
        return block is not None and block.kind in kinds

    @property
    def data(self) -> list[Tensor]:
        """The memory of the blocks on the device."""
        return [block.data for block in self._blocks if block.data is not None]

    def grow(self, nbytes: int) -> None:
        """Take more workspace.

        Raises:
            BudgetError: it does not fit the budget.
        """
        _note("grow", nbytes=nbytes)
        self._pager.make_room(nbytes, self._blocks, self._workspace_bytes)
        self._workspace_bytes += nbytes

    @contextmanager
    def spilling_activations(self) -> Iterator[None]:
        """What autograd saves meanwhile, beyond the lease's own blocks, is kept on the host; the unit has to end inside."""
        saved = SavedTensors(self._pager.device, stays=lambda tensor: _identity(tensor) in self._storages)
        try:
            with saved.hooks():
                yield
        finally:
            self._pager.bytes_out[Kind.ACTIVATIONS] += saved.bytes_out
            self._pager.bytes_in[Kind.ACTIVATIONS] += saved.bytes_in

    def _unpin(self) -> None:
        for block in self._blocks:
            with block.lock:
                block.pinned_for = None


def drop(block: Block) -> None:
    """Give up all of a block's bytes, on the host and on whichever device."""
    with block.lock:
        _note("drop", [block])
        if isinstance(block.home, Pager):
            block.home.release(block)
        block.host = None


def bring_home(block: Block) -> None:
    """Move a block to the host, wherever it is."""
    with block.lock:
        _note("home", [block])
        if isinstance(block.home, Pager):
            pager = block.home
            pager.write_back(block)
            pager.release(block)


def _note(what: str, blocks: Sequence[Block] = (), nbytes: int = 0, *, since_ns: int = 0) -> None:
    turn = current_turn()
    if turn is not None:
        turn.note(what, blocks, nbytes, since_ns=since_ns)


def _identity(tensor: Tensor | None) -> int:
    assert tensor is not None
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - the storage's identity
