"""The pager: brings blocks to its device before a unit runs, and makes room by spilling what is needed last.

Every resident block and every running unit's workspace is on the ledger, so that their sum never exceeds the budget. A clean
block is dropped to make room, a dirty one written back first. A block is on one device at most; one that is on another device
is taken over from there in one copy, where the devices can do that and the host's copy is not as good.

Note: what is needed last. A trial uses its shards forth and back, so what it has not used for longest it needs last; but its
optimizer state it uses once a step, always in the same order, so what it has used just now it needs last. A trial that runs
here had better go on (`ShardedLRTF`), so others' blocks are needed later than its own. So there go, in this order: others'
optimizer state, the last used first; others' blocks, the first used first; then its own likewise. Before all of them goes what
is being written back to make room, for that is what was chosen when there was time, and costs nothing now. What has just been
sent ahead goes last.
`benchmarks/victims.py` counts what that order moves: never more than "not used for longest", and down to a third of it.

Note: locks. A unit pins its blocks, then makes room, then loads. Pinning waits for a block's lock and holds only that one;
making room locks one victim at a time and skips those pinned for this device; loading locks one block and needs no room any
more. Nobody waits for one block's lock while holding another's. A block that is pinned for another device but still here may be
spilled like any other, for that device can load it from the host as well: so two units that want each other's blocks cannot
wait for each other's room. What a pager still waits for is a block being fetched from it at this moment.

Note: taken over. A block that only another device has is copied from there to here; it stays as it was, dirty with a stale
host copy or none, and no byte of it passes the host. Room here is taken before, as for a load, and room there given back when
the copy is over; meanwhile the block's lock is held, so that nobody moves or frees the source. A write-back that has begun is
let finish first, one that has not is called off. A block that the host has as well comes from there, unless the other device
is nearer (`Reach`): else that one's link would be taken for nothing. A disk tier changes nothing of this: whether there is a
host copy, or a file, and of which bytes, is as before.

Note: on its way between devices. What is sent ahead from another device stays there meanwhile, as it is, and has room on both.
Whoever sees the copy over has the block here, and its room there free: the unit that comes for it, or a pager there that needs
the room. A unit there that wants it first has the copy called off, or waits until it is over, and goes on with its own.

Note: bytes under way. Copies in the background (`memory/prefetch.py`) end by themselves: a thread that copies takes no lock.
So whoever holds a block's lock may wait for that block's copy, and nobody can wait for him in turn but those who want that
block. Room for what is coming is on the ledger from before its memory is allocated until after its copy is over; it is
resident, may be made room of like any other block, and never keeps a unit from its room.
"""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor

from hydra_tune.devices.device import Device, Reach
from hydra_tune.devices.libraries import Room
from hydra_tune.errors import BlockStateError, BudgetError, HydraTuneError
from hydra_tune.memory.block import Block, Coming, Kind, whole_storage
from hydra_tune.memory.host import HostTier
from hydra_tune.memory.lease import Lease
from hydra_tune.memory.ledger import Ledger
from hydra_tune.memory.meter import CopyLog, LinkMeter
from hydra_tune.memory.pressure import is_out_of_memory
from hydra_tune.memory.states import State
from hydra_tune.memory.tenant import check_tenant
from hydra_tune.observe.turns import note
from hydra_tune.quantities import format_bytes

_PATIENCE_SECONDS = 0.05  # between looks at blocks that another device is fetching from here
_DEPARTURE_LOOKS = 100
_SENT_LEASES = 2  # units for which what was sent ahead is taken to be wanted: an update, and the next
_SHORT_LEASES = 64  # units for which a device that had to make room is taken to be short of it
_LEFT_OF, _LEFT_IN = 7, 8  # what is held on of the bytes that a device had no room for


class Held:
    """Room on a device for what is kept there to go faster, and can be made again; it goes before any block is spilled.

    Args:
        pager: of the device.
        nbytes: taken on its ledger.
        let_go: called on the device's worker, between units or before one computes: what is kept there goes.
    """

    def __init__(self, pager: "Pager", nbytes: int, let_go: Callable[[], None]) -> None:
        self.nbytes = nbytes
        self.let_go = let_go
        self._pager = pager

    def release(self) -> None:
        """It has gone; may be said more than once."""
        self._pager.part_with_held(self)


class Pager:
    """Loads to and spills from one device.

    Args:
        device: whose memory it manages.
        host: counts host copies and sends some to disk; None: the host has room for all.

    Attributes:
        bytes_in, bytes_out: bytes loaded from and spilled to the host.
        bytes_across: bytes taken over from other devices.
        bytes_ahead, bytes_in_vain: bytes that came in the background, and those of them that no unit came for.
        waiting_ns, copying_ns: nanoseconds that units waited for copies, and that copies took.
        host_ns: nanoseconds that updates on the host took beside this device.
        begins: called on the worker's thread when a unit's blocks are there and it begins to compute.
        pauses: called there when a unit of many steps is between two of them.
        num_leases: units that have had their blocks brought.
        last_short: how many there had been when room was made last.
        last_fetched: how many there had been when a block came over a link from another device last.
        owner: the trial whose unit runs, or ran last.
        log: is told of every copy; None: nobody is.
        ready_ns: when what a unit needs was there, for the first time since somebody set it to 0.
    """

    def __init__(self, device: Device, host: HostTier | None = None) -> None:
        self.device = device
        self.host = host
        self.log: CopyLog | None = None
        self.ready_ns = 0
        self.ledger = Ledger(device.name, device.budget_bytes)
        self.bytes_in: Counter[Kind] = Counter()
        self.bytes_out: Counter[Kind] = Counter()
        self.bytes_across: Counter[Kind] = Counter()
        self.link = LinkMeter()
        self.bytes_ahead = 0
        self.bytes_in_vain = 0
        self.waiting_ns = 0
        self.copying_ns = 0
        self.host_ns = 0
        self.begins: Callable[[], None] | None = None
        self.pauses: Callable[[], None] | None = None
        self.num_leases = 0
        self.last_short = self.last_fetched = -_SHORT_LEASES
        self.owner: int | None = None
        self._reaches: dict[str, Reach] = {}  # by name: how blocks come from other devices
        self._resident: OrderedDict[int, Block] = OrderedDict()  # least recently used first
        self._held: list[Held] = []
        self._lock = threading.Lock()

    @property
    def is_short(self) -> bool:
        """Whether room had to be made for one of the last units: not everything fits."""
        return self.num_leases - self.last_short < _SHORT_LEASES

    @property
    def is_fetching(self) -> bool:
        """Whether one of the last units had a block come from another device, and over a link."""
        return self.num_leases - self.last_fetched < _SHORT_LEASES

    @property
    def resident_bytes(self) -> int:
        """Bytes of all blocks on the device, and on their way to it."""
        with self._lock:
            return sum(block.nbytes for block in self._resident.values())

    @property
    def loads_under_way(self) -> int:
        """Blocks that the device's copy threads are still to bring, as far as can be told without their locks."""
        with self._lock:
            coming = [block.coming for block in self._resident.values()]
        return sum(one is not None and one.home is self and not one.copy.is_over for one in coming)

    def lease(self, blocks: Iterable[Block], workspace_bytes: int) -> Lease:
        """Blocks on the device and room to work, for the length of a `with`.

        Raises:
            BudgetError: the blocks and the workspace do not fit the budget together.
        """
        return Lease(self, list(dict.fromkeys(blocks)), workspace_bytes)

    def bring(self, blocks: Sequence[Block], workspace_bytes: int) -> None:
        """Load pinned blocks and take the workspace."""
        self.num_leases += 1
        for block in blocks:
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
            left = sum(block.nbytes for block in missing if block.home is not self)
            self.ledger.give_back(left + workspace_bytes)
            raise
        with self._lock:
            for block in blocks:
                self._resident.move_to_end(id(block))

    def adopt(self, kind: Kind, tensor: Tensor) -> Block:
        """A block of the storage a unit made; its bytes must already be on the ledger."""
        flat = whole_storage(tensor)
        block = Block(kind, flat.numel(), self.device.alignment, State.RESIDENT)
        block.data, block.home, block.dirty = flat, self, True
        with self._lock:
            self._resident[id(block)] = block
        return block

    def take_new(self, block: Block) -> None:
        """Have a new block here, from the host unless it is loose; its bytes must already be on the ledger."""
        with block.lock:
            self._load(block)

    def size_on_ledger(self, tensor: Tensor) -> int:
        """Bytes the ledger counts for a tensor's storage."""
        return -(-tensor.untyped_storage().nbytes() // self.device.alignment) * self.device.alignment

    def write_back(self, block: Block) -> None:
        """Make the host copy present; the device copy stays. Call under the block's lock."""
        if block.leaving is not None:
            self.finish_leaving(block)
        start = time.perf_counter_ns()
        data = block.data
        if not block.dirty or (data is None and not block.is_loose):
            return
        if block.is_loose and self.device.keeps_tensors and block.is_shared():
            block.dirty = False  # its bytes stay where they are, which is the host's memory
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
        """Host memory for a block to be written back to in the background; None if there is none now. Call under its lock."""
        if block.host is None and self.host is not None and not self.host.offer(block, self.device):
            return None
        return self.host_of(block)

    def host_of(self, block: Block) -> Tensor:
        """Host memory for a block to be written back to. Call under its lock."""
        if block.host is None:
            self.device.on_host(lambda: block.put_host(self.device.host_empty(block.size)))
        assert block.host is not None
        return block.host

    def release(self, block: Block) -> None:
        """Give up the device copy, which must be clean or no longer wanted. Call under the block's lock."""
        try:
            self.vacate(block)
        finally:
            self.ledger.give_back(block.nbytes)

    def vacate(self, block: Block) -> None:
        """As `release`, but the room stays taken."""
        if block.leaving is not None:
            self.finish_leaving(block)
        with self._lock:
            self._resident.pop(id(block), None)
        block.data, block.home, block.dirty = None, None, False
        if block.state is not State.DROPPED:
            has_gone = block.host is None and block.tier is not None and block.tier is self.host
            block.enter(State.DISK if has_gone else State.HOST)
        block.moved()

    def _fetch(self, block: Block) -> None:
        """Move a pinned block here, from the host or from another device; its room is taken already."""
        with block.lock:
            if block.coming is not None:
                block.coming.home.discard(block)
            other = block.home
            if isinstance(other, Pager):
                self._fetch_from(other, block)
            else:
                self._load(block)

    def _load(self, block: Block) -> None:
        """Copy a block from the host. Under its lock."""
        if block.is_loose:
            self._take_in_place(block)
            return
        if block.tier is not None:
            block.tier.recall(block, self.device)
        start = time.perf_counter_ns()
        assert block.host is not None, "a block that is nowhere"
        data = self.device.empty(block.size)
        begun = time.perf_counter()
        self.device.load([(block.host, data)])
        self.link.copied(block.size, time.perf_counter() - begun)
        if block.tier is not None:
            block.tier.loaded(block)
        self.bytes_in[block.kind] += block.size
        block.enter(State.RESIDENT)
        block.data, block.home, block.dirty = data, self, False
        self._list(block)
        block.moved()
        self._waited("in", block, start)

    def _take_in_place(self, block: Block) -> None:
        """Count a loose block here: its tensors lie where this device computes. Under the block's lock."""
        block.enter(State.RESIDENT)
        block.home, block.dirty = self, True
        self._list(block)
        block.moved()

    def _fetch_from(self, other: "Pager", block: Block) -> None:
        """Move a block here from another device, by the way that is the shortest (see the note). Under its lock."""
        if block.is_loose and self.device.keeps_tensors:
            self._take_in_place(block)
            other.part_with(block)
            return
        if block.is_loose:
            other.write_back(block)
            other.release(block)
            self._load(block)
            return
        self._fetched()
        if block.leaving is not None and self.way_from(other, block) is not Reach.NONE:
            other.finish_leaving(block, keep=True)
        way = self.way_from(other, block)
        if way is not Reach.NONE:
            self._take_over(other, block, way)
        else:
            other.write_back(block)
            other.release(block)
            self._load(block)

    def _fetched(self) -> None:
        """A block comes from another device, over a link if there is one."""
        if not self.device.keeps_tensors:
            self.last_fetched = self.num_leases

    def way_from(self, other: "Pager", block: Block) -> Reach:
        """How a block of another device had better come here as it is now; under its lock."""
        name = other.device.name
        reach = self._reaches.get(name)
        if reach is None:
            reach = self._reaches[name] = self.device.reach(other.device)
        return Reach.NONE if reach is Reach.LINK and not block.dirty and block.host is not None else reach

    def _take_over(self, other: "Pager", block: Block, reach: Reach) -> None:
        """Copy a block from another device, which has it no longer then. Under its lock."""
        start = time.perf_counter_ns()
        assert block.data is not None, "a block is on its home"
        data = self.device.empty(block.size)
        begun = time.perf_counter()
        self.device.take_over(other.device, [(block.data, data)])
        if reach is Reach.LINK:
            self.link.copied(block.size, time.perf_counter() - begun)
        self.bytes_across[block.kind] += block.size
        block.data, block.home = data, self
        self._list(block)
        block.moved()
        other.part_with(block)
        self._waited("across", block, start)

    def _list(self, block: Block) -> None:
        """It is here from now on."""
        with self._lock:
            self._resident[id(block)] = block

    def part_with(self, block: Block) -> None:
        """Another device has taken a block over. Call under the block's lock."""
        with self._lock:
            self._resident.pop(id(block), None)
        self.ledger.give_back(block.nbytes)

    # What is under way in the background.

    def has(self, block: Block) -> bool:
        """Whether a block is here, or on its way here. Under its lock."""
        return block.home is self or (block.coming is not None and block.coming.home is self)

    def expect(self, block: Block, coming: Coming) -> None:
        """A block is on its way here, to memory that is on the ledger. Call under its lock."""
        if block.home is None:
            block.enter(State.LOADING)
        block.coming = coming
        self._count(block, block.size)
        with self._lock:
            self._resident[id(block)] = block
        block.announce(self.device.name)

    def discard(self, block: Block) -> None:
        """A block on its way here is not wanted any more. Call under its lock."""
        if self.call_off(block):
            return
        assert block.coming is not None
        copy = block.coming.copy
        copy.wait_quietly()
        self._made(_way_of(block.coming), block, "vain", copy.began_ns, copy.ended_ns)
        self.bytes_in_vain += block.size
        self._forget_coming(block)

    def call_off(self, block: Block) -> bool:
        """As `discard`, if the copy has not begun; returns whether it had not. Call under the block's lock."""
        assert block.coming is not None
        if not block.coming.copy.cancel():
            return False
        self._count(block, -block.size)
        self._forget_coming(block)
        return True

    def _forget_coming(self, block: Block) -> None:
        block.coming = None
        if block.home is None:
            block.enter(State.HOST)
        with self._lock:
            self._resident.pop(id(block), None)
        block.announce(block.place)
        self.ledger.give_back(block.nbytes)

    def _count(self, block: Block, nbytes: int) -> None:
        """So many bytes more of a block that comes are sent ahead."""
        assert block.coming is not None
        (self.bytes_across if block.coming.host is None else self.bytes_in)[block.kind] += nbytes
        self.bytes_ahead += nbytes

    def is_sent_off(self, block: Block) -> bool:
        """Whether a block is here and on its way to another device."""
        coming = block.coming
        return coming is not None and coming.home is not self and block.home is self

    def part_with_sent(self, block: Block) -> bool:
        """Have a block there that is sent off, unless its copy has not begun; whether it is. Call under its lock."""
        assert block.coming is not None
        if not block.coming.home.call_off(block):
            block.coming.home.settle(block)
        return block.home is not self

    def residents(self) -> list[Block]:
        """All blocks here and on their way here, the least recently used first."""
        with self._lock:
            return list(self._resident.values())

    def victims(self) -> list[Block]:
        """All that is here or comes, in the order in which it had better make room (see the note)."""
        leaving: list[Block] = []
        latest_state: list[Block] = []
        others: list[Block] = []
        own_state: list[Block] = []
        own: list[Block] = []
        sent: list[Block] = []
        for block in self.residents():
            coming = block.coming
            if block.leaving is not None or self.is_sent_off(block):
                leaving.append(block)
            elif coming is not None and self.num_leases - coming.lease <= _SENT_LEASES:
                sent.append(block)
            elif block.owner != self.owner:
                (latest_state if block.kind is Kind.OPTIMIZER else others).append(block)
            else:
                (own_state if block.kind is Kind.OPTIMIZER else own).append(block)
        return [*leaving, *reversed(latest_state), *others, *reversed(own_state), *own, *sent]

    def _await(self, block: Block) -> None:
        """Have a pinned block's copy in the background over, before a unit works on it."""
        with block.lock:
            if block.leaving is not None and block.home is self:
                self.finish_leaving(block, keep=True)
            if self.is_sent_off(block):
                assert block.coming is not None
                block.coming.home.discard(block)
            elif block.coming is not None and block.coming.home is self:
                self._came(block)

    def _came(self, block: Block) -> None:
        """Take in what was sent ahead, when it is there.

        Raises:
            Exception: the copy has failed; the block is where it was.
        """
        start, coming = time.perf_counter_ns(), block.coming
        assert coming is not None
        if coming.copy.cancel():  # it stands in line behind others that nobody waits for
            try:
                self._copy_at_once(block, coming)
            except BaseException:
                self.discard(block)
                raise
            self._made(_way_of(coming), block, "late", start, time.perf_counter_ns())
        else:
            try:
                coming.copy.wait()
            except BaseException:
                self.discard(block)
                raise
            self._made(_way_of(coming), block, "background", coming.copy.began_ns, coming.copy.ended_ns)
        self._take_in(block, coming)
        self._awaited(block, start)  # noted when the block has said where it is

    def _copy_at_once(self, block: Block, coming: Coming) -> None:
        if coming.host is not None:
            self.device.load([(coming.host, coming.data)])
            return
        assert block.home is not None
        assert block.data is not None
        self.device.take_over(block.home.device, [(block.data, coming.data)])

    def _take_in(self, block: Block, coming: Coming) -> None:
        """What was sent ahead is there; as dirty as it was, which what was on the host is not."""
        other = block.home
        if other is not None and block.leaving is not None:
            other.finish_leaving(block, is_noted=False)
        block.enter(State.RESIDENT)
        block.data, block.home = coming.data, self
        block.coming = None  # last: whoever looks without the lock finds it on its way, or here
        block.moved()
        if isinstance(other, Pager):
            self._fetched()
            other.part_with(block)

    def settle(self, block: Block) -> None:
        """Have what is under way of a block over, on any thread and under its lock: its host copy is wanted for room.

        What comes is here before its unit asks, what leaves is written back; where a copy has failed nothing has changed.
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
        """Have a write-back in the background over; one that has failed, or never began, leaves the block dirty.

        Args:
            block: it.
            keep: it stays here, so that what has not begun need not.
            is_noted: whether a unit waits for it.
        """
        leaving, block.leaving = block.leaving, None
        assert leaving is not None
        block.enter(State.RESIDENT)
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
            return  # whoever needs the room tries again, and hears of it
        block.dirty = False
        self.bytes_out[block.kind] += block.size

    def updated(self, owner: int, shard: int, began_ns: int, ended_ns: int) -> None:
        """A shard of a trial has been updated on the host, beside this device. On any thread."""
        with self._lock:
            self.host_ns += ended_ns - began_ns
        if self.log is not None and ended_ns > began_ns:
            self.log.updated_on_host(self.device.name, owner, shard, began_ns, ended_ns)

    def _awaited(self, block: Block, since_ns: int) -> None:
        """A unit has waited for a copy that was made in the background."""
        now_ns = time.perf_counter_ns()
        self.waiting_ns += now_ns - since_ns
        if self.log is not None:
            self.log.waited(self.device.name, since_ns, now_ns)
        note("await", [block], since_ns=since_ns)

    def _waited(self, what: str, block: Block, since_ns: int) -> None:
        """A copy is made that somebody has waited for."""
        now_ns = time.perf_counter_ns()
        self.waiting_ns += now_ns - since_ns
        self._made(what, block, "waited", since_ns, now_ns)
        note(what, [block], block.size, since_ns=since_ns)

    def _made(
        self, what: str, block: Block, how: str, began_ns: int, ended_ns: int, *, is_counted: bool = True
    ) -> None:
        """A copy is over; `how` as in `EventLog.copied`, and whether it counts among the bytes."""
        self.copying_ns += ended_ns - began_ns
        if self.log is not None:
            shard, nbytes = getattr(block, "shard", None), block.size if is_counted else 0  # groups have one
            self.log.copied(self.device.name, what, block.owner, block.kind, shard, nbytes, how, began_ns, ended_ns)

    # Room.

    def make_room(self, nbytes: int, wanted: Sequence[Block], held_bytes: int = 0) -> None:
        """Take bytes on the ledger, spilling as needed.

        Args:
            nbytes: to take.
            wanted: blocks that have to stay.
            held_bytes: workspace that is taken already and has to stay.

        Raises:
            BudgetError: all that is more than the budget.
            HydraTuneError: the trial that this thread works for is over.
        """
        here = sum(block.nbytes for block in wanted if block.home is self) + held_bytes
        if nbytes + here > self.ledger.budget_bytes:
            raise BudgetError(
                f"a shard unit needs {format_bytes(nbytes + here)} at once, but device {self.device.name} has a budget of "
                f"{format_bytes(self.ledger.budget_bytes)}; lower batch_size or raise device_memory"
            )
        victims: Iterator[Block] = iter(())
        while not self.ledger.try_take(nbytes):
            if self._let_go():
                continue
            self.last_short = self.num_leases
            if self._spill_one(victims):
                continue
            victims = iter(self.victims())
            if not self._spill_one(victims):
                if self.ledger.try_take(nbytes, to_the_last=True):
                    return
                if self.host is not None:
                    check_tenant()
                # What is left here is being fetched by other devices' units at this moment.
                self.ledger.wait_for_room(_PATIENCE_SECONDS)

    def hold(self, nbytes: int, let_go: Callable[[], None]) -> Held | None:
        """Take room, as far as nothing has to leave for it, for what can be let go of; None if there is none.

        Args:
            nbytes: to take.
            let_go: as of `Held`.
        """
        if not self.ledger.try_take(nbytes):
            return None
        held = Held(self, nbytes, let_go)
        with self._lock:
            self._held.append(held)
        return held

    def part_with_held(self, held: Held) -> None:
        """Its room is free again, if it was not before."""
        with self._lock:
            if held not in self._held:
                return
            self._held.remove(held)
        self.ledger.give_back(held.nbytes)

    def _let_go(self) -> bool:
        """Have the first go of what is held; False if there is nothing."""
        with self._lock:
            held = next(iter(self._held), None)
        if held is None:
            return False
        held.let_go()
        held.release()
        return True

    def relieve(self) -> None:
        """Have everything leave that is not pinned, what is on its way here included. On the worker's thread, between units."""
        while self._let_go():
            pass
        residents = self.victims()
        clean = [block for block in residents if not block.dirty]
        for block in (*clean, *residents):  # to write back may take host memory first
            try:
                self._spill_one([block])
            except Exception as error:
                if not _keeps_it_here(error):
                    raise

    def empty(self) -> None:
        """Have everything leave for good. On the worker's thread, after its last unit.

        What cannot be written back now, for want of host memory or disk, stays until another device takes it over.
        """
        for _ in range(_DEPARTURE_LOOKS):
            self.relieve()
            with self._lock:
                is_fetched = any(block.pinned_for is not None for block in self._resident.values())
            if not is_fetched:
                return
            time.sleep(_PATIENCE_SECONDS)  # other devices' units are fetching it at this moment

    def shrink(self, used_bytes: int) -> None:
        """So many bytes were too much for the device: hold less from now on, beside what a unit itself needs."""
        ledger = self.ledger
        ledger.limit_bytes = min(ledger.limit_bytes, used_bytes * _LEFT_OF // _LEFT_IN)

    def fit(self, room: Room) -> None:
        """Hold what a device has proved to have room for: less from now on, or more if its budget has never been too much.

        One unit needs no more than before: it may run on another device the next time, which has not proved that.
        """
        ledger = self.ledger
        if room.limit_bytes < ledger.limit_bytes:
            ledger.limit_bytes = room.limit_bytes
        elif ledger.limit_bytes >= ledger.budget_bytes:
            ledger.limit_bytes = max(ledger.limit_bytes, ledger.budget_bytes + room.gain_bytes)

    def _spill_one(self, candidates: Iterable[Block]) -> bool:
        """Spill the first block that can be; False if there is none."""
        for block in candidates:
            if block.pinned_for is self or not block.lock.acquire(blocking=False):
                continue
            try:
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


def _way_of(coming: Coming) -> str:
    """What comes, as of `EventLog.copied`."""
    return "across" if coming.host is None else "in"


def _keeps_it_here(error: Exception) -> bool:
    """Whether a block cannot be written back for now, as when disk or host are full: whoever needs its room hears why."""
    is_fault = isinstance(error, BlockStateError)
    return not is_fault and (isinstance(error, HydraTuneError | OSError) or is_out_of_memory(error))
