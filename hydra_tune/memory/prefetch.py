"""Double buffering: what a device's next units need is sent ahead while the present one computes.

When a unit begins to compute, the pool is asked which blocks come next, in the order in which they are needed. Those that are
on the host, or on another device where no unit works on them, get device memory from the worker's thread, and a background
copy fills it; from another device they come as if they were fetched (`Pager.way_from`). Where that is over the host, which has
not the bytes yet, the other device begins to write them back. Room is what the unit leaves: victims are the blocks that the
next unit itself would choose. A clean one is dropped at once. A dirty one is written back in the background and gives its room
the next time, when it is clean, or within a burst when a step ends after that; so are those that will have to go for the room
that the next unit works in.

With a host tier, what is on disk of those blocks is read now, to be sent when the next unit begins; what is on its way keeps
its host copy; and a dirty block is written back only if the host has room for it without waiting (`memory/host.py`).

Nothing of this binds anybody. What was sent for nothing is dropped like any clean block, a unit that comes too early waits for
just the copies of its own blocks, and another device that wants a block does not wait at all if its copy has not begun. As long
as everything fits, and nothing comes over a link from another device, nobody is asked and nothing is sent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hydra_tune.devices.copying import Copy
from hydra_tune.devices.device import Reach
from hydra_tune.memory.block import Block, Coming
from hydra_tune.memory.pager import Pager
from hydra_tune.memory.states import State
from hydra_tune.observe.turns import current_turn


@dataclass(frozen=True, slots=True)
class Need:
    """What a unit needs on its device: blocks, those needed first at the front, and room to work in beside them."""

    blocks: Sequence[Block]
    workspace_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """All of it."""
        return sum(block.nbytes for block in set(self.blocks)) + self.workspace_bytes


class Prefetch:
    """Sends ahead to one device. To be called on the device's worker thread alone.

    Args:
        pager: of the device.

    Attributes:
        asks: says what the next units need, in their order; None: nobody knows.
    """

    def __init__(self, pager: Pager) -> None:
        self._pager = pager
        self.asks: Callable[[], Sequence[Need]] | None = None
        self._needs: Sequence[Need] = ()
        self._awaited: Sequence[Copy] = ()
        pager.begins, pager.pauses = self.begin, self.go_on

    def begin(self) -> None:
        """A unit begins to compute."""
        self._awaited = ()
        if self.asks is not None and (self._pager.is_short or self._pager.is_fetching):
            self.send(self.asks())

    def go_on(self) -> None:
        """A unit of many steps is between two of them: what has waited for write-backs that are over by now is sent."""
        if self._awaited and all(copy.is_over for copy in self._awaited):
            self.send(self._needs)

    def end(self) -> None:
        """The unit has ended, or is run once more: nothing is sent beside it, and nothing of other trials is held."""
        self.asks, self._needs, self._awaited = None, (), ()

    def send(self, needs: Sequence[Need]) -> None:
        """Send blocks, as far as there is room for them beside the unit that runs, and beside those that come before theirs."""
        wanted = [block for need in needs for block in need.blocks]
        if self._pager.host is not None:
            self._pager.host.expect(wanted)
        journey = _Journey(self._pager, wanted)
        room, sent = self._pager.ledger.limit_bytes, set[Block]()
        for need in needs:
            for block in dict.fromkeys(need.blocks):
                if block in sent:
                    continue
                room -= block.nbytes
                if room < 0:
                    break  # it would have to go again before its unit comes
                sent.add(block)
                if block.home is not self._pager:
                    journey.send(block)
            room = min(room, self._pager.ledger.limit_bytes - need.nbytes)
        self._needs, self._awaited = needs if journey.awaited else (), journey.awaited
        journey.make_ready(max((need.workspace_bytes for need in needs), default=0))


class _Journey:
    """What is done for one unit's sake; `wanted` stays where it is.

    Attributes:
        awaited: copies under way, for the room of what could not be sent.
    """

    def __init__(self, pager: Pager, wanted: Sequence[Block]) -> None:
        self._pager, self._keep = pager, {id(block) for block in wanted}
        self._turn = current_turn()
        self._owed_bytes = 0  # to blocks that have to wait until their victims are written back
        self.awaited: list[Copy] = []

    def send(self, block: Block) -> None:
        """Send one block, unless it is on its way, or in use, or has no room."""
        if not block.lock.acquire(blocking=False):
            return  # somebody is moving it at this moment
        try:
            is_free = block.coming is None and block.pinned_for is None and not block.is_loose
            if is_free and self._can_come(block) and self._make_room(block.nbytes):
                self._start(block)
        finally:
            block.lock.release()

    def _can_come(self, block: Block) -> bool:
        """Whether there is anything to copy it from; if not, and a device has it, its write-back is begun. Under its lock."""
        if block.home is not None and not self._comes_across(block):
            return self._is_clean(block) and block.host is not None
        return block.home is not None or block.host is not None

    def _comes_across(self, block: Block) -> bool:
        home = block.home
        return isinstance(home, Pager) and self._pager.way_from(home, block) is not Reach.NONE

    def _start(self, block: Block) -> None:
        """Under the block's lock; its bytes are taken."""
        pager, device = self._pager, self._pager.device
        host = None if self._comes_across(block) else block.host
        if (
            host is None and block.home is None
        ):  # what has made room needed some on the host, and had that of this block's copy
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
            pager.ledger.give_back(
                block.nbytes
            )  # fragmented, or the other device is lost: what is only ahead can come later
            return
        pager.expect(block, Coming(pager, host, data, copy, pager.num_leases))
        self._note("ahead", block, copy, "in" if host is not None else "across")

    def _make_room(self, nbytes: int) -> bool:
        """Take bytes on the ledger, if they can be had now; what could not be had now is made ready for the next time."""
        ledger = self._pager.ledger
        if ledger.try_take(nbytes):
            return True
        short, victims = self._short_of(nbytes), self._victims()
        if short > sum(block.nbytes for block in victims):
            return False
        for victim in victims:
            if short <= 0:
                break
            short -= self._part_with(victim)
        if ledger.try_take(nbytes):
            return True
        self._owed_bytes += nbytes
        return False

    def make_ready(self, nbytes: int) -> None:
        """Have written back what will have to go for so many bytes beside what the running unit has."""
        short = self._short_of(nbytes)
        for victim in self._victims() if short > 0 else ():
            if short <= 0 or not victim.lock.acquire(blocking=False):
                break
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
        """Have a block leave, now or soon; returns its bytes, or 0 if it has to stay."""
        if not victim.lock.acquire(blocking=False):
            return 0
        try:
            may_go = victim.pinned_for is None and self._pager.has(victim)
            return victim.nbytes if may_go and self._goes(victim) else 0
        finally:
            victim.lock.release()

    def _goes(self, victim: Block) -> bool:
        """Have an unpinned block leave, now or when a copy of it is over; False: it has to stay. Under its lock."""
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
            del coming  # which has its memory
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
        """Whether a block can be dropped now; if not, its write-back is begun. Under its lock."""
        if victim.leaving is None:
            self._clean(victim)
        elif victim.leaving.is_over:
            assert victim.home is not None
            victim.home.finish_leaving(victim, is_noted=False)
        return not victim.dirty

    def _clean(self, victim: Block) -> None:
        """Begin to write a block back, if it has to be and the host has room for it now. Under its lock."""
        if not victim.dirty or victim.leaving is not None or victim.coming is not None or victim.is_loose:
            return  # a loose block is gathered by whoever needs its room
        assert victim.data is not None, "a dirty block is on its device"
        pager = victim.home
        assert isinstance(pager, Pager)
        host = pager.offered_host(victim)
        if host is None:
            return
        if victim.tier is not None:
            victim.tier.written(victim)  # from now on, and not only when it is over
        victim.leaving = copy = pager.device.start_spill([(victim.data, host)])
        victim.enter(State.SPILLING)
        self._note("clean", victim, copy)

    def _note(self, what: str, block: Block, copy: Copy | None = None, way: str = "out") -> None:
        """Tell the record of a run."""
        if self._turn is None:
            return
        self._turn.note(what, [block], block.size)
        if copy is not None:
            self._turn.follow(way, block, copy)
