"""The pagers on a virtual clock: which block is on which device, what has to be copied, and how long that takes.

Follows `hydra_tune.memory.pager` rule by rule: blocks are pinned, room is made by spilling what was not used for longest,
what is missing is loaded, clean blocks leave without a copy, a block is on one device at most.

Note: processes. What takes time is a generator of nanoseconds to wait; between them others go on.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from hydra_tune.observe.turns import Action, BlockFacts
from hydra_tune.simulate.recording import RecordedDevice, Recording
from hydra_tune.simulate.script import Copies

_PATIENCE_NS = 100_000  # between looks for room, where all that could leave is being copied at this moment


@dataclass(slots=True, eq=False)
class _Block:
    number: int
    facts: BlockFacts
    place: str | None = None
    pinned_for: str | None = None
    dirty: bool = False
    free_ns: int = 0  # until then it is being copied


@dataclass(slots=True, eq=False)
class _Device:
    name: str
    budget_bytes: int
    used_bytes: int = 0
    workspace_bytes: int = 0
    leased: list[_Block] = field(default_factory=list)
    resident: OrderedDict[int, _Block] = field(default_factory=OrderedDict)  # least recently used first
    bytes_in: int = 0
    bytes_out: int = 0


class Blocks:
    """All blocks and devices of a recorded run.

    Args:
        recording: of what there is, and how fast copies were.
        clock: tells the time in nanoseconds.
        moved: is called with a job, a shard of it, and the device where its parameters are now.
    """

    def __init__(
        self, recording: Recording, clock: Callable[[], int], moved: Callable[[str, int, str | None], None]
    ) -> None:
        self._clock, self._moved = clock, moved
        self._blocks = {number: _Block(number, facts) for number, facts in recording.blocks.items()}
        self._devices = {device.name: _made(device) for device in recording.devices}
        self._of_job: dict[str, list[_Block]] = {}
        for block in self._blocks.values():
            self._of_job.setdefault(block.facts.job, []).append(block)
        self._ns_per_byte = {what: _pace(recording, what) for what in ("in", "out")}
        self._recorded: dict[str, Copies] = {device: {} for device in self._devices}

    @property
    def bytes_in(self) -> int:
        """Bytes loaded."""
        return sum(device.bytes_in for device in self._devices.values())

    @property
    def bytes_out(self) -> int:
        """Bytes spilled."""
        return sum(device.bytes_out for device in self._devices.values())

    def act(self, name: str, action: Action, copies: Copies) -> Iterator[int]:
        """Do what a turn does with a device's memory.

        Args:
            name: of the device.
            action: what.
            copies: what was copied for it in the recorded run, and how long that took; such a copy takes as long again.

        Yields:
            Nanoseconds to wait.
        """
        self._recorded[name] = copies
        device = self._devices[name]
        blocks = [self._blocks[number] for number in action.blocks if number in self._blocks]
        if action.what == "lease":
            yield from self._lease(device, blocks, action.nbytes)
        elif action.what == "grow":
            yield from self._make_room(device, action.nbytes)
            device.workspace_bytes += action.nbytes
        elif action.what == "adopt":
            self._adopt(device, blocks[0], action.nbytes)
        elif action.what == "end":
            for block in blocks:
                block.dirty = block.place is not None
            self.end(name)
        else:
            for block in blocks:
                yield from self._leave(block, device, keep=action.what == "home")

    def end(self, name: str) -> None:
        """The device's lease is over, if it has one."""
        device = self._devices[name]
        for block in device.leased:
            block.pinned_for = None
        device.leased = []
        device.used_bytes -= device.workspace_bytes
        device.workspace_bytes = 0

    def forget(self, job: str) -> None:
        """A job is over: its blocks are gone."""
        for block in self._of_job.pop(job, ()):
            if block.place is not None:
                self._release(block)

    def _lease(self, device: _Device, blocks: list[_Block], workspace_bytes: int) -> Iterator[int]:
        for block in blocks:
            yield from self._wait_for([block])
            block.pinned_for = device.name
        device.leased = blocks
        missing = [block for block in blocks if block.place != device.name]
        yield from self._make_room(device, sum(block.facts.nbytes for block in missing) + workspace_bytes)
        device.workspace_bytes = workspace_bytes
        for block in missing:
            yield from self._fetch(device, block)
        for block in blocks:
            device.resident.move_to_end(block.number)

    def _adopt(self, device: _Device, block: _Block, nbytes: int) -> None:
        if nbytes > device.workspace_bytes:
            device.used_bytes += nbytes - device.workspace_bytes
            device.workspace_bytes = nbytes
        device.workspace_bytes -= nbytes
        block.place, block.pinned_for, block.dirty = device.name, device.name, True
        device.resident[block.number] = block
        device.leased.append(block)

    def _make_room(self, device: _Device, nbytes: int) -> Iterator[int]:
        while device.used_bytes + nbytes > device.budget_bytes:
            now = self._clock()
            victims = (b for b in device.resident.values() if b.pinned_for != device.name and b.free_ns <= now)
            victim = next(victims, None)
            if victim is None:
                yield _PATIENCE_NS
                continue
            yield from self._write_back(victim, device)
            self._release(victim)
        device.used_bytes += nbytes

    def _fetch(self, device: _Device, block: _Block) -> Iterator[int]:
        """The room is taken already."""
        yield from self._wait_for([block])
        if block.place is not None:
            yield from self._write_back(block, device)
            self._release(block)
        device.bytes_in += block.facts.nbytes
        yield from self._copy("in", block, device)
        block.place = device.name
        device.resident[block.number] = block
        self._say(block)

    def _leave(self, block: _Block, device: _Device, *, keep: bool) -> Iterator[int]:
        yield from self._wait_for([block])
        if block.place is not None:
            if keep:
                yield from self._write_back(block, device)
            self._release(block)

    def _write_back(self, block: _Block, asking: _Device) -> Iterator[int]:
        if block.dirty and block.place is not None:
            self._devices[block.place].bytes_out += block.facts.nbytes
            yield from self._copy("out", block, asking)
            block.dirty = False

    def _release(self, block: _Block) -> None:
        if block.place is None:
            return  # the job has ended meanwhile
        device = self._devices[block.place]
        device.used_bytes -= block.facts.nbytes
        del device.resident[block.number]
        block.place, block.dirty = None, False
        self._say(block)

    def _copy(self, what: str, block: _Block, asking: _Device) -> Iterator[int]:
        modelled = (0, round(block.facts.nbytes * self._ns_per_byte[what]))
        before, taken = self._recorded[asking.name].pop((what, block.number), modelled)
        block.free_ns = self._clock() + before + taken
        yield before + taken

    def _wait_for(self, blocks: Iterable[_Block]) -> Iterator[int]:
        for block in blocks:
            while (left := block.free_ns - self._clock()) > 0:
                yield left

    def _say(self, block: _Block) -> None:
        if block.facts.shard is not None:
            self._moved(block.facts.job, block.facts.shard, block.place)


def _made(device: RecordedDevice) -> _Device:
    return _Device(device.name, device.budget_bytes)


def _pace(recording: Recording, what: str) -> float:
    """Nanoseconds a byte, over all copies of the run in one direction."""
    copies = [action for turn in recording.turns for action in turn.actions if action.what == what]
    return sum(copy.copy_ns for copy in copies) / max(1, sum(copy.nbytes for copy in copies))
