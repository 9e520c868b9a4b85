"""The memory pagers on a virtual clock: places of blocks, required copies, and their times.

The module follows the rules of `memory/pager.py`: leases pin blocks, the block expected to be needed last is spilled to make
room, missing blocks are loaded, clean blocks leave without a copy, and a block is on one device at most. A block that trials
share counts as a block of the first. `replay.py` hands each recorded memory action of a turn to `ReplayPager` when the virtual
clock reaches the action.

A block that another device has and the host lacks is taken over from the device, as in the recorded run. A block that
travelled over the host in the run does so here. Where the run took over no block, the time of its loads stands in.

Prefetches and background write-backs of the run are repeated where possible; a unit waits for a background copy as long
as in the run, or until the copy would be over. A change of the rules of eviction in `memory/pager.py` needs the same change
in `_ReplayDevice.victims`.

Note: processes. Every operation that takes time is a generator of nanoseconds to wait; other operations run in between.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from hydra_tune.errors import ConfigError
from hydra_tune.observe.trace.turns import BlockCopySpan, BlockFacts, TurnAction
from hydra_tune.simulate.recorded.recording import RecordedDevice, Recording
from hydra_tune.simulate.recorded.script import Copies, ScriptedCopy

_PATIENCE_NS = 100_000  # poll for room this often while every possible victim is being copied
_SENT_LEASES = 2  # as in the pager
_PATIENCE = 100_000  # looks without any copy under way, before the recording counts as damaged

BACKGROUND = ("shed", "clean", "ahead")
"""Actions that delay nothing."""


@dataclass(slots=True, eq=False)
class _ReplayBlock:
    number: int
    facts: BlockFacts
    place: str | None = None
    pinned_for: str | None = None
    dirty: bool = False
    free_ns: int = 0  # end of the copy under way
    is_coming: bool = False  # arriving in the background until `ready_ns`
    source: str | None = None  # device that holds the block until its arrival
    is_leaving: bool = False
    ready_ns: int = 0
    lease: int = 0  # number of the lease during which the block was sent


@dataclass(slots=True, eq=False)
class _ReplayDevice:
    name: str
    budget_bytes: int
    used_bytes: int = 0
    workspace_bytes: int = 0
    leased: list[_ReplayBlock] = field(default_factory=list)
    resident: OrderedDict[int, _ReplayBlock] = field(default_factory=OrderedDict)  # least recently used first
    bytes_in: int = 0
    bytes_out: int = 0
    bytes_across: int = 0
    owner: str = ""  # job of the running or last unit
    num_leases: int = 0

    def victims(self) -> list[_ReplayBlock]:
        """Eviction order, as of `Pager.victims`."""
        # By cost of eviction: blocks already on their way out, other jobs' optimizer state, other jobs' other blocks,
        # the same two of the running job, and last the recently prefetched blocks.
        classes: tuple[list[_ReplayBlock], ...] = ([], [], [], [], [], [])
        for block in self.resident.values():
            if block.is_leaving or block.source == self.name:
                classes[5].append(block)
            elif block.is_coming and self.num_leases - block.lease <= _SENT_LEASES:
                classes[4].append(block)
            else:
                classes[2 * (block.facts.job == self.owner) + (block.facts.kind != "optimizer")].append(block)
        return [*classes[5], *reversed(classes[0]), *classes[1], *reversed(classes[2]), *classes[3], *classes[4]]


class ReplayPager:
    """All blocks and devices of a recorded run.

    Args:
        recording: the blocks, the devices and the speeds of copies.
        clock: returns the time in nanoseconds.
        moved: called with a job, a shard, and the present device of the shard's parameters.
    """

    def __init__(
        self, recording: Recording, clock: Callable[[], int], moved: Callable[[str, int, str | None], None]
    ) -> None:
        self._clock, self._moved = clock, moved
        self._blocks = {number: _ReplayBlock(number, facts) for number, facts in recording.blocks.items()}
        self._devices = {device.name: _made(device) for device in recording.devices}
        self._of_job: dict[str, list[_ReplayBlock]] = {}
        for block in self._blocks.values():
            self._of_job.setdefault(block.facts.job, []).append(block)
        self._ns_per_byte = {direction: _pace(recording, direction) for direction in ("in", "out", "across")}
        # A run without takeovers has no pace of its own for a takeover.
        self._ns_per_byte["across"] = self._ns_per_byte["across"] or self._ns_per_byte["in"]

    @property
    def bytes_in(self) -> int:
        """Bytes loaded."""
        return sum(device.bytes_in for device in self._devices.values())

    @property
    def bytes_out(self) -> int:
        """Bytes spilled."""
        return sum(device.bytes_out for device in self._devices.values())

    @property
    def bytes_across(self) -> int:
        """Bytes taken over from another device."""
        return sum(device.bytes_across for device in self._devices.values())

    def act(self, name: str, action: TurnAction, copies: Copies) -> Iterator[int]:
        """Perform a turn's action on a device's memory; yield nanoseconds to wait.

        `copies` are the copies that the action caused in the recorded run; a repeated copy takes as long again.
        """
        device = self._devices[name]
        blocks = self._known(action)
        if action.what == "lease":
            yield from self._lease(device, blocks, action.nbytes, copies)
        elif action.what == "grow":
            yield from self._make_room(device, action.nbytes, copies)
            device.workspace_bytes += action.nbytes
        elif action.what == "adopt":
            self._adopt(device, blocks[0], action.nbytes)
        elif action.what == "end":
            for block in blocks:
                block.dirty = block.place is not None
            self.end(name)
        else:
            yield from self.give_up(action, copies)

    def act_ahead(self, name: str, action: TurnAction, sent: Sequence[BlockCopySpan]) -> None:
        """Perform a turn's background action; `sent` are the background copies of the turn."""
        device = self._devices[name]
        for block in self._known(action):
            is_free = block.pinned_for is None and block.free_ns <= self._clock()
            if action.what == "shed":
                if is_free and block.place == name and block.source is not None:
                    self._call_back(block)
                elif is_free and block.place == name and (block.is_leaving or not block.dirty):
                    block.is_leaving, block.dirty = False, False
                    self._release(block)
            elif action.what == "clean":
                if is_free and block.place == name and block.dirty and not block.is_leaving:
                    block.is_leaving, block.ready_ns = True, self._over(action, "out", block, sent)
                    device.bytes_out += block.facts.nbytes
            elif is_free and block.place != name and not block.is_coming:
                self._send(device, block, action, sent)

    def _send(
        self, device: _ReplayDevice, block: _ReplayBlock, action: TurnAction, sent: Sequence[BlockCopySpan]
    ) -> None:
        """Prefetch a block in the background, if there is room."""
        if device.used_bytes + block.facts.nbytes > device.budget_bytes:
            return
        is_across = any((copy.what, copy.block) == ("across", block.number) for copy in sent)
        if block.is_leaving:
            block.is_leaving, block.dirty = False, False
        block.is_coming, block.ready_ns = True, self._over(action, "across" if is_across else "in", block, sent)
        block.source, block.place, block.lease = block.place, device.name, device.num_leases
        device.used_bytes += block.facts.nbytes
        device.bytes_across += is_across * block.facts.nbytes
        device.bytes_in += (not is_across) * block.facts.nbytes
        device.resident[block.number] = block
        self._say(block)

    def _call_back(self, block: _ReplayBlock) -> None:
        """Cancel a block's arrival from another device; the block stays at its source."""
        assert block.source is not None
        assert block.place is not None
        self._part(self._devices[block.place], block)
        block.place, block.source, block.is_coming = block.source, None, False
        self._say(block)

    def _arrive(self, block: _ReplayBlock) -> None:
        """Complete a block's arrival from another device; the source gives up the block."""
        if block.source is not None:
            self._part(self._devices[block.source], block)
            block.source = None

    @staticmethod
    def _part(device: _ReplayDevice, block: _ReplayBlock) -> None:
        device.used_bytes -= block.facts.nbytes
        del device.resident[block.number]

    def _over(self, action: TurnAction, what: str, block: _ReplayBlock, sent: Sequence[BlockCopySpan]) -> int:
        """End of a background copy: as long after its beginning as in the run."""
        ended = next((copy.ended_ns for copy in sent if (copy.what, copy.block) == (what, block.number)), action.at_ns)
        return self._clock() + max(0, ended - action.at_ns)

    def give_up(self, action: TurnAction, copies: Copies) -> Iterator[int]:
        """Give up blocks ("drop"), or bring blocks to the host ("home"), wherever the blocks are."""
        for block in self._known(action):
            yield from self._wait_for(block)
            if block.source is not None:
                self._call_back(block)
            awaited_copy = _take("await", block, copies) if action.what == "drop" else None
            if awaited_copy is not None:
                yield awaited_copy.wait_ns + awaited_copy.copy_ns
            if block.place is not None:
                if action.what == "home":
                    yield from self._write_back(block, copies)
                self._release(block)

    def end(self, name: str) -> None:
        """End the device's lease, if any."""
        device = self._devices[name]
        for block in device.leased:
            block.pinned_for = None
        device.leased = []
        device.used_bytes -= device.workspace_bytes
        device.workspace_bytes = 0

    def forget(self, job: str) -> None:
        """Forget all blocks of a finished job."""
        for block in self._of_job.pop(job, ()):
            self._arrive(block)
            if block.place is not None:
                self._release(block)

    def _known(self, action: TurnAction) -> list[_ReplayBlock]:
        return [self._blocks[number] for number in action.blocks if number in self._blocks]

    def _lease(
        self, device: _ReplayDevice, blocks: list[_ReplayBlock], workspace_bytes: int, copies: Copies
    ) -> Iterator[int]:
        for block in blocks:
            yield from self._wait_for(block)
            if block.source is not None and block.place != device.name:
                self._call_back(block)
            block.pinned_for = device.name
        device.leased = blocks
        device.owner = blocks[0].facts.job if blocks else ""
        device.num_leases += 1
        for block in blocks:
            if block.place == device.name:
                yield from self._await(block, copies)
        # Only now, because blocks may have arrived while this process waited.
        missing = [block for block in blocks if block.place != device.name]
        # Once for all blocks and the workspace, as in the pager.
        yield from self._make_room(device, sum(block.facts.nbytes for block in missing) + workspace_bytes, copies)
        device.workspace_bytes = workspace_bytes
        for block in missing:
            yield from self._fetch(device, block, copies)
        for block in blocks:
            device.resident.move_to_end(block.number)

    def _await(self, block: _ReplayBlock, copies: Copies) -> Iterator[int]:
        """Wait for the end of a block's background copy."""
        kept_copy = _take("keep", block, copies)
        # The run reused the block before the write-back began: cancel the copy and its bytes.
        if block.is_leaving and block.place is not None and kept_copy is not None:
            block.is_leaving = False
            self._devices[block.place].bytes_out -= block.facts.nbytes
            yield kept_copy.wait_ns
        if not (block.is_leaving or block.is_coming):
            return
        copy = _take("await", block, copies)
        yield max(0, block.ready_ns - self._clock()) if copy is None else copy.wait_ns + copy.copy_ns
        if block.is_leaving:
            block.dirty = False
        if block.is_coming:
            self._arrive(block)
            self._say(block)
        block.is_leaving, block.is_coming = False, False

    def _adopt(self, device: _ReplayDevice, block: _ReplayBlock, nbytes: int) -> None:
        # The block may be larger than the remaining workspace; the excess counts as used, too.
        if nbytes > device.workspace_bytes:
            device.used_bytes += nbytes - device.workspace_bytes
            device.workspace_bytes = nbytes
        device.workspace_bytes -= nbytes
        # A unit has just made the bytes, so the host has none of them.
        block.place, block.pinned_for, block.dirty = device.name, device.name, True
        device.resident[block.number] = block
        device.leased.append(block)

    def _make_room(self, device: _ReplayDevice, nbytes: int, copies: Copies) -> Iterator[int]:
        patience = _PATIENCE
        while device.used_bytes + nbytes > device.budget_bytes:
            # Choose the victim as late as the run did: other processes may free or pin blocks until then.
            yield from _until_next(copies)
            if device.used_bytes + nbytes <= device.budget_bytes:
                break  # a finished job has freed its bytes meanwhile
            now = self._clock()
            victims = (b for b in device.victims() if b.pinned_for != device.name and b.free_ns <= now)
            victim = next(victims, None)
            if victim is None:
                # A copy under way ends some time, and frees a victim; without any, only other processes could make
                # room.
                patience -= not any(block.free_ns > now for block in device.resident.values())
                if not patience:
                    raise ConfigError(
                        f"the recording is damaged: {device.name} never has room for {nbytes} more bytes beside the "
                        f"{device.used_bytes} of {device.budget_bytes} in use"
                    )
                yield _PATIENCE_NS
                continue
            if victim.source is not None:
                if victim.source == device.name:
                    yield max(0, victim.ready_ns - now)
                    self._arrive(victim)
                else:
                    self._call_back(victim)
                continue
            if not victim.dirty:
                _take("free", victim, copies)
            yield from self._write_back(victim, copies)
            self._release(victim)
        device.used_bytes += nbytes

    def _fetch(self, device: _ReplayDevice, block: _ReplayBlock, copies: Copies) -> Iterator[int]:
        """Bring a block to the device; the caller has reserved the room."""
        yield from _until_next(copies)
        yield from self._wait_for(block)
        recorded_kinds, is_dirty = {copy.what for copy in copies if copy.block == block.number}, False
        is_elsewhere = block.place is not None and not block.is_coming
        if is_elsewhere and "out" not in recorded_kinds:
            yield from self._await(block, copies)
        # Take the block's way in the run; where unknown, only blocks that the host lacks come from a device.
        if is_elsewhere and ("across" in recorded_kinds or (block.dirty and "in" not in recorded_kinds)):
            device.bytes_across += block.facts.nbytes
            yield from self._copy("across", block, copies)
            # The host still lacks the block's present bytes.
            is_dirty = block.dirty
            self._release(block)
        else:
            if block.place is not None:
                yield from self._write_back(block, copies)
                self._release(block)
            device.bytes_in += block.facts.nbytes
            yield from self._copy("in", block, copies)
        block.place, block.dirty = device.name, is_dirty
        device.resident[block.number] = block
        self._say(block)

    def _write_back(self, block: _ReplayBlock, copies: Copies) -> Iterator[int]:
        if block.is_leaving:
            if block.place is not None and any((c.what, c.block) == ("out", block.number) for c in copies):
                block.is_leaving = False  # the copy had not begun
                self._devices[block.place].bytes_out -= block.facts.nbytes
            else:
                yield from self._await(block, copies)
        if block.dirty and block.place is not None:
            self._devices[block.place].bytes_out += block.facts.nbytes
            yield from self._copy("out", block, copies)
            block.dirty = False

    def _release(self, block: _ReplayBlock) -> None:
        if block.place is None:
            return  # the job has ended meanwhile
        self._part(self._devices[block.place], block)
        block.place, block.dirty = None, False
        block.is_coming, block.is_leaving = False, False
        self._say(block)

    def _copy(self, what: str, block: _ReplayBlock, copies: Copies) -> Iterator[int]:
        copy = _take(what, block, copies)
        ns = round(block.facts.nbytes * self._ns_per_byte[what]) if copy is None else copy.wait_ns + copy.copy_ns
        block.free_ns = self._clock() + ns
        yield ns

    def _wait_for(self, block: _ReplayBlock) -> Iterator[int]:
        # A loop, because another copy of the block may have begun by the time this process continues.
        while (wait_ns := block.free_ns - self._clock()) > 0:
            yield wait_ns

    def _say(self, block: _ReplayBlock) -> None:
        if block.facts.shard is not None:
            self._moved(block.facts.job, block.facts.shard, block.place)


def _until_next(copies: Copies) -> Iterator[int]:
    """Wait until the next copy's beginning in the recorded run; the simulation decides what to copy only then."""
    if copies:
        wait_ns, copies[0] = copies[0].wait_ns, copies[0]._replace(wait_ns=0)
        yield wait_ns


def _take(what: str, block: _ReplayBlock, copies: Copies) -> ScriptedCopy | None:
    """Remove and return the recorded copy of this block; None without such a copy."""
    for number, copy in enumerate(copies):
        if (copy.what, copy.block) == (what, block.number):
            return copies.pop(number)
    return None


def _made(device: RecordedDevice) -> _ReplayDevice:
    return _ReplayDevice(device.name, device.budget_bytes)


def _pace(recording: Recording, what: str) -> float:
    """Nanoseconds per byte, over all copies of the run in one direction."""
    copies = [action for turn in recording.turns for action in turn.actions if action.what == what]
    sent = [copy for turn in recording.turns for copy in turn.sent if copy.what == what]
    total_ns = sum(copy.copy_ns for copy in copies) + sum(copy.ended_ns - copy.began_ns for copy in sent)
    return total_ns / max(1, sum(copy.nbytes for copy in copies) + sum(copy.nbytes for copy in sent))
