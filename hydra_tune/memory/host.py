"""The host tier: host copies of blocks within a budget of host memory, beyond which they go to disk.

Every host copy that the pool has made is on the ledger here (a batch's own memory is the user's and is not). Room is made by
giving up the copy that is needed furthest in the future: for nothing where a device has the bytes as well, or the file has
them already, else by writing it to its file first. A block comes back before it is loaded to a device, or when its trial is
wanted whole.

Note: ahead. After each unit the disk's thread looks for blocks that are needed within the next few, and reads them; and it sees
to it that there is room for a copy that comes from a device, so that units seldom wait for a write. It does one such thing at a
time, so that what a unit waits for comes next, and gives up nothing for it that is itself needed soon.

Note: who waits for what. All waiting for room is in `take`, and it ends, because what it waits for never waits for it:

* Nobody holds bytes of this ledger while waiting for more: a copy's bytes are taken all at once, and when they are there the
  copy can be given up again as soon as its block's lock is free.
* `take` may be called under one block's lock (or those of a copy and its original), and then for that block, of which nothing
  is on the ledger. Others' locks are only tried. So a lock that `take` finds taken is held for a copy or a transfer that needs
  no room, or by another `take` under a block that has nothing to give.
* The disk's thread waits for nobody's lock and nobody's room; it may wait for the copy thread, which waits for nobody.
* A copy in the background ends by itself, whoever waits for it. What it reads or writes on the host is on the ledger and is
  given up last: whoever does, under the block's lock, waits for the copy, and then a device has the bytes as well. So a block
  on its way never keeps another from room. Room for a write-back in the background is only offered (`offer`), at once or not.
* What cannot be given up is what trials have reserved (`admit`), and what is wanted whole. Each trial says the most it reserves
  and the largest block it will have before it has one, and is let in only if the largest of all fits beside all that is
  reserved. A trial that is not let in yet may have to wait for reservations of others; it holds no lock then, and is told when
  it is stopped.
* A trial that is wanted whole may overdraw the ledger. As long as one is, the others do too rather than wait, for what it waits
  for may be a block that they hold.
* A copy that the disk does not take stays, and another goes. If none can go any more, the trial that has most of those refused
  fails, by name and with the system's error: it loses its copies there and then, and nobody waits for it to come to its end.
  A unit has the error raised only if that trial is its own.
"""

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from hydra_tune.devices.device import Device
from hydra_tune.errors import BudgetError, SpillError
from hydra_tune.memory.block import Block
from hydra_tune.memory.disk import Disk
from hydra_tune.memory.entries import Entry, costs_nothing, is_far, is_moving, may_always, worth
from hydra_tune.memory.ledger import Ledger
from hydra_tune.memory.states import State
from hydra_tune.memory.tenant import Tenant, check_tenant, tenant_at_work
from hydra_tune.memory.uses import Uses
from hydra_tune.quantities import format_bytes, format_bytes_up

_PATIENCE_SECONDS = 0.05  # between looks at copies that are being moved at this moment


class HostLedger(Ledger):
    """Counts host copies."""

    def overdraw(self, nbytes: int) -> None:
        """Take bytes whether or not they fit."""
        with self._changed:
            self.used_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)


@dataclass(slots=True)
class _Search:
    """What came of looking for a copy to give up.

    Attributes:
        has_given: whether one was.
        is_busy: whether others are being moved at this moment, so that there may be room, or another choice, soon.
        failed: what the disk did not take.
    """

    has_given: bool = False
    is_busy: bool = False
    failed: list[tuple[Block, SpillError]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Share:
    """What a trial needs of host memory, whatever goes to disk."""

    fixed_bytes: int
    largest_bytes: int


class HostTier:
    """Host copies within a budget, and files beyond it.

    Args:
        budget_bytes: for host copies.
        disk: where the others go; closed with the tier.
        device: any device of the pool, for host memory.
    """

    def __init__(self, budget_bytes: int, disk: Disk, device: Device) -> None:
        self.ledger = HostLedger("host", budget_bytes)
        self.disk = disk
        self._device = device
        self._entries: dict[int, Entry] = {}
        self._shares: dict[Tenant, _Share] = {}
        self._reserved: dict[Tenant, int] = {}
        self._lock = threading.Lock()
        self._times = itertools.count(1)
        self._now = 0
        self._num_whole = 0
        self._whole: Counter[int] = Counter()  # by a block's number: how often it is wanted whole
        self._is_looking_ahead = False

    # Trials.

    @property
    def capacity_bytes(self) -> int:
        """What host memory and disk can hold together."""
        return self.ledger.budget_bytes + self.disk.stored_bytes + self.disk.folder.free_bytes

    def check(self, nbytes: int) -> None:
        """Refuse a trial of which so many bytes have to be in host memory at once.

        Raises:
            BudgetError: they do not fit.
        """
        if nbytes > self.ledger.budget_bytes:
            raise BudgetError(
                f"one shard needs {format_bytes(nbytes)} of host memory at once, more than the "
                f"{format_bytes(self.ledger.budget_bytes)} the pool may use, even with a spill_dir; raise host_memory to at "
                f"least {format_bytes_up(nbytes)}, or cut the model finer (num_shards)"
            )

    def admit(self, tenant: Tenant, fixed_bytes: int, largest_bytes: int) -> bool:
        """Let a trial in, or let one that is in need more; False: there is no room for that beside the others.

        Args:
            tenant: the trial.
            fixed_bytes: what of it cannot go to disk; taken by `reserve`.
            largest_bytes: the most that one of its blocks takes.
        """
        with self._lock:
            others = [share for other, share in self._shares.items() if other is not tenant]
            fixed = sum(share.fixed_bytes for share in others) + fixed_bytes
            if fixed + max([largest_bytes, *(share.largest_bytes for share in others)]) > self.ledger.budget_bytes:
                return False
            self._shares[tenant] = _Share(fixed_bytes, largest_bytes)
        return True

    def reserve(self, tenant: Tenant) -> None:
        """Take the bytes that a trial was let in with and that cannot go to disk, or give back what it needs no more."""
        share, taken = self._shares.get(tenant), self._reserved.get(tenant, 0)
        if share is None:
            return
        if share.fixed_bytes > taken:
            self.take(share.fixed_bytes - taken)
        else:
            self.ledger.give_back(taken - share.fixed_bytes)
        with self._lock:
            self._reserved[tenant] = share.fixed_bytes

    def leave(self, tenant: Tenant) -> None:
        """A trial is over: what it has reserved is free."""
        with self._lock:
            self._shares.pop(tenant, None)
            taken = self._reserved.pop(tenant, 0)
        self.ledger.give_back(taken)

    # Copies.

    def take(self, nbytes: int) -> None:
        """Take bytes for a host copy, giving up others as needed.

        Raises:
            BudgetError: they do not fit, whatever is given up.
            SpillError: nothing more can be given up, for the disk takes no copies of the trial that this thread works for.
            HydraTuneError: that trial is over.
        """
        self.check(nbytes)
        while not self.ledger.try_take(nbytes):
            check_tenant()
            found = self._give_up_one()
            if found.has_given:
                continue
            if self._num_whole:
                self.ledger.overdraw(nbytes)
                return
            if found.failed and not found.is_busy:
                _blame(found.failed)
            else:
                self.ledger.wait_for_room(_PATIENCE_SECONDS)

    def enter(self, block: Block) -> None:
        """A block has been made whose bytes are taken; it is on the host only."""
        with self._lock:
            self._entry(block)

    def used(self, blocks: Sequence[Block]) -> None:
        """A unit uses these blocks now."""
        with self._lock:
            now = self._now = next(self._times)
            for block in blocks:
                entry = self._entries.get(block.number)
                if entry is not None:
                    entry.uses.add(now)
        self._ask_ahead()

    def expect(self, blocks: Sequence[Block]) -> None:
        """The next units use these blocks, those needed first at the front: what is on disk of them is read now."""
        with self._lock:
            for block in blocks:
                entry = self._entries.get(block.number)
                if entry is not None:
                    entry.uses.expect(self._now + 1)
        self._ask_ahead()

    def provide(self, block: Block, device: Device) -> None:
        """Give a block an empty host copy. Under its lock."""
        self.take(block.nbytes)
        self._place(block, device)

    def offer(self, block: Block, device: Device) -> bool:
        """As `provide`, if neither the disk nor anybody else has to be waited for; False: not now. Under its lock."""
        while not self.ledger.try_take(block.nbytes):
            if not self._give_up_one(costs_nothing).has_given:
                return False
        self._place(block, device)
        return True

    def _place(self, block: Block, device: Device) -> None:
        """Make the host copy; its bytes are taken."""
        try:
            device.on_host(lambda: block.put_host(device.host_empty(block.size)))
        except BaseException:
            self.ledger.give_back(block.nbytes)
            raise
        with self._lock:
            self._entry(block)

    def written(self, block: Block) -> None:
        """A block's host copy has new bytes. Under its lock."""
        self._entries[block.number].is_stored = False

    def recall(self, block: Block, device: Device | None = None) -> None:
        """Read a block from disk if its bytes are there only. Under its lock.

        Raises:
            SpillError: it cannot be read.
            HydraTuneError: its trial is over, and its bytes are gone.
        """
        if block.host is not None or block.data is not None:
            return
        if block.tenant is not None:
            block.tenant.check()
        self.take(block.nbytes)
        self._read(self._entries[block.number], device or self._device)

    def loaded(self, block: Block) -> None:
        """A block is on a device again; its host copy may go when room is needed."""

    def forget(self, block: Block) -> None:
        """Give back all that is held for a block. Under its lock."""
        with self._lock:
            entry = self._entries.pop(block.number)
        if entry.on_host:
            self.ledger.give_back(block.nbytes)
        self.disk.remove(block.number)
        block.tier = None
        block.host = None

    @contextlib.contextmanager
    def whole(self, blocks: Sequence[Block]) -> Iterator[None]:
        """What of these blocks is on the host, or comes there, stays meanwhile, even beyond the budget."""
        self._hold(blocks, 1)
        try:
            yield
        finally:
            self._hold(blocks, -1)
            while self.ledger.used_bytes > self.ledger.budget_bytes and self._give_up_one().has_given:
                pass

    def hold(self, block: Block, change: int) -> None:
        """Keep a host copy where it is (1), or let it go again (-1). Under the block's lock, and only for a short time."""
        with self._lock:
            self._entries[block.number].holds += change

    def close(self) -> None:
        """End the disk's thread and remove all files."""
        self.disk.close()

    def _hold(self, blocks: Sequence[Block], change: int) -> None:
        with self._lock:
            self._num_whole += change
            for block in blocks:
                self._whole[block.number] += change
                if not self._whole[block.number]:
                    del self._whole[block.number]
                if block.number in self._entries:
                    self._entries[block.number].holds += change

    # Ahead, on the disk's thread.

    def _look_ahead(self) -> None:
        """One step of what units would otherwise wait for, and the next after what they ask for."""
        with self._lock:
            self._is_looking_ahead = False
        if self._keep_room() or self._read_ahead():
            self._ask_ahead()

    def _ask_ahead(self) -> None:
        """Have the disk's thread look ahead, if it is not about to."""
        with self._lock:
            asks, self._is_looking_ahead = not self._is_looking_ahead, True
        if asks:
            self.disk.start(self._look_ahead)

    def _keep_room(self) -> bool:
        """Have room for a copy that comes from a device; False if there is, or if all are needed soon."""
        with self._lock:
            largest = max((entry.block.nbytes for entry in self._entries.values()), default=0)
        free = self.ledger.budget_bytes - self.ledger.used_bytes
        return free < largest and self._give_up_one(is_far).has_given

    def _read_ahead(self) -> bool:
        """Read a block that is needed soon; False if there is none, or no room that others need less."""
        with self._lock:
            now = self._now
            found = [entry for entry in self._entries.values() if entry.is_on_disk and entry.uses.is_soon(now)]
        for entry in sorted(found, key=lambda entry: entry.uses.distance(now)):
            block = entry.block
            if not block.lock.acquire(blocking=False):
                continue
            try:
                if block.tier is not self or not entry.is_on_disk:
                    continue
                while not self.ledger.try_take(block.nbytes):
                    if not self._give_up_one(is_far).has_given:
                        return False
                with contextlib.suppress(SpillError):  # the unit that needs it will see for itself
                    self._read(entry, self._device)
                    return True
            finally:
                block.lock.release()
        return False

    # Giving up.

    def _give_up_one(self, may_go: Callable[[Entry, int], bool] | None = None) -> _Search:
        """Give up the host copy that is needed last, of those that may go."""
        search = _Search()
        with self._lock:
            now = self._now
            on_host = [entry for entry in self._entries.values() if entry.on_host]
            counted = sum(self._reserved.values()) + sum(entry.block.nbytes for entry in on_host)
        found = [entry for entry in on_host if not entry.holds]
        # Bytes that are neither are of copies that are just being made, or have just been given up.
        search.is_busy = len(found) < len(on_host) or self.ledger.used_bytes > counted
        may_go = may_go or may_always
        found = [entry for entry in found if may_go(entry, now)]
        found.sort(key=lambda entry: worth(entry, now))
        for entry in found:
            try:
                if self._give_up(entry, search, may_go):
                    search.has_given = True
                    break
            except SpillError as error:
                entry.is_refused = True  # its copy stays, and another may go
                search.failed.append((entry.block, error))
        return search

    def _give_up(self, entry: Entry, search: _Search, may_go: Callable[[Entry, int], bool]) -> bool:
        block = entry.block
        if not block.lock.acquire(blocking=False):
            search.is_busy = True
            return False
        try:
            if not entry.on_host or entry.holds or block.host is None or block.tier is not self:
                search.is_busy = True  # it has gone, or been asked for, only just now
                return False
            if not self._has_settled(entry, may_go):
                search.is_busy = True
                return False
            if not entry.is_wanted:
                self._free(entry, is_wanted=False)
                return True
            if block.data is None:
                self._store(entry)
            elif not entry.is_stored:
                block.dirty = True  # from here on only the device has the bytes
            self._free(entry, is_wanted=not block.dirty)
        finally:
            block.lock.release()
        return True

    def _has_settled(self, entry: Entry, may_go: Callable[[Entry, int], bool]) -> bool:
        """Have no copy in the background read the host copy any more, or write to it; False: it may not go. Under the lock."""
        block = entry.block
        if not may_go(entry, self._now):
            return False
        home = block.home if block.coming is None else block.coming.home
        if home is None or not is_moving(block):
            return True
        home.settle(block)
        return may_go(entry, self._now)  # a copy that has failed has left the block elsewhere

    def _store(self, entry: Entry) -> None:
        block = entry.block
        assert block.host is not None
        if not entry.is_stored:
            self.disk.write(block.number, block.host)
            entry.is_stored, entry.is_refused = True, False

    def _free(self, entry: Entry, *, is_wanted: bool) -> None:
        """Give up a host copy; where its bytes are wanted, the file has them."""
        block = entry.block
        mapped = (lambda: self.disk.mapped(block.number, block.size)) if is_wanted else None
        try:
            self._device.on_host(lambda: block.free_host(mapped))
        except SpillError:
            entry.is_stored = False  # the file is gone, or cannot be opened: it is to be written once more
            raise
        entry.on_host = False
        if block.data is None:
            block.enter(State.DISK if is_wanted else State.DROPPED)
        self.ledger.give_back(block.nbytes)

    # Files.

    def _entry(self, block: Block) -> Entry:
        """A block's entry, made as if it had just been used. Under the lock."""
        entry = self._entries.get(block.number)
        if entry is None:
            entry = self._entries[block.number] = Entry(block, Uses(self._now))
            entry.holds = self._whole[block.number]  # a loose block may be entered while it is wanted whole
            block.tier = self
        entry.on_host = True
        return entry

    def _read(self, entry: Entry, device: Device) -> None:
        """Make a host copy of a file; its bytes are taken. The block is as before until all has been read."""
        block = entry.block
        try:
            flat = device.on_host(lambda: device.host_empty(block.size))
            self.disk.read(block.number, flat)
        except BaseException:
            self.ledger.give_back(block.nbytes)
            raise
        device.on_host(lambda: block.put_host(flat))
        block.moved()
        block.enter(State.HOST)
        entry.on_host = True


def _blame(failed: Sequence[tuple[Block, SpillError]]) -> None:
    """These blocks could not go to disk, and nothing else can go: the trial that has most of them is over.

    Raises:
        SpillError: this thread works for that trial.
    """
    nbytes: Counter[Tenant | None] = Counter()
    for block, _ in failed:
        nbytes[block.tenant] += block.nbytes
    ((tenant, _),) = nbytes.most_common(1)
    error = next(error for block, error in failed if block.tenant is tenant)
    if tenant is None or tenant is tenant_at_work():
        raise error
    tenant.fail(error)
