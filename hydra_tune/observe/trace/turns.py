"""Records the memory actions of a worker, action by action, while a run is recorded.

`PoolRecorder` (`pool/runtime/recorder.py`) opens a `WorkerTurn` on the worker's thread for each command to run a unit,
and on any thread for the release of an ended job's memory. `Worker` (`pool/runtime/worker.py`) notes the units. The
pager (`memory/pager.py`), leases (`memory/lease.py`), the prefetcher (`memory/prefetch.py`) and releases
(`memory/block_release.py`) note their actions on the thread's turn. Without a recording there is no turn, and a note
costs a single thread-local lookup. `simulate/recorded/recording.py` writes the turns to a file and reads them from one;
`simulate/recorded/script.py` and `simulate/recorded/pager_model.py` read the turns.

Note: threads. A turn has no lock. A lease opens its worker's turn on autograd's thread as well, while the worker waits.
All turns of a recording share one dictionary of facts. A turn must keep no block and no tensor alive.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

_MEETS = ("lease", "adopt")  # actions on a job's own blocks; a worker may also give up blocks of another, finished job


class TurnAction(NamedTuple):
    """One entry of a turn.

    Args:
        what: one of
            "lease": blocks are pinned, with `nbytes` of workspace;
            "grow": `nbytes` more workspace;
            "in", "out": a block was copied from the host to the device, or from the device to the host;
            "across": a block was copied from another device, and has left the other device;
            "free": a block with nothing to write back made room;
            "adopt": a unit made a block of `nbytes`;
            "end": of the lease; `blocks` are those whose bytes only the device has;
            "drop", "home": a block was given up, or brought to the host;
            "ahead": blocks were prefetched in the background, and "shed": blocks made room for a prefetch without a write-back;
            "clean": a background copy to the host was begun, to make room later;
            "await": a unit waited `copy_ns` for a background copy;
            "keep": a background copy to the host was cancelled, because the block is used again.
        copy_ns: nanoseconds of the action spent copying, or waiting for a copy.
    """

    what: str
    at_ns: int
    copy_ns: int = 0
    blocks: tuple[int, ...] = ()
    nbytes: int = 0


class BlockCopySpan(NamedTuple):
    """A copy of a block: "in", "out" or "across", with its times."""

    what: str
    block: int
    nbytes: int
    began_ns: int
    ended_ns: int


class UnitSpan(NamedTuple):
    """A unit that ran within a turn; the update of a backward is a separate unit."""

    kind: str
    shard: int
    start_ns: int
    end_ns: int


class BlockFacts(NamedTuple):
    """Facts of a block.

    Args:
        nbytes: bytes as counted by the ledger.
        shard: the shard, for parameters of a single shard.
    """

    job: str
    kind: str
    nbytes: int
    shard: int | None


class RecordableBlock(Protocol):
    """Interface of a block of memory, as far as a record needs it."""

    number: int
    nbytes: int

    @property
    def kind(self) -> str:
        """Content of the block."""

    @property
    def size(self) -> int:
        """Size in bytes."""


class RecordableCopy(Protocol):
    """Interface of a background copy; times are 0 until the copy begins, or ends."""

    began_ns: int
    ended_ns: int


@dataclass(slots=True)
class WorkerTurn:
    """A worker's actions for one command of the scheduler, or the actions of a release.

    Args:
        device: device of the worker; empty for a release.
        facts: of all blocks met by any turn, by number; shared by all turns.
        sent: finished background copies that the turn began, in either direction; empty before `so_far`.
    """

    job: str
    device: str
    facts: dict[int, BlockFacts] = field(repr=False)
    actions: list[TurnAction] = field(default_factory=list)
    units: list[UnitSpan] = field(default_factory=list)
    sent: list[BlockCopySpan] = field(default_factory=list)
    _followed: list[tuple[str, int, int, RecordableCopy]] = field(default_factory=list, repr=False, compare=False)

    def note(self, what: str, blocks: Iterable[RecordableBlock] = (), nbytes: int = 0, *, since_ns: int = 0) -> None:
        """Note an action finished now; `since_ns` is the beginning of a copy, or 0 without a copy."""
        now = time.perf_counter_ns()
        numbers = []
        for block in blocks:
            numbers.append(block.number)
            if what in _MEETS and block.number not in self.facts:
                shard = getattr(block, "shard", None)  # only groups of blocks have a shard
                self.facts[block.number] = BlockFacts(self.job, str(block.kind), block.nbytes, shard)
        # Numbers, not blocks: a recording must keep no tensor alive.
        self.actions.append(TurnAction(what, now, now - since_ns if since_ns else 0, tuple(numbers), nbytes))

    @property
    def copies(self) -> list[BlockCopySpan]:
        """Copies to and from the device that the turn itself made, and waited for from beginning to end."""
        return [
            BlockCopySpan(a.what, a.blocks[0], a.nbytes, a.at_ns - a.copy_ns, a.at_ns)
            for a in self.actions
            if a.what in ("in", "out", "across") and a.copy_ns
        ]

    def follow(self, what: str, block: RecordableBlock, copy: RecordableCopy) -> None:
        """Note a background copy, whose times are read by `so_far`."""
        self._followed.append((what, block.number, block.size, copy))

    def so_far(self) -> "WorkerTurn":
        """Return a copy, with the background copies that have ended; any thread may call."""
        sent = [
            BlockCopySpan(what, number, size, copy.began_ns, copy.ended_ns)
            for what, number, size, copy in list(self._followed)
            if copy.ended_ns
        ]
        return WorkerTurn(self.job, self.device, self.facts, list(self.actions), list(self.units), sent)

    @contextmanager
    def unit(self, kind: str, shard: int) -> Iterator[None]:
        """Record a unit around the code of the context."""
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self.units.append(UnitSpan(kind, shard, start, time.perf_counter_ns()))


class _ThreadLocalTurn(threading.local):
    # A class attribute is the default of every thread, without any code when a thread begins.
    turn: WorkerTurn | None = None


_THREAD = _ThreadLocalTurn()


def current_turn() -> WorkerTurn | None:
    """Return this thread's turn, or None without a recording."""
    return _THREAD.turn


def note(what: str, blocks: Iterable[RecordableBlock] = (), nbytes: int = 0, *, since_ns: int = 0) -> None:
    """Note an action on this thread's turn, if any; arguments as of `WorkerTurn.note`."""
    turn = _THREAD.turn
    if turn is not None:
        turn.note(what, blocks, nbytes, since_ns=since_ns)


@contextmanager
def in_turn(turn: WorkerTurn | None) -> Iterator[None]:
    """Within the context, record this thread's actions on a turn; None records nothing."""
    before, _THREAD.turn = _THREAD.turn, turn
    try:
        yield
    finally:
        _THREAD.turn = before
