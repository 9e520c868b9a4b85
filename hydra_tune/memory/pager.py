"""The pager of one device: loads the blocks of a unit before the unit runs, and spills other blocks to make room.

The ledger counts every resident block and the workspace of every running unit, so their sum never exceeds the budget,
or the larger room that the device has proved to have (`MemoryLedger.most_bytes`). To make room, the pager drops a clean
block and writes a dirty block back first. A block is resident on at most one device. If another device holds a block,
the pager copies the block straight from there when the two devices support a direct copy and a load from the host would
not be as good.

`Pool` (`pool/pool.py`) makes a pager for each of its devices; rehearsals (`pool/dry_run/executor.py`) and timed steps
(`train/timing/step_timing.py`, `fusion/matching/group_timing.py`) make pagers of their own. A unit's `Lease`
(`lease.py`) calls the pager before the unit computes and when the unit takes more room, and `BlockPrefetcher` (`prefetch.py`)
while the unit before computes. `block_release.py` has blocks written back and given up, and `HostTier`
(`host/host_tier.py`) has copies ended (`settle`). `Worker` (`pool/runtime/worker.py`), `OutOfMemoryHandler`
(`pool/devices/oom_retry.py`) and `pool/devices/device_reservation.py` empty a device, `pool/devices/library_memory.py` sets
the limit, and `device_loss.py` gives up a lost device's blocks. The module must not choose units, and knows the trial of a
block by number alone.

Note: victim order. The pager spills first the blocks with the most distant next use. A trial walks over its shards
forward and then backward, so the least recently used shard has the most distant next use. Optimizer state is used once
per step, always in the same order, so the most recently used state has the most distant next use. The trial on the
device is likely to continue (`ShardedLRTF`), so the blocks of other trials are needed later than its own blocks. Hence
the order: optimizer state of other trials, most recently used first; other blocks of other trials, least recently used
first; then the same two groups of the running trial, with which tensors shared by trials count. Blocks already on the way
out, to the host or to another device, go before all of these, because the choice was made when there was time and now costs
nothing. Blocks just sent ahead go last. `benchmarks/victims.py` counts the bytes moved under this order and under LRU.

Note: the model of the pager. `simulate/recorded/pager_model.py` follows the rules of this module on a virtual clock, so
a change of the rules changes both files.

Note: locks. A unit pins its blocks, then makes room, then loads. Pinning waits for the lock of one block and holds no
other block's lock. Making room locks one victim at a time, never waits for a victim's lock, and skips blocks pinned for
the same device. Loading locks one block and needs no further room on the device; with a host tier, loading and writing
back may wait for room on the host (`memory/host/host_tier.py`). No thread waits for the lock of one block while holding
the lock of another, except for the lock of a copy and then the lock of the copy's original (`train/state/replicas.py`).
A block pinned for another device but still resident here may be spilled like any other, because the other device can
load the block from the host as well. Two units with crossed needs therefore cannot deadlock on each other's room. A
pager still waits for a block being fetched from its device at the moment.

Note: take-over. A block whose bytes another device holds alone is copied directly to this device, and stays dirty. Where
the two devices support no direct copy (`DeviceCopyRoute`), the other device writes the block back first. Room here is
taken before the copy, as for a load, and room on the other device is given back after the copy. The lock of the block is
held meanwhile, so no thread moves or frees the source. A write-back already under way finishes first; a write-back still
queued is cancelled. A block with a current host copy is loaded from the host, unless the other device is nearer, because
a copy over the link would burden the other device for nothing.

Note: copies under way between devices. A block sent ahead from another device stays usable there during the copy and
takes room on both devices. The first thread to observe the end of the copy makes the block resident here and frees the
room there: the unit in need of the block, the other pager in need of room, or the host tier in need of the host copy.
If a unit on the other device needs the block first, the copy is cancelled, or the unit waits for the end of the copy
and keeps its own bytes.

Note: background copies. Copies in the background (`memory/prefetch.py`) end by themselves, because a copy thread takes
no block's lock. The holder of a block's lock may therefore wait for a copy of the block. The ledger counts room for an
incoming block from before the allocation. An incoming block counts as resident, may be discarded for room like any other
block, and never keeps room from a unit.
"""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor

from hydra_tune.devices.device import Device, DeviceCopyRoute
from hydra_tune.devices.hardware.libraries import LedgerAllowance
from hydra_tune.errors import BlockStateError, BudgetError, HydraTuneError
from hydra_tune.memory.block import Block, BlockKind, IncomingTransfer, whole_storage
from hydra_tune.memory.block_states import BlockState
from hydra_tune.memory.host.host_tier import HostTier
from hydra_tune.memory.lease import Lease
from hydra_tune.memory.ledger import DeviceCaches, MemoryLedger
from hydra_tune.memory.link_meter import CopyLog, LinkMeter
from hydra_tune.memory.pressure import is_out_of_memory
from hydra_tune.memory.trial_context import check_tenant
from hydra_tune.observe.trace.turns import note
from hydra_tune.quantities import format_bytes

_PATIENCE_SECONDS = 0.05  # between looks at blocks being fetched by another device
_DEPARTURE_LOOKS = 100
_SENT_LEASES = 2  # units for which a block sent ahead counts as wanted: an update, and the next
_SHORT_LEASES = 64  # units for which a device counts as short of room after making room once
_LEFT_OF, _LEFT_IN = 7, 8  # fraction of the bytes in use at an out-of-memory error that becomes the new limit


class Pager:
    """Loads blocks to one device and spills blocks from the device.

    Args:
        host: host tier for counting host copies and sending some to disk; None: the host has room for all.

    Attributes:
        link: pace of the copies that a thread waited for, to and from the host, and directly over the same links.
        bytes_ahead, bytes_in_vain: bytes sent ahead in the background, and the part never used by a unit.
        waiting_ns, copying_ns: nanoseconds that threads have waited for copies, and nanoseconds spent by the copies.
        begins: called on the worker's thread when the blocks of a unit are resident and the unit begins to compute.
        pauses: called on the worker's thread between two steps of a unit with many steps.
        last_short: value of `num_leases` when a block last had to make room.
        last_fetched: value of `num_leases` when a block last came from another device, unless the device computes on host
            tensors.
        caches: data kept on the device for speed, which make room before any block is spilled.
        ready_ns: time at which all needs of a unit were first met since a caller set the value to 0.
    """

    def __init__(self, device: Device, host: HostTier | None = None) -> None:
        self.device = device
        self.host = host
        self.log: CopyLog | None = None
        self.ready_ns = 0
        self.ledger = MemoryLedger(device.name, device.budget_bytes)
        self.caches = DeviceCaches(self.ledger)
        self.bytes_in: Counter[BlockKind] = Counter()
        self.bytes_out: Counter[BlockKind] = Counter()
        self.bytes_across: Counter[BlockKind] = Counter()
        self.link = LinkMeter()
        self.bytes_ahead = 0
        self.bytes_in_vain = 0
        self.waiting_ns = 0
        self.copying_ns = 0
        self.host_ns = 0
        # Both hooks are set by `BlockPrefetcher`; without a prefetcher the pager copies only on demand.
        self.begins: Callable[[], None] | None = None
        self.pauses: Callable[[], None] | None = None
        self.num_leases = 0
        self.last_short = self.last_fetched = -_SHORT_LEASES
        self.owner: int | None = None
        self._reaches: dict[str, DeviceCopyRoute] = {}  # by name of the other device
        self._resident: OrderedDict[int, Block] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    @property
    def is_short(self) -> bool:
        """Whether room had to be made for one of the last units: not everything fits."""
        return self.num_leases - self.last_short < _SHORT_LEASES

    @property
    def is_fetching(self) -> bool:
        """Whether one of the last units took a block from another device over a link."""
        return self.num_leases - self.last_fetched < _SHORT_LEASES

    @property
    def resident_bytes(self) -> int:
        """Bytes of all blocks resident on the device or on the way to the device."""
        with self._lock:
            return sum(block.nbytes for block in self._resident.values())

    @property
    def loads_under_way(self) -> int:
        """Number of incoming copies not yet over; approximate, because the count reads block state without block locks."""
        with self._lock:
            coming = [block.coming for block in self._resident.values()]
        return sum(transfer is not None and transfer.home is self and not transfer.copy.is_over for transfer in coming)

    def lease(self, blocks: Iterable[Block], workspace_bytes: int) -> Lease:
        """Return a context that keeps the blocks resident and the workspace reserved for the length of a `with`.

        Raises:
            BudgetError: the blocks and the workspace do not fit the budget together.
        """
        return Lease(self, list(dict.fromkeys(block.at(self) for block in blocks)), workspace_bytes)

    def bring(self, blocks: Sequence[Block], workspace_bytes: int) -> None:
        """Load pinned blocks and reserve the workspace."""
        self.num_leases += 1
        for block in blocks:
            # Read without the lock on purpose: the block is pinned, so only this thread starts copies of the block.
            # `_await` looks again under the lock.
            if block.coming is not None or block.leaving is not None:
                self._await(block)
        missing = [block for block in blocks if block.home is not self]
        if self.host is not None:
            self.host.used(blocks)
        self.make_room(sum(block.nbytes for block in missing) + workspace_bytes, blocks)
        try:
            for block in missing:
                self._fetch(block)
        except BaseException:
            # A block already loaded owns its room from now on; only the room of the others is given back.
            unused_bytes = sum(block.nbytes for block in missing if block.home is not self)
            self.ledger.give_back(unused_bytes + workspace_bytes)
            raise
        with self._lock:
            for block in blocks:
                self._resident.move_to_end(id(block))

    def adopt(self, kind: BlockKind, tensor: Tensor) -> Block:
        """Make a block of a storage produced by a unit; the bytes must already be on the ledger."""
        flat = whole_storage(tensor)
        block = Block(kind, flat.numel(), self.device.alignment, BlockState.RESIDENT)
        block.data, block.home, block.dirty = flat, self, True
        self._list(block)
        return block

    def take_new(self, block: Block) -> None:
        """Make a new block resident here, loose or loaded from the host; the bytes must already be on the ledger."""
        with block.lock:
            self._load(block)

    def size_on_ledger(self, tensor: Tensor) -> int:
        """Bytes that the ledger counts for a tensor's storage, rounded up to the alignment of the device."""
        return -(-tensor.untyped_storage().nbytes() // self.device.alignment) * self.device.alignment

    def write_back(self, block: Block) -> None:
        """Bring the host copy up to date; the device copy stays. Call under the block's lock."""
        if block.leaving is not None:
            self.finish_leaving(block)
        start = time.perf_counter_ns()
        data = block.data
        if not block.dirty or (data is None and not block.is_loose):
            return
        if block.is_loose and self.device.keeps_tensors and block.is_shared():
            block.dirty = False  # the bytes stay in place, in host memory, so there is nothing to copy
            return
        if block.host is None and self.host is not None:
            self.host.provide(block, self.device)
        host, begun = self.host_of(block), time.perf_counter()
        if data is None:
            block.gather(self.device)
        else:
            self.device.spill([(data, host)])
        self.link.copied(block.size, time.perf_counter() - begun)
        if block.tier is not None:
            block.tier.written(block)
        self._waited("out", block, start)
        self.bytes_out[block.kind] += block.size
        block.dirty = False

    def offered_host(self, block: Block) -> Tensor | None:
        """Return host memory for a background write-back, or None if there is none now. Call under the block's lock."""
        if block.host is None and self.host is not None and not self.host.offer(block, self.device):
            return None
        return self.host_of(block)

    def host_of(self, block: Block) -> Tensor:
        """Return host memory for a write-back of a block, allocated if there is none. Call under the block's lock."""
        if block.host is None:
            self.device.on_host(lambda: block.put_host(self.device.host_empty(block.size)))
        assert block.host is not None
        return block.host

    def release(self, block: Block) -> None:
        """Free the device copy, which must be clean or no longer wanted. Call under the block's lock."""
        try:
            self.vacate(block)
        finally:
            self.ledger.give_back(block.nbytes)

    def vacate(self, block: Block) -> None:
        """Free the device copy as `release` does, but keep the room taken on the ledger."""
        if block.leaving is not None:
            self.finish_leaving(block)
        with self._lock:
            self._resident.pop(id(block), None)
        block.data, block.home, block.dirty = None, None, False
        if block.state is not BlockState.DROPPED:
            has_gone = block.host is None and block.tier is not None and block.tier is self.host
            block.enter(BlockState.DISK if has_gone else BlockState.HOST)
        # Last, because `moved` chooses the tensors' new place by the state and the home set above.
        block.moved()

    def _fetch(self, block: Block) -> None:
        """Make a pinned block resident here, from the host or from another device; the room must already be taken."""
        with block.lock:
            if block.coming is not None:
                block.coming.home.discard(block)
            other = block.home
            if isinstance(other, Pager):
                self._fetch_from(other, block)
            else:
                self._load(block)

    def _load(self, block: Block) -> None:
        """Copy a block from the host to the device. Call under the block's lock."""
        if block.is_loose:
            self._take_in_place(block)
            return
        if block.tier is not None:
            block.tier.recall(block, self.device)
        start = time.perf_counter_ns()
        assert block.host is not None, "a block that is nowhere"
        data = block.host
        if not block.lies_in_place:
            data = self.device.empty(block.size)
            begun = time.perf_counter()
            self.device.load([(block.host, data)])
            self.link.copied(block.size, time.perf_counter() - begun)
            self.bytes_in[block.kind] += block.size
        if block.tier is not None:
            block.tier.loaded(block)
        block.enter(BlockState.RESIDENT)
        block.data, block.home, block.dirty = data, self, False
        self._list(block)
        block.moved()
        self._waited("in", block, start)

    def _take_in_place(self, block: Block) -> None:
        """Count a loose block as resident: its tensors lie where the device computes. Call under the block's lock."""
        block.enter(BlockState.RESIDENT)
        # A loose block has no host copy of its own, so only the device counts as having the bytes.
        block.home, block.dirty = self, True
        self._list(block)
        block.moved()

    def _fetch_from(self, other: "Pager", block: Block) -> None:
        """Move a block here from another device by the shortest way (see the module's note). Call under the block's lock."""
        # Both devices compute on host tensors, so only the count moves.
        if block.is_loose and self.device.keeps_tensors:
            self._take_in_place(block)
            other.part_with(block)
            return
        if not block.is_loose:
            self._fetched()
            # `keep`: a write-back still in the queue is cancelled, because a direct copy does not need the host copy.
            if block.leaving is not None and self.way_from(other, block) is not DeviceCopyRoute.NONE:
                other.finish_leaving(block, keep=True)
            # Asked again: a write-back just finished leaves the block clean, and then the host may be the better source.
            way = self.way_from(other, block)
            if way is not DeviceCopyRoute.NONE:
                self._take_over(other, block, way)
                return
        # Of a loose block the write-back gathers the tensors on the host, as this device needs a flat buffer.
        other.write_back(block)
        other.release(block)
        self._load(block)

    def _fetched(self) -> None:
        """Note that a block came from another device, unless the device computes on host tensors and so has no link."""
        if not self.device.keeps_tensors:
            self.last_fetched = self.num_leases

    def way_from(self, other: "Pager", block: Block) -> DeviceCopyRoute:
        """Best way for a block to come from another device in its present state. Call under the block's lock."""
        name = other.device.name
        reach = self._reaches.get(name)
        if reach is None:
            reach = self._reaches[name] = self.device.reach(other.device)
        return (
            DeviceCopyRoute.NONE
            if reach is DeviceCopyRoute.LINK and not block.dirty and block.host is not None
            else reach
        )

    def _take_over(self, other: "Pager", block: Block, reach: DeviceCopyRoute) -> None:
        """Copy a block from another device, and have the other device give the block up. Call under the block's lock."""
        start = time.perf_counter_ns()
        assert block.data is not None, "a block is on its home"
        data = self.device.empty(block.size)
        begun = time.perf_counter()
        self.device.take_over(other.device, [(block.data, data)])
        if reach is DeviceCopyRoute.LINK:
            self.link.copied(block.size, time.perf_counter() - begun)
        self.bytes_across[block.kind] += block.size
        block.data, block.home = data, self
        self._list(block)
        block.moved()
        # Only now: the other device's ledger counts the source's memory until the copy has ended.
        other.part_with(block)
        self._waited("across", block, start)

    def _list(self, block: Block) -> None:
        with self._lock:
            self._resident[id(block)] = block

    def part_with(self, block: Block) -> None:
        """Forget a block taken over by another device, and give back its room. Call under the block's lock."""
        with self._lock:
            self._resident.pop(id(block), None)
        self.ledger.give_back(block.nbytes)

    # Copies in the background.

    def has(self, block: Block) -> bool:
        """Whether a block is resident here or on the way here. Call under the block's lock."""
        return block.home is self or (block.coming is not None and block.coming.home is self)

    def expect(self, block: Block, coming: IncomingTransfer) -> None:
        """Register a block on the way here, to memory already counted on the ledger. Call under the block's lock."""
        # A block sent from another device stays resident, and usable, there until the copy's end.
        if block.home is None:
            block.enter(BlockState.LOADING)
        block.coming = coming
        self._count(block, block.size)
        self._list(block)
        block.announce(self.device.name)

    def discard(self, block: Block) -> None:
        """Drop an incoming copy of a block. Call under the block's lock."""
        if self.call_off(block):
            return
        assert block.coming is not None
        copy = block.coming.copy
        # A copy under way cannot be stopped, and the memory under the copy must not be freed before the end.
        copy.wait_quietly()
        self._made(_way_of(block.coming), block, "vain", copy.began_ns, copy.ended_ns)
        self.bytes_in_vain += block.size
        self._forget_coming(block)

    def call_off(self, block: Block) -> bool:
        """Drop an incoming copy not yet begun; return whether the copy was dropped. Call under the block's lock."""
        assert block.coming is not None
        if not block.coming.copy.cancel():
            return False
        self._count(block, -block.size)
        self._forget_coming(block)
        return True

    def _forget_coming(self, block: Block) -> None:
        block.coming = None
        if block.home is None:
            block.enter(BlockState.HOST)
        with self._lock:
            self._resident.pop(id(block), None)
        block.announce(block.place)
        self.ledger.give_back(block.nbytes)

    def _count(self, block: Block, nbytes: int) -> None:
        """Add to the counts of bytes sent ahead for an incoming block; negative to take back."""
        assert block.coming is not None
        (self.bytes_across if block.coming.host is None else self.bytes_in)[block.kind] += nbytes
        self.bytes_ahead += nbytes

    def is_sent_off(self, block: Block) -> bool:
        """Whether a block is resident here and on the way to another device."""
        coming = block.coming
        return coming is not None and coming.home is not self and block.home is self

    def part_with_sent(self, block: Block) -> bool:
        """Finish sending a block to another device, or cancel a copy not yet begun; return whether the block has left.

        Call under the block's lock.
        """
        assert block.coming is not None
        if not block.coming.home.call_off(block):
            block.coming.home.settle(block)
        return block.home is not self

    def residents(self) -> list[Block]:
        """All blocks resident here or on the way here, least recently used first."""
        with self._lock:
            return list(self._resident.values())

    def victims(self) -> list[Block]:
        """Blocks resident here or on the way here, in the order of preference for making room (see the module's note)."""
        leaving_blocks: list[Block] = []
        latest_state: list[Block] = []
        other_blocks: list[Block] = []
        own_state: list[Block] = []
        own_blocks: list[Block] = []
        sent_blocks: list[Block] = []
        for block in self.residents():
            coming = block.coming
            if block.leaving is not None or self.is_sent_off(block):
                leaving_blocks.append(block)
            elif coming is not None and self.num_leases - coming.lease <= _SENT_LEASES:
                sent_blocks.append(block)
            elif block.owner not in (self.owner, None):
                (latest_state if block.kind is BlockKind.OPTIMIZER else other_blocks).append(block)
            else:
                (own_state if block.kind is BlockKind.OPTIMIZER else own_blocks).append(block)
        return [
            *leaving_blocks,
            *reversed(latest_state),
            *other_blocks,
            *reversed(own_state),
            *own_blocks,
            *sent_blocks,
        ]

    def _await(self, block: Block) -> None:
        """Finish a pinned block's background copy before a unit works on the block."""
        with block.lock:
            if block.leaving is not None and block.home is self:
                self.finish_leaving(block, keep=True)
            if self.is_sent_off(block):
                assert block.coming is not None
                block.coming.home.discard(block)
            elif block.coming is not None and block.coming.home is self:
                self._came(block)

    def _came(self, block: Block) -> None:
        """Take in a block sent ahead, waiting for the copy if necessary.

        Raises:
            Exception: the copy failed; the block is where the block was before.
        """
        start, coming = time.perf_counter_ns(), block.coming
        assert coming is not None
        # The copy is still queued behind copies without a waiting unit, so this thread copies at once instead.
        is_late = coming.copy.cancel()
        try:
            if is_late:
                self._copy_at_once(block, coming)
            else:
                coming.copy.wait()
        except BaseException:
            self.discard(block)
            raise
        if is_late:
            self._made(_way_of(coming), block, "late", start, time.perf_counter_ns())
        else:
            self._made(_way_of(coming), block, "background", coming.copy.began_ns, coming.copy.ended_ns)
        self._take_in(block, coming)
        self._awaited(block, start)  # last, so that the record shows the block in its new place

    def _copy_at_once(self, block: Block, coming: IncomingTransfer) -> None:
        if coming.host is not None:
            self.device.load([(coming.host, coming.data)])
            return
        # Without a source on the host, the source is the device where the block still lives.
        assert block.home is not None
        assert block.data is not None
        self.device.take_over(block.home.device, [(block.data, coming.data)])

    def _take_in(self, block: Block, coming: IncomingTransfer) -> None:
        """Make a block sent ahead resident here.

        The dirty flag carries over from the source device; a block copied from the host is clean.
        """
        other = block.home
        if other is not None and block.leaving is not None:
            # A write-back still reads the memory on the source device, which is released below.
            other.finish_leaving(block, is_noted=False)
        block.enter(BlockState.RESIDENT)
        block.data, block.home = coming.data, self
        block.coming = None  # last: a reader without the lock finds the block either on the way or here, never nowhere
        block.moved()
        if isinstance(other, Pager):
            self._fetched()
            other.part_with(block)

    def settle(self, block: Block) -> None:
        """Finish all background copies of a block, on any thread and under the block's lock.

        The host tier calls `settle` to free the host copy for room, and the source of a block sent ahead to free the room
        of the source.

        An incoming copy becomes resident before its unit asks, and an outgoing copy ends as a write-back. After a
        failed copy the block is as before.
        """
        coming = block.coming
        if coming is not None and coming.copy.wait_quietly():
            self._made(_way_of(coming), block, "background", coming.copy.began_ns, coming.copy.ended_ns)
            self._take_in(block, coming)
        elif coming is not None:
            self.discard(block)
        if block.leaving is not None and block.home is not None:
            block.home.finish_leaving(block, is_noted=False)

    def finish_leaving(self, block: Block, *, keep: bool = False, is_noted: bool = True) -> None:
        """Finish a background write-back; a write-back that failed or never began leaves the block dirty.

        Args:
            block: block being written back.
            keep: whether the block stays resident here, so that cancelling a queued write-back is noted in the record.
            is_noted: whether the time is counted as waiting.
        """
        leaving, block.leaving = block.leaving, None
        assert leaving is not None
        block.enter(BlockState.RESIDENT)
        if leaving.cancel():
            if keep:
                note("keep", [block])
            return
        start = time.perf_counter_ns()
        is_made = leaving.wait_quietly()
        self._made("out", block, "background", leaving.began_ns, leaving.ended_ns, is_counted=is_made)
        if is_noted:
            self._awaited(block, start)
        if not is_made:
            return  # still dirty; the next thread in need of the room tries again and gets the error
        block.dirty = False
        self.bytes_out[block.kind] += block.size

    def updated(self, owner: int, shard: int, began_ns: int, ended_ns: int) -> None:
        """Count a shard's update on the host beside this device. Callable on any thread."""
        with self._lock:
            self.host_ns += ended_ns - began_ns
        if self.log is not None and ended_ns > began_ns:
            self.log.updated_on_host(self.device.name, owner, shard, began_ns, ended_ns)

    def _awaited(self, block: Block, since_ns: int) -> None:
        """Count and record the time this thread has waited for a background copy."""
        now_ns = time.perf_counter_ns()
        self.waiting_ns += now_ns - since_ns
        if self.log is not None:
            self.log.waited(self.device.name, since_ns, now_ns)
        note("await", [block], since_ns=since_ns)

    def _waited(self, what: str, block: Block, since_ns: int) -> None:
        """Count and record a copy made while this thread waited."""
        now_ns = time.perf_counter_ns()
        self.waiting_ns += now_ns - since_ns
        self._made(what, block, "waited", since_ns, now_ns)
        note(what, [block], block.size, since_ns=since_ns)

    def _made(
        self, what: str, block: Block, how: str, began_ns: int, ended_ns: int, *, is_counted: bool = True
    ) -> None:
        """Record a finished copy.

        `how` is as in `EventLog.copied`; `is_counted` says whether the record includes the bytes.
        """
        self.copying_ns += ended_ns - began_ns
        if self.log is not None:
            shard, nbytes = getattr(block, "shard", None), block.size if is_counted else 0  # only groups have a shard
            self.log.copied(self.device.name, what, block.owner, block.kind, shard, nbytes, how, began_ns, ended_ns)

    # Room.

    def make_room(self, nbytes: int, wanted: Sequence[Block], held_bytes: int = 0) -> None:
        """Take bytes on the ledger, spilling blocks as needed.

        Args:
            nbytes: bytes to take.
            wanted: blocks that must stay.
            held_bytes: bytes of workspace that are taken already and must stay.

        Raises:
            BudgetError: the bytes, the wanted blocks and the workspace together exceed the budget.
            HydraTuneError: the trial served by this thread is over; noticed only with a host tier.
            Exception: the error of a victim's write-back, such as a `SpillError` of the host tier.
        """
        here = sum(block.nbytes for block in wanted if block.home is self) + held_bytes
        if nbytes + here > self.ledger.budget_bytes:
            raise BudgetError(
                f"the trial needs {format_bytes(nbytes + here)} at once, but device {self.device.name} has a budget of "
                f"{format_bytes(self.ledger.budget_bytes)}; lower batch_size or raise device_memory"
            )
        victims: Iterator[Block] = iter(())
        while not self.ledger.try_take(nbytes):
            if self.caches.let_go():
                continue
            self.last_short = self.num_leases
            if self._spill_one(victims):
                continue
            # The order is computed once per pass and not per victim. After the last victim a fresh list is drawn,
            # because other threads may have released or loaded blocks since.
            victims = iter(self.victims())
            if not self._spill_one(victims):
                if self.ledger.try_take(nbytes, to_the_last=True):
                    return
                if self.host is not None:
                    check_tenant()
                # The remaining blocks are locked or being fetched by units of other devices at the moment. The wait has
                # a timeout, because a victim does not notify the ledger when its lock becomes free.
                self.ledger.wait_for_room(_PATIENCE_SECONDS)

    def relieve(self) -> None:
        """Make every block leave, incoming blocks included, except blocks pinned for a unit here.

        Call between units, on the worker's thread or on the thread of a borrower
        (`pool/devices/device_reservation.py`). A block without room on the host or the disk stays, and so does a block whose
        lock another thread holds.
        """
        while self.caches.let_go():
            pass
        residents = self.victims()
        clean = [block for block in residents if not block.dirty]
        for block in (*clean, *residents):  # clean blocks first: writing back dirty blocks may need host memory
            try:
                self._spill_one([block])
            except Exception as error:
                if not _keeps_it_here(error):
                    raise

    def empty(self) -> None:
        """Make every block leave for good. Call on the worker's thread, after the last unit.

        A block that cannot be written back now, for want of host memory or disk space, stays until another device takes
        the block over.
        """
        for _ in range(_DEPARTURE_LOOKS):
            self.relieve()
            with self._lock:
                is_fetched = any(block.pinned_for is not None for block in self._resident.values())
            if not is_fetched:
                return
            time.sleep(_PATIENCE_SECONDS)  # units of other devices are fetching the pinned blocks at the moment

    def shrink(self, used_bytes: int) -> None:
        """Lower the limit after `used_bytes` proved too much for the device; a single unit may still exceed the limit."""
        ledger = self.ledger
        ledger.limit_bytes = min(ledger.limit_bytes, used_bytes * _LEFT_OF // _LEFT_IN)

    def fit(self, room: LedgerAllowance) -> None:
        """Set the limit to the room proved by the device: lower, or higher if the budget was never too much.

        The most that one unit may need stays the same: the unit's next device has not proved the additional room.
        """
        ledger = self.ledger
        if room.limit_bytes < ledger.limit_bytes:
            ledger.limit_bytes = room.limit_bytes
        elif ledger.limit_bytes >= ledger.budget_bytes:
            ledger.limit_bytes = max(ledger.limit_bytes, ledger.budget_bytes + room.gain_bytes)

    def _spill_one(self, candidates: Iterable[Block]) -> bool:
        """Spill the first block that can leave; return False if there is none."""
        for block in candidates:
            # Never wait for a victim's lock: the holder may be waiting for room on this device.
            if block.pinned_for is self or not block.lock.acquire(blocking=False):
                continue
            try:
                # Looked at again under the lock: a unit may have pinned the block, or another device taken the block,
                # meanwhile.
                if block.pinned_for is self or not self.has(block):
                    continue
                if self.is_sent_off(block):
                    if self.part_with_sent(block):
                        return True
                elif block.coming is not None:
                    self.discard(block)
                    return True
                is_clean = not block.dirty
                self.write_back(block)
                self.release(block)
                if is_clean:
                    note("free", [block])
            finally:
                block.lock.release()
            return True
        return False


def _way_of(coming: IncomingTransfer) -> str:
    return "across" if coming.host is None else "in"


def _keeps_it_here(error: Exception) -> bool:
    """Whether an error means that a block cannot be written back for now, as with a full disk or host.

    The error is not lost: the next unit in need of the block's room gets the error.
    """
    is_fault = isinstance(error, BlockStateError)
    return not is_fault and (isinstance(error, HydraTuneError | OSError) or is_out_of_memory(error))
