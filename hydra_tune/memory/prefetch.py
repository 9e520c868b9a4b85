"""Double buffering: sends the blocks of a device's next units ahead while the present unit computes.

`Worker` (`pool/runtime/worker.py`) prepares the prefetcher before each unit; rehearsals (`pool/dry_run/executor.py`) and
timed steps (`train/timing/step_timing.py`) do likewise. `Lease` (`lease.py`) calls `begin` and `go_on` through the pager.
When the unit begins to compute, the prefetcher calls `asks` for the next blocks in the order of need; in a pool,
`NextUnitPredictor` (`pool/devices/next_units.py`) answers. For each block on the host, or on another device and not in
use there, the unit's thread allocates device memory where room can be had, and a background copy fills the memory. A
block from another device comes by the same way as a fetch (`Pager.way_from`); if the way leads over the host and the host
lacks the bytes, the other device begins a write-back. The prefetcher uses the room left by the running unit. The victims
are the blocks that a further unit of the running trial would choose, apart from pinned blocks and blocks of the next
units. A clean victim is dropped at once. A dirty victim is written back in the background and gives its room at the next
call, or within a burst of steps when a step ends later. Victims for the largest workspace of the next units are written
back in the same way.

With a host tier, the tier starts reading blocks on disk now, for sending when the next unit begins. A block under way
keeps its host copy, and a dirty block is written back only if the host has room without waiting
(`memory/host/host_tier.py`).

A block sent in vain is dropped like any clean block. Another device in need of a block does not wait if the copy has not
begun. While no unit has to make room and no block comes over a link from another device, the prefetcher neither asks nor
sends. `shard/cost/traffic_model.py` imitates `send` and the choice of victims: a change here needs a change there.

Note: locks. The prefetcher only tries the lock of a block with bytes, and never waits for that lock: a block that another
thread moves is left out. The prefetcher waits for the lock of a trial's share of a shared tensor, which has no bytes.
The module must not know models or steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hydra_tune.devices.copying import BackgroundCopy
from hydra_tune.devices.device import DeviceCopyRoute
from hydra_tune.memory.block import Block, IncomingTransfer
from hydra_tune.memory.block_states import BlockState
from hydra_tune.memory.pager import Pager
from hydra_tune.observe.trace.turns import current_turn


@dataclass(frozen=True, slots=True)
class UnitMemoryNeeds:
    """Needs of a unit on its device: blocks in the order of need, and the workspace beside the blocks."""

    blocks: Sequence[Block]
    workspace_bytes: int = 0

    def at(self, pager: Pager) -> "UnitMemoryNeeds":
        """Return the needs with the blocks on the pager's device."""
        return UnitMemoryNeeds([block.at(pager) for block in self.blocks], self.workspace_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks and of the workspace."""
        return sum(block.nbytes for block in set(self.blocks)) + self.workspace_bytes


class BlockPrefetcher:
    """Sends blocks ahead to a single device. Call only on the thread that runs the device's units.

    Attributes:
        asks: returns the needs of the next units, in order; None: the next units are unknown.
    """

    def __init__(self, pager: Pager) -> None:
        self._pager = pager
        self.asks: Callable[[], Sequence[UnitMemoryNeeds]] | None = None
        self._needs: Sequence[UnitMemoryNeeds] = ()
        self._awaited: Sequence[BackgroundCopy] = ()
        pager.begins, pager.pauses = self.begin, self.go_on

    def begin(self) -> None:
        """Start prefetching when a unit begins to compute."""
        self._awaited = ()
        if self.asks is not None and (self._pager.is_short or self._pager.is_fetching):
            self.send(self.asks())

    def go_on(self) -> None:
        """Send blocks whose room has become free, between two steps of a unit with many steps."""
        if self._awaited and all(copy.is_over for copy in self._awaited):
            self.send(self._needs)

    def end(self) -> None:
        """Stop prefetching after the unit has ended or before a second run, and hold no blocks of other trials."""
        self.asks, self._needs, self._awaited = None, (), ()

    def send(self, needs: Sequence[UnitMemoryNeeds]) -> None:
        """Send blocks that fit beside the running unit and beside blocks needed earlier."""
        needs = [need.at(self._pager) for need in needs]
        wanted_blocks = [block for need in needs for block in need.blocks]
        if self._pager.host is not None:
            self._pager.host.expect(wanted_blocks)
        journey = _UnitPrefetch(self._pager, wanted_blocks)
        room, sent_blocks = self._pager.ledger.limit_bytes, set[Block]()
        for need in needs:
            for block in dict.fromkeys(need.blocks):
                if block in sent_blocks:
                    continue
                room -= block.nbytes
                if room < 0:
                    break  # the block would be spilled again before its unit starts
                sent_blocks.add(block)
                if block.home is not self._pager:
                    journey.send(block)
            # A block is sent only if it would survive the units before its own; each of those leaves at most the limit
            # less its needs.
            room = min(room, self._pager.ledger.limit_bytes - need.nbytes)
        self._needs, self._awaited = needs if journey.awaited else (), journey.awaited
        journey.make_ready(max((need.workspace_bytes for need in needs), default=0))


class _UnitPrefetch:
    """Copies and write-backs started beside a single unit; `wanted` blocks stay in place.

    Attributes:
        awaited: copies under way whose room is needed for blocks not yet sent.
    """

    def __init__(self, pager: Pager, wanted: Sequence[Block]) -> None:
        self._pager, self._keep = pager, {id(block) for block in wanted}
        self._turn = current_turn()
        self._owed_bytes = 0  # bytes for blocks that wait for victims being written back
        self.awaited: list[BackgroundCopy] = []

    def send(self, block: Block) -> None:
        """Send a block, unless the block is under way or in use, or has no room."""
        if not block.lock.acquire(blocking=False):
            return  # another thread is moving the block at the moment
        try:
            is_free = block.coming is None and block.pinned_for is None
            is_free = is_free and not (block.is_loose or block.lies_in_place)
            if is_free and self._can_come(block) and self._make_room(block.nbytes):
                self._start(block)
        finally:
            block.lock.release()

    def _can_come(self, block: Block) -> bool:
        """Whether there is a source to copy from now; start the write-back that another device has to make first.

        Call under the block's lock.
        """
        if block.home is not None and not self._comes_across(block):
            # The way leads over the host: the other device must write the block back before the block can be sent.
            return self._is_clean(block) and block.host is not None
        return block.home is not None or block.host is not None

    def _comes_across(self, block: Block) -> bool:
        home = block.home
        return isinstance(home, Pager) and self._pager.way_from(home, block) is not DeviceCopyRoute.NONE

    def _start(self, block: Block) -> None:
        """Start the copy; the bytes must be taken. Call under the block's lock."""
        pager, device = self._pager, self._pager.device
        host = None if self._comes_across(block) else block.host
        # Making room took host memory, and the host copy of this very block was given up.
        if host is None and block.home is None:
            pager.ledger.give_back(block.nbytes)
            return
        try:
            data = device.empty(block.size)
            if host is not None:
                copy = device.start_load([(host, data)])
            else:
                assert block.data is not None
                assert block.home is not None
                copy = device.start_take_over(block.home.device, [(block.data, data)])
        except RuntimeError:
            pager.ledger.give_back(block.nbytes)  # fragmented, or the other device is lost: a prefetch is optional
            return
        pager.expect(block, IncomingTransfer(pager, host, data, copy, pager.num_leases))
        self._note("ahead", block, copy, "in" if host is not None else "across")

    def _make_room(self, nbytes: int) -> bool:
        """Take bytes on the ledger if possible now; otherwise start the write-backs that make the room for the next time."""
        ledger = self._pager.ledger
        if ledger.try_take(nbytes):
            return True
        short, victims = self._short_of(nbytes), self._victims()
        # Enough room cannot be made, so no block is dropped in vain.
        if short > sum(block.nbytes for block in victims):
            return False
        for victim in victims:
            if short <= 0:
                break
            short -= self._part_with(victim)
        if ledger.try_take(nbytes):
            return True
        # The victims' future room belongs to this block; the blocks after this block must find more.
        self._owed_bytes += nbytes
        return False

    def make_ready(self, nbytes: int) -> None:
        """Write victims back ahead, so that `nbytes` beside the running unit can be had without waiting."""
        short = self._short_of(nbytes)
        for victim in self._victims() if short > 0 else ():
            if short <= 0:
                break
            if not victim.lock.acquire(blocking=False):
                continue
            try:
                if victim.pinned_for is None and victim.home is self._pager:
                    self._clean(victim)
                    if victim.leaving is not None or victim.coming is not None or not victim.dirty:
                        short -= victim.nbytes
            finally:
                victim.lock.release()

    def _short_of(self, nbytes: int) -> int:
        ledger = self._pager.ledger
        return nbytes + self._owed_bytes - (ledger.limit_bytes - ledger.used_bytes)

    def _victims(self) -> list[Block]:
        return [block for block in self._pager.victims() if block.pinned_for is None and id(block) not in self._keep]

    def _part_with(self, victim: Block) -> int:
        """Make a block leave now or soon; return its bytes, or 0 if the block must stay."""
        if not victim.lock.acquire(blocking=False):
            return 0
        try:
            may_go = victim.pinned_for is None and self._pager.has(victim)
            return victim.nbytes if may_go and self._goes(victim) else 0
        finally:
            victim.lock.release()

    def _goes(self, victim: Block) -> bool:
        """Make an unpinned block leave, now or after the end of its copy; return False if the block must stay.

        Call under the block's lock.
        """
        pager, coming = self._pager, victim.coming
        if coming is not None and pager.is_sent_off(victim):
            if coming.copy.is_over:
                pager.part_with_sent(victim)
            else:
                self.awaited.append(coming.copy)
            return True
        if coming is not None:
            if not coming.copy.is_over:
                return False
            del coming  # `coming` holds a reference to the device memory to be freed
            pager.discard(victim)
        elif self._is_clean(victim):
            pager.release(victim)
        else:
            if victim.leaving is not None:
                self.awaited.append(victim.leaving)
            return victim.leaving is not None
        self._note("shed", victim)
        return True

    def _is_clean(self, victim: Block) -> bool:
        """Whether a block can be dropped now; if not, start its write-back. Call under the block's lock."""
        if victim.leaving is None:
            self._clean(victim)
        elif victim.leaving.is_over:
            assert victim.home is not None
            victim.home.finish_leaving(victim, is_noted=False)
        return not victim.dirty

    def _clean(self, victim: Block) -> None:
        """Start to write a dirty block back if the host has room now. Call under the block's lock."""
        if not victim.dirty or victim.leaving is not None or victim.coming is not None or victim.is_loose:
            return  # a loose block is gathered by the unit in need of its room
        assert victim.data is not None, "a dirty block is on its device"
        pager = victim.home
        assert isinstance(pager, Pager)
        host = pager.offered_host(victim)
        if host is None:
            return
        if victim.tier is not None:
            # At the start of the copy: the host copy changes from now on, so the file is stale.
            victim.tier.written(victim)
        victim.leaving = copy = pager.device.start_spill([(victim.data, host)])
        victim.enter(BlockState.SPILLING)
        self._note("clean", victim, copy)

    def _note(self, what: str, block: Block, copy: BackgroundCopy | None = None, way: str = "out") -> None:
        if self._turn is None:
            return
        self._turn.note(what, [block], block.size)
        if copy is not None:
            self._turn.follow(way, block, copy)
