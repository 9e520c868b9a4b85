"""The host tier: keeps host copies of blocks within a budget of host memory, and moves copies beyond the budget to disk.

The ledger of the tier counts every host copy made by the pool; the memory of a user's batch is the user's own and is
not counted. To make room, the tier gives up host copies in the order of `worth` (`host_eviction.py`), mostly by the most
distant next use. Giving up costs nothing if a device holds the same bytes, the file already has the bytes, or the trial has
failed; otherwise the tier writes the copy to a file first. The tier reads a block back ahead of its unit, before a load to a
device, or when code on the host needs the block.

`ExecutorSettings` (`pool/runtime/settings.py`) makes the tier when a pool with a `spill_dir` starts. The pool's pagers
(`memory/pager.py`) ask the tier for host memory before writing a block back, and `BlockPrefetcher` (`memory/prefetch.py`)
announces blocks. `memory/block_release.py` has blocks read back or forgotten, `TensorGroups` (`train/state/tensor_groups.py`)
takes room for new groups and wants a trial whole, and `ParameterReplicas` (`train/state/replicas.py`) holds the originals of
copies. `pool/devices/host_admission.py` admits each trial before its first unit, and `HostMemoryQuota`
(`train/state/host_quota.py`) reserves what a trial keeps there. `PoolCheckpointWriter` (`pool/checkpointing/writer.py`) takes
room on the ledger without waiting. The tier must not copy to devices.

Note: locks. The lock of the tier guards the tier's tables. A thread takes that lock after the lock of the pool or of a block,
and holds that lock during no wait, copy or write.

Note: work ahead. As each unit begins, the disk's thread is asked to read blocks needed within the next few units. The
thread also keeps room for a copy coming from a device, so that units seldom wait for a write. The thread does a single
such step at a time, so that a request of a waiting unit comes next, and for work ahead gives up no copy needed soon,
unless a device has the bytes.

Note: waiting. Every wait for room happens in `take`. Every such wait ends, because nothing that `take` waits for ever
waits for `take`:

* No thread holds bytes of an unfinished copy while waiting for more. The bytes of a copy are taken all at once, and the
  copy can be given up again as soon as the lock of its block is free.
* A caller may hold the lock of a single block (or the locks of a copy and its original) in `take`, and then takes bytes
  for the same block, which has no bytes on the ledger yet. `take` only tries the locks of other blocks. A lock found
  taken is therefore held for a copy or a transfer in no need of room, or by another `take` under a block without bytes
  to give.
* The disk's thread never waits for the lock of a block or for room. The thread may wait for the copy thread, which waits
  for nobody.
* A background copy ends by itself, whoever waits for the copy. Host memory read or written by a background copy is on
  the ledger and is given up last: the giving thread holds the block's lock, waits for the copy, and then a device has
  the bytes as well. A block on the way therefore never keeps another block from room. Room for a background write-back
  is only offered (`offer`), at once or not at all.
* The tier cannot give up bytes reserved by trials (`admit`) and blocks wanted whole. Each trial declares its largest
  reservation and its largest block before a block of that size exists, and is admitted only if the largest of all
  blocks fits beside all reservations. A trial not yet admitted may have to wait for reservations of other trials; such
  a trial holds no lock and is told when it is stopped.
* A trial wanted whole may overdraw the ledger. Meanwhile every other trial overdraws as well instead of waiting,
  because the trial wanted whole may wait for a block held by another trial.
* A copy refused by the disk stays, and another copy goes. If no copy can go any more, the trial with most of the
  refused bytes fails, by name and with the system's error. The trial's copies may be thrown away from then on, and no
  thread waits for the trial to end. A unit has the error raised only if the failed trial is the unit's own, or unknown.
"""

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hydra_tune.devices.device import Device
from hydra_tune.errors import BudgetError, SpillError
from hydra_tune.memory.block import Block
from hydra_tune.memory.block_states import BlockState
from hydra_tune.memory.host.disk import SpillDisk
from hydra_tune.memory.host.host_eviction import HostTierEntry, costs_nothing, is_far, is_moving, may_always, worth
from hydra_tune.memory.ledger import MemoryLedger
from hydra_tune.memory.reuse_distance import BlockUseHistory
from hydra_tune.memory.shared.shared_file import SharedFile
from hydra_tune.memory.trial_context import TrialMemoryContext, check_tenant, tenant_at_work
from hydra_tune.quantities import format_bytes, format_bytes_up

_PATIENCE_SECONDS = 0.05  # between looks at copies being moved by other threads


class HostLedger(MemoryLedger):
    """Counts the bytes of host copies."""

    def overdraw(self, nbytes: int) -> None:
        """Take bytes whether or not the bytes fit."""
        with self._changed:
            self.used_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)


@dataclass(slots=True)
class _VictimSearchResult:
    """Result of a search for a copy to give up.

    Attributes:
        is_busy: whether other copies are being moved at the moment, so that room or another choice may appear soon.
    """

    has_given: bool = False
    is_busy: bool = False
    failed: list[tuple[Block, SpillError]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _TrialHostMinimum:
    """Host memory that a trial needs even if everything else goes to disk; files in `shared` count once for all trials."""

    fixed_bytes: int
    largest_bytes: int
    shared: Mapping[SharedFile, int]


class HostTier:
    """Keeps host copies within a budget, and files beyond the budget.

    Args:
        disk: disk for the other copies; closed with the tier.
        device: any device of the pool, for allocating host memory.
    """

    def __init__(self, budget_bytes: int, disk: SpillDisk, device: Device) -> None:
        self.ledger = HostLedger("host", budget_bytes)
        self.disk = disk
        self._device = device
        self._entries: dict[int, HostTierEntry] = {}
        self._shares: dict[TrialMemoryContext, _TrialHostMinimum] = {}
        self._reserved: dict[TrialMemoryContext, int] = {}
        self._shared: dict[SharedFile, int] = {}  # files on the ledger
        self._lock = threading.Lock()
        self._times = itertools.count(1)
        self._now = 0
        self._num_whole = 0
        self._whole: Counter[int] = Counter()  # by block number: how many callers want the block whole
        self._is_looking_ahead = False

    # Trials.

    @property
    def capacity_bytes(self) -> int:
        """Bytes that host memory and disk can hold together."""
        return self.ledger.budget_bytes + self.disk.stored_bytes + self.disk.folder.free_bytes

    def check(self, nbytes: int) -> None:
        """Refuse a trial that needs `nbytes` in host memory at once if the budget is smaller.

        Raises:
            BudgetError: the bytes do not fit the budget.
        """
        if nbytes > self.ledger.budget_bytes:
            raise BudgetError(
                f"one shard needs {format_bytes(nbytes)} of host memory at once, more than the "
                f"{format_bytes(self.ledger.budget_bytes)} the pool may use, even with a spill_dir; raise host_memory to at "
                f"least {format_bytes_up(nbytes)}, or cut the model finer (num_shards)"
            )

    def admit(
        self,
        tenant: TrialMemoryContext,
        fixed_bytes: int,
        largest_bytes: int,
        shared: Mapping[SharedFile, int] | None = None,
    ) -> bool:
        """Admit a trial, or let an admitted trial need more; return False if there is no room beside the other trials.

        Args:
            tenant: the trial.
            fixed_bytes: bytes that cannot go to disk; taken by `reserve`.
            largest_bytes: size of the trial's largest block.
            shared: files shared with other trials, which never go to disk, and their bytes; None: as before.
        """
        with self._lock:
            # Of the blocks that can go to disk, only the largest counts: any other host copy can make way for a block
            # in transit.
            before = self._shares.get(tenant)
            if shared is None:
                shared = {} if before is None else before.shared
            own = _TrialHostMinimum(fixed_bytes, largest_bytes, shared)
            shares = [own, *(share for other, share in self._shares.items() if other is not tenant)]
            fixed = sum(share.fixed_bytes for share in shares) + sum(_files_of(shares).values())
            if fixed + max(share.largest_bytes for share in shares) > self.ledger.budget_bytes:
                return False
            self._shares[tenant] = own
        return True

    def reserve(self, tenant: TrialMemoryContext) -> None:
        """Take the admitted bytes that cannot go to disk, or give back the part no longer needed."""
        share, taken_bytes = self._shares.get(tenant), self._reserved.get(tenant, 0)
        if share is None:
            return
        for file, nbytes in share.shared.items():
            if file in self._shared:
                continue
            self.take(nbytes)
            with self._lock:
                # Another trial of the file may have been faster.
                is_taken = file in self._shared
                self._shared[file] = nbytes
            if is_taken:
                self.ledger.give_back(nbytes)
        if share.fixed_bytes > taken_bytes:
            # Outside the lock of the tier, because `take` waits and needs the lock for its search.
            self.take(share.fixed_bytes - taken_bytes)
        else:
            self.ledger.give_back(taken_bytes - share.fixed_bytes)
        with self._lock:
            self._reserved[tenant] = share.fixed_bytes

    def leave(self, tenant: TrialMemoryContext) -> None:
        """Free the reservation of a trial that is over."""
        with self._lock:
            self._shares.pop(tenant, None)
            taken_bytes = self._reserved.pop(tenant, 0)
            left = self._shared.keys() - _files_of(self._shares.values()).keys()
            taken_bytes += sum(self._shared.pop(file) for file in left)
        self.ledger.give_back(taken_bytes)

    # Copies.

    def take(self, nbytes: int) -> None:
        """Take bytes for a host copy, giving up other copies as needed.

        Raises:
            BudgetError: the bytes do not fit, whatever is given up.
            SpillError: no more copies can be given up, because the disk takes no copies of this thread's trial, or of an
                unknown trial.
            HydraTuneError: this thread's trial is over.
        """
        self.check(nbytes)
        while not self.ledger.try_take(nbytes):
            # In every round: the trial may be stopped while waiting.
            check_tenant()
            search = self._give_up_one()
            if search.has_given:
                continue
            if self._num_whole:
                self.ledger.overdraw(nbytes)
                return
            if search.failed and not search.is_busy:
                _blame(search.failed)
            else:
                self.ledger.wait_for_room(_PATIENCE_SECONDS)

    def enter(self, block: Block) -> None:
        """Register a new block on the host only, for which the bytes are taken."""
        with self._lock:
            self._entry(block)

    def used(self, blocks: Sequence[Block]) -> None:
        """Note that a unit uses these blocks now."""
        with self._lock:
            now = self._now = next(self._times)
            for block in blocks:
                entry = self._entries.get(block.number)
                if entry is not None:
                    entry.uses.add(now)
        self._ask_ahead()

    def expect(self, blocks: Sequence[Block]) -> None:
        """Note that the next units use these blocks, and start reading the blocks on disk."""
        with self._lock:
            for block in blocks:
                entry = self._entries.get(block.number)
                if entry is not None:
                    entry.uses.expect(self._now + 1)
        self._ask_ahead()

    def provide(self, block: Block, device: Device) -> None:
        """Give a block an empty host copy. Call under the block's lock."""
        self.take(block.nbytes)
        self._place(block, device)

    def offer(self, block: Block, device: Device) -> bool:
        """As `provide`, but without waiting for the disk or another thread; return False if not possible now.

        Call under the block's lock.
        """
        while not self.ledger.try_take(block.nbytes):
            if not self._give_up_one(costs_nothing).has_given:
                return False
        self._place(block, device)
        return True

    def _place(self, block: Block, device: Device) -> None:
        """Allocate the host copy; the bytes must be taken."""
        try:
            device.on_host(lambda: block.put_host(device.host_empty(block.size)))
        except BaseException:
            self.ledger.give_back(block.nbytes)
            raise
        with self._lock:
            self._entry(block)

    def written(self, block: Block) -> None:
        """Note that a block's host copy has new bytes. Call under the block's lock."""
        self._entries[block.number].is_stored = False

    def recall(self, block: Block, device: Device | None = None) -> None:
        """Read a block from disk if no other copy exists. Call under the block's lock.

        Raises:
            SpillError: the file cannot be read.
            HydraTuneError: the block's trial is over, and the bytes are gone.
        """
        if block.host is not None or block.data is not None:
            return
        if block.tenant is not None:
            # A failed trial's copies are freed without a write to disk, so there may be nothing to read.
            block.tenant.check()
        self.take(block.nbytes)
        self._read(self._entries[block.number], device or self._device)

    def loaded(self, block: Block) -> None:
        """Do nothing: the host copy of a block on a device may go when room is needed, but not before."""

    def forget(self, block: Block) -> None:
        """Give back everything held for a block. Call under the block's lock."""
        with self._lock:
            entry = self._entries.pop(block.number)
        if entry.on_host:
            self.ledger.give_back(block.nbytes)
        # Outside the lock: removing a file may take a while.
        self.disk.remove(block.number)
        block.tier = None
        block.host = None

    @contextlib.contextmanager
    def whole(self, blocks: Sequence[Block]) -> Iterator[None]:
        """Keep the host copies of these blocks, present and future, for the length of a `with`, even beyond the budget."""
        self._hold(blocks, 1)
        try:
            yield
        finally:
            self._hold(blocks, -1)
            # The overdraft is paid back as far as possible now; later calls of `take` pay the rest.
            while self.ledger.used_bytes > self.ledger.budget_bytes and self._give_up_one().has_given:
                pass

    def hold(self, block: Block, change: int) -> None:
        """Keep a host copy in place (1), or release the copy again (-1). Call under the block's lock, and only briefly."""
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

    # Work ahead, on the disk's thread.

    def _look_ahead(self) -> None:
        """Do a single step of work ahead, and queue the next step behind requests of waiting units."""
        with self._lock:
            self._is_looking_ahead = False
        if self._keep_room() or self._read_ahead():
            self._ask_ahead()

    def _ask_ahead(self) -> None:
        with self._lock:
            asks, self._is_looking_ahead = not self._is_looking_ahead, True
        if asks:
            self.disk.start(self._look_ahead)

    def _keep_room(self) -> bool:
        """Make room for a copy from a device; return False if there is room already, or if no copy may go now."""
        with self._lock:
            largest = max((entry.block.nbytes for entry in self._entries.values()), default=0)
        free = self.ledger.budget_bytes - self.ledger.used_bytes
        return free < largest and self._give_up_one(is_far).has_given

    def _read_ahead(self) -> bool:
        """Read the block needed first among the blocks needed soon that can be read now; return whether a block was read."""
        with self._lock:
            now = self._now
            due_entries = [entry for entry in self._entries.values() if entry.is_on_disk and entry.uses.is_soon(now)]
        for entry in sorted(due_entries, key=lambda entry: entry.uses.distance(now)):
            block = entry.block
            # The disk's thread must never wait for a lock: the holder may be waiting for a write by this thread.
            if not block.lock.acquire(blocking=False):
                continue
            try:
                # Looked at again under the lock: the block may have been read or dropped meanwhile.
                if block.tier is not self or not entry.is_on_disk:
                    continue
                while not self.ledger.try_take(block.nbytes):
                    if not self._give_up_one(is_far).has_given:
                        return False
                with contextlib.suppress(SpillError):  # the unit in need of the block gets the error
                    self._read(entry, self._device)
                    return True
            finally:
                block.lock.release()
        return False

    # Giving up.

    def _give_up_one(self, may_go: Callable[[HostTierEntry, int], bool] | None = None) -> _VictimSearchResult:
        """Give up a host copy: the first that can go among the copies that may go, in the order of `worth`."""
        search = _VictimSearchResult()
        with self._lock:
            now = self._now
            on_host = [entry for entry in self._entries.values() if entry.on_host]
            counted = sum(self._reserved.values()) + sum(self._shared.values())
            counted += sum(entry.block.nbytes for entry in on_host)
        candidates = [entry for entry in on_host if not entry.holds]
        # The remaining bytes on the ledger belong to copies being allocated or given up at this moment, or to a checkpoint.
        search.is_busy = len(candidates) < len(on_host) or self.ledger.used_bytes > counted
        may_go = may_go or may_always
        candidates = [entry for entry in candidates if may_go(entry, now)]
        candidates.sort(key=lambda entry: worth(entry, now))
        for entry in candidates:
            try:
                if self._give_up(entry, search, may_go):
                    search.has_given = True
                    break
            except SpillError as error:
                entry.is_refused = True  # the copy stays, and another copy may go
                search.failed.append((entry.block, error))
        return search

    def _give_up(
        self, entry: HostTierEntry, search: _VictimSearchResult, may_go: Callable[[HostTierEntry, int], bool]
    ) -> bool:
        block = entry.block
        if not block.lock.acquire(blocking=False):
            search.is_busy = True
            return False
        try:
            if not entry.on_host or entry.holds or block.host is None or block.tier is not self:
                search.is_busy = True  # the copy has gone, or been asked for, only just now
                return False
            if not self._has_settled(entry, may_go):
                search.is_busy = True
                return False
            # No reader is left for the bytes of a failed trial, so a file would be wasted.
            if not entry.is_wanted:
                self._free(entry, is_wanted=False)
                return True
            if block.data is None:
                self._store(entry)
            elif not entry.is_stored:
                block.dirty = True  # the file is stale, so from here on only the device has the bytes
            self._free(entry, is_wanted=not block.dirty)
        finally:
            block.lock.release()
        return True

    def _has_settled(self, entry: HostTierEntry, may_go: Callable[[HostTierEntry, int], bool]) -> bool:
        """End background copies that use the host copy; return False if the copy may not go. Call under the block's lock."""
        block = entry.block
        if not may_go(entry, self._now):
            return False
        home = block.home if block.coming is None else block.coming.home
        if home is None or not is_moving(block):
            return True
        home.settle(block)
        # Asked again: a failed copy may have left the block in a place where the host copy is needed.
        return may_go(entry, self._now)

    def _store(self, entry: HostTierEntry) -> None:
        block = entry.block
        assert block.host is not None
        if not entry.is_stored:
            # Under the block's lock and outside the lock of the tier, so that other blocks move during the write.
            self.disk.write(block.number, block.host)
            entry.is_stored, entry.is_refused = True, False

    def _free(self, entry: HostTierEntry, *, is_wanted: bool) -> None:
        """Free a host copy; if the bytes are wanted, the file holds them."""
        block = entry.block
        mapped = (lambda: self.disk.mapped(block.number, block.size)) if is_wanted else None
        try:
            self._device.on_host(lambda: block.free_host(mapped))
        except SpillError:
            entry.is_stored = False  # the file is gone or cannot be opened, so the bytes must be written once more
            raise
        entry.on_host = False
        if block.data is None:
            block.enter(BlockState.DISK if is_wanted else BlockState.DROPPED)
        self.ledger.give_back(block.nbytes)

    # Files.

    def _entry(self, block: Block) -> HostTierEntry:
        """Return a block's entry, created as if just used. Call under the lock of the tier."""
        entry = self._entries.get(block.number)
        if entry is None:
            entry = self._entries[block.number] = HostTierEntry(block, BlockUseHistory(self._now))
            entry.holds = self._whole[block.number]  # a loose block may be entered while wanted whole
            block.tier = self
        entry.on_host = True
        return entry

    def _read(self, entry: HostTierEntry, device: Device) -> None:
        """Read a file into a new host copy; the bytes must be taken. The block changes only after the whole file is read."""
        block = entry.block
        try:
            flat = device.on_host(lambda: device.host_empty(block.size))
            self.disk.read(block.number, flat)
        except BaseException:
            self.ledger.give_back(block.nbytes)
            raise
        device.on_host(lambda: block.put_host(flat))
        block.moved()
        block.enter(BlockState.HOST)
        entry.on_host = True


def _files_of(shares: Iterable[_TrialHostMinimum]) -> dict[SharedFile, int]:
    return {file: nbytes for share in shares for file, nbytes in share.shared.items()}


def _blame(failed: Sequence[tuple[Block, SpillError]]) -> None:
    """Fail the trial with most of the bytes refused by the disk, after no other copy can go.

    Raises:
        SpillError: this thread works for the failed trial, or the trial is unknown.
    """
    nbytes: Counter[TrialMemoryContext | None] = Counter()
    for block, _ in failed:
        nbytes[block.tenant] += block.nbytes
    ((tenant, _),) = nbytes.most_common(1)
    error = next(error for block, error in failed if block.tenant is tenant)
    if tenant is None or tenant is tenant_at_work():
        raise error
    tenant.fail(error)
