"""The host tier: host copies of blocks within a budget of host memory, beyond which they go to disk.

Every host copy that the pool has made is on the ledger here (a batch's own memory is the user's and is not). Room is made by
giving up the copy that is needed furthest in the future: for nothing where a device has the bytes as well, or the file has
them already, else by writing it to its file first. A block comes back before it is loaded to a device, or when its trial is
wanted whole.

Note: when a block is needed next. A training step repeats itself: optimizer state is used once in a step, parameters two or
three times at distances that come again in the next step. So the distances between a block's last uses tell the next one.
Times are counted in units of the whole pool. A block that is overdue belongs to a trial that waits, and the longer it has
waited the sooner its blocks go.

Note: ahead. After each unit the disk's thread looks for blocks that are needed within the next few, and reads them; and it sees
to it that there is room for a copy that comes from a device, so that units seldom wait for a write. It does one such thing at a
time, so that what a unit waits for comes next, and gives up nothing for it that is itself needed soon.

Note: locks and room. Nobody holds bytes of this ledger while waiting for more: a copy's bytes are taken all at once, and once
they are there the copy can be given up again as soon as its block's lock is free. So whoever waits is served when the largest
block fits beside what is reserved, which is seen to before a trial begins. A trial that is wanted whole may overdraw the
ledger; as long as one is, the others need not wait either, for what it waits for may be a block that they hold.
"""

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hydra_tune.devices.device import Device
from hydra_tune.errors import BudgetError, SpillError
from hydra_tune.memory.block import Block
from hydra_tune.memory.disk import Disk
from hydra_tune.memory.ledger import Ledger
from hydra_tune.quantities import format_bytes, format_bytes_up

_AHEAD = 4  # units: a backward and an update are two, so this is two shards ahead
_PATIENCE_SECONDS = 0.05  # between looks at copies that are being moved at this moment
_PATTERNS = (1, 2, 3)  # uses of a block in a step
_USES = 2 * _PATTERNS[-1] + 1


class HostLedger(Ledger):
    """Counts host copies."""

    def overdraw(self, nbytes: int) -> None:
        """Take bytes whether or not they fit."""
        with self._changed:
            self.used_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)


@dataclass(slots=True)
class _Entry:
    """What is known of one block. `on_host`: its copy is on the ledger; `is_stored`: its file had the host copy's bytes."""

    block: Block
    on_host: bool = False
    is_stored: bool = False
    holds: int = 0
    uses: deque[int] = field(default_factory=lambda: deque(maxlen=_USES))

    def distance(self, now: int) -> int:
        """In how many units it is needed next, as far as can be told."""
        return abs(self.uses[-1] + self._gap() - now)

    def is_soon(self, now: int) -> bool:
        """Whether it is known to be needed soon."""
        return self._gap() > 0 and self.distance(now) <= _AHEAD

    def _gap(self) -> int:
        return _next_gap([b - a for a, b in itertools.pairwise(self.uses)])


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
        self._entries: dict[int, _Entry] = {}
        self._lock = threading.Lock()
        self._times = itertools.count(1)
        self._now = 0
        self._num_whole = 0
        self._is_looking_ahead = False

    @property
    def capacity_bytes(self) -> int:
        """What host memory and disk can hold together."""
        return self.ledger.budget_bytes + self.disk.stored_bytes + self.disk.folder.free_bytes

    def check(self, largest_bytes: int) -> None:
        """Refuse a trial of which so many bytes have to be in host memory at once.

        Raises:
            BudgetError: they do not fit.
        """
        if largest_bytes > self.ledger.budget_bytes:
            raise BudgetError(
                f"one shard needs {format_bytes(largest_bytes)} of host memory at once, more than the "
                f"{format_bytes(self.ledger.budget_bytes)} the pool may use, even with a spill_dir; raise host_memory to at "
                f"least {format_bytes_up(largest_bytes)}, or cut the model finer (num_shards)"
            )

    def take(self, nbytes: int) -> None:
        """Take bytes for a host copy, giving up others as needed.

        Raises:
            BudgetError: they do not fit, whatever is given up.
            SpillError: another copy could not be written to disk.
        """
        self.check(nbytes)
        while not self.ledger.try_take(nbytes):
            if self._give_up_one():
                continue
            if self._num_whole:
                self.ledger.overdraw(nbytes)
                return
            self.ledger.wait_for_room(_PATIENCE_SECONDS)

    def reserve(self, nbytes: int) -> None:
        """Keep bytes free for what cannot go to disk; a negative number gives them back."""
        if nbytes > 0:
            self.take(nbytes)
        else:
            self.ledger.give_back(-nbytes)

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
                    entry.uses.append(now)
            asks, self._is_looking_ahead = not self._is_looking_ahead, True
        if asks:
            self.disk.start(self._look_ahead)

    def provide(self, block: Block, device: Device) -> None:
        """Give a block an empty host copy. Under its lock."""
        self.take(block.nbytes)
        device.on_host(lambda: block.new_host(device))
        with self._lock:
            self._entry(block)

    def written(self, block: Block) -> None:
        """A block's host copy has new bytes. Under its lock."""
        self._entries[block.number].is_stored = False

    def recall(self, block: Block, device: Device | None = None) -> None:
        """Read a block from disk if its bytes are there only. Under its lock.

        Raises:
            SpillError: it cannot be read.
        """
        if block.host is not None or block.data is not None:
            return
        self.take(block.nbytes)
        self._read(self._entries[block.number], device or self._device)

    def forget(self, block: Block, *, keep: bool = False) -> None:
        """Give back all that is held for a block. Under its lock; `keep` leaves the host copy to the caller."""
        with self._lock:
            entry = self._entries.pop(block.number)
        if entry.on_host:
            self.ledger.give_back(block.nbytes)
        self.disk.remove(block.number)
        block.tier = None
        if not keep:
            block.host = None

    @contextlib.contextmanager
    def whole(self, blocks: Sequence[Block]) -> Iterator[None]:
        """What of these blocks is on the host, or comes there, stays meanwhile, even beyond the budget."""
        self._hold(blocks, 1)
        try:
            yield
        finally:
            self._hold(blocks, -1)
            while self.ledger.used_bytes > self.ledger.budget_bytes and self._give_up_one():
                pass

    def close(self) -> None:
        """End the disk's thread and remove all files."""
        self.disk.close()

    def _hold(self, blocks: Sequence[Block], change: int) -> None:
        with self._lock:
            self._num_whole += change
            for block in blocks:
                if block.number in self._entries:
                    self._entries[block.number].holds += change

    def _look_ahead(self) -> None:
        """On the disk's thread: one step of what units would otherwise wait for, and the next after what they ask for."""
        with self._lock:
            self._is_looking_ahead = False
        with contextlib.suppress(SpillError):  # whoever needs the bytes will see for himself
            if self._keep_room() or self._read_ahead():
                with self._lock:
                    asks, self._is_looking_ahead = not self._is_looking_ahead, True
                if asks:
                    self.disk.start(self._look_ahead)

    def _keep_room(self) -> bool:
        """Have room for a copy that comes from a device; False if there is, or if all are needed soon."""
        with self._lock:
            largest = max((entry.block.nbytes for entry in self._entries.values()), default=0)
        free = self.ledger.budget_bytes - self.ledger.used_bytes
        return free < largest and self._give_up_one(beyond=_AHEAD)

    def _read_ahead(self) -> bool:
        """Read a block that is needed soon; False if there is none, or no room that others need less."""
        with self._lock:
            now = self._now
            found = [entry for entry in self._entries.values() if self._is_on_disk(entry) and entry.is_soon(now)]
        for entry in sorted(found, key=lambda entry: entry.distance(now)):
            block = entry.block
            if not block.lock.acquire(blocking=False):
                continue
            try:
                if block.tier is not self or not self._is_on_disk(entry):
                    continue
                while not self.ledger.try_take(block.nbytes):
                    if not self._give_up_one(beyond=_AHEAD):
                        return False
                self._read(entry, self._device)
                return True
            finally:
                block.lock.release()
        return False

    @staticmethod
    def _is_on_disk(entry: _Entry) -> bool:
        return entry.is_stored and not entry.on_host and entry.block.host is None and entry.block.data is None

    def _give_up_one(self, beyond: int = -1) -> bool:
        """Give up the host copy that is needed last, and not so soon; False if there is none to give up.

        Raises:
            SpillError: of none could the bytes be kept on disk.
        """
        with self._lock:
            now = self._now
            found = [entry for entry in self._entries.values() if entry.on_host and not entry.holds]
        if beyond >= 0:
            found = [entry for entry in found if entry.block.data is not None or entry.distance(now) > beyond]
        # A copy of what a device has costs nothing to give up.
        found.sort(key=lambda entry: (entry.block.data is not None, entry.distance(now)), reverse=True)
        failure: SpillError | None = None
        for entry in found:
            try:
                if self._give_up(entry):
                    return True
            except SpillError as error:
                failure = error  # of one file, perhaps: its copy stays, and another may go
        if failure is not None:
            raise failure
        return False

    def _give_up(self, entry: _Entry) -> bool:
        block = entry.block
        if not block.lock.acquire(blocking=False):
            return False
        try:
            if not entry.on_host or entry.holds or block.host is None or block.tier is not self:
                return False
            if block.data is None:
                self._store(entry)
            elif not entry.is_stored:
                block.dirty = True  # from here on only the device has the bytes
            self._free(entry)
        finally:
            block.lock.release()
        return True

    def _store(self, entry: _Entry) -> None:
        block = entry.block
        assert block.host is not None
        if not entry.is_stored:
            self.disk.write(block.number, block.host)
            entry.is_stored = True

    def _free(self, entry: _Entry) -> None:
        block = entry.block
        mapped = None
        if not block.dirty:
            mapped = lambda: self.disk.mapped(block.number, block.size)  # noqa: E731 - made on the copy thread
        self._device.on_host(lambda: block.free_host(mapped))
        entry.on_host = False
        self.ledger.give_back(block.nbytes)

    def _entry(self, block: Block) -> _Entry:
        """A block's entry, made as if it had just been used. Under the lock."""
        entry = self._entries.get(block.number)
        if entry is None:
            entry = self._entries[block.number] = _Entry(block)
            entry.uses.append(self._now)
            block.tier = self
        entry.on_host = True
        return entry

    def _read(self, entry: _Entry, device: Device) -> None:
        """Make a host copy of a file; its bytes are taken."""
        block = entry.block
        device.on_host(lambda: block.new_host(device))
        assert block.host is not None
        try:
            self.disk.read(block.number, block.host)
        except BaseException:
            device.on_host(lambda: block.free_host(lambda: self.disk.mapped(block.number, block.size)))
            self.ledger.give_back(block.nbytes)
            raise
        block.moved()
        entry.on_host = True


def _next_gap(gaps: Sequence[int]) -> int:
    """The number that follows, if the last ones come again in turn; 0, as for one that is due, where nothing is known yet."""
    known = [period for period in _PATTERNS if 2 * period <= len(gaps)]
    if not known:
        return 0

    def error(period: int) -> float:
        return sum(abs(gaps[-i] - gaps[-i - period]) for i in range(1, period + 1)) / period

    return gaps[-min(known, key=error)]
