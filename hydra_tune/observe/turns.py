"""What a worker did with a device's memory, action by action: kept while a run is recorded, and only then.

The pool opens a `Turn` on the worker's thread for each command to run a unit; the pager notes on that thread's turn what it
does. Without a recording there is no turn, and a note costs one look at a thread's own variable.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

_MEETS = ("lease", "adopt")  # with a job's own blocks; a worker may also give up another job's, which is over


class Action(NamedTuple):
    """One entry of a turn.

    Args:
        what: one of
            "lease": blocks are pinned, `nbytes` of workspace asked for;
            "grow": `nbytes` more workspace;
            "in", "out": a block was copied to the device from the host, or from it to the host;
            "across": a block was copied to the device from another one, which has it no longer;
            "free": a block that the host has as well made room;
            "adopt": a unit made a block of `nbytes`;
            "end": of the lease; `blocks` are those whose bytes only the device has;
            "drop", "home": a block was given up, or brought to the host;
            "ahead": blocks were sent in the background, for later units, and "shed" for the room, where they were clean;
            "clean": a copy to the host was begun in the background, to make room later;
            "await": a unit waited for what was copied in the background, for `copy_ns`;
            "keep": what was to be copied to the host in the background is used again, and was not.
        at_ns: when it was done.
        copy_ns: of these, nanoseconds spent copying.
        blocks: numbers of blocks.
        nbytes: bytes.
    """

    what: str
    at_ns: int
    copy_ns: int = 0
    blocks: tuple[int, ...] = ()
    nbytes: int = 0


class Sent(NamedTuple):
    """A copy in the background: "in", "out" or "across", of a block, and when it was made."""

    what: str
    block: int
    nbytes: int
    began_ns: int
    ended_ns: int


class UnitSpan(NamedTuple):
    """A unit that ran within a turn: a backward's update is one of its own."""

    kind: str
    shard: int
    start_ns: int
    end_ns: int


class BlockFacts(NamedTuple):
    """What is known of a block.

    Args:
        job: whose.
        kind: what it holds.
        nbytes: what the ledger counts.
        shard: whose parameters these are, if one shard's alone.
    """

    job: str
    kind: str
    nbytes: int
    shard: int | None


class AnyBlock(Protocol):
    """A block of memory, as far as a record is concerned."""

    number: int
    nbytes: int

    @property
    def kind(self) -> str:
        """What it holds."""

    @property
    def size(self) -> int:
        """Its bytes."""


class AnyCopy(Protocol):
    """A copy in the background; 0 until it has begun, and until it is over."""

    began_ns: int
    ended_ns: int


@dataclass(slots=True)
class Turn:
    """What a worker does for one command of the scheduler.

    Args:
        job: whose unit.
        device: where.
        facts: of all blocks that any turn has met, by number; shared.
        actions: what was done, in order.
        units: what ran.
        sent: copies that were begun in the background, once they are over.
    """

    job: str
    device: str
    facts: dict[int, BlockFacts] = field(repr=False)
    actions: list[Action] = field(default_factory=list)
    units: list[UnitSpan] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    _under_way: list[tuple[str, int, int, AnyCopy]] = field(default_factory=list, repr=False, compare=False)

    def note(self, what: str, blocks: Iterable[AnyBlock] = (), nbytes: int = 0, *, since_ns: int = 0) -> None:
        """Note an action that is done now.

        Args:
            what: as `Action.what`.
            blocks: which.
            nbytes: bytes.
            since_ns: when a copy began; 0: nothing was copied.
        """
        now = time.perf_counter_ns()
        numbers = []
        for block in blocks:
            numbers.append(block.number)
            if what in _MEETS and block.number not in self.facts:
                shard = getattr(block, "shard", None)  # groups have one
                self.facts[block.number] = BlockFacts(self.job, str(block.kind), block.nbytes, shard)
        self.actions.append(Action(what, now, now - since_ns if since_ns else 0, tuple(numbers), nbytes))

    @property
    def copies(self) -> list[Sent]:
        """The copies that the turn has waited for from beginning to end."""
        return [
            Sent(a.what, a.blocks[0], a.nbytes, a.at_ns - a.copy_ns, a.at_ns)
            for a in self.actions
            if a.what in ("in", "out", "across") and a.copy_ns
        ]

    def follow(self, what: str, block: AnyBlock, copy: AnyCopy) -> None:
        """A copy is made in the background from now on."""
        self._under_way.append((what, block.number, block.size, copy))

    def settle(self) -> None:
        """Take down the copies in the background that are over."""
        left = []
        for what, number, size, copy in self._under_way:
            if copy.ended_ns:
                self.sent.append(Sent(what, number, size, copy.began_ns, copy.ended_ns))
            else:
                left.append((what, number, size, copy))
        self._under_way = left

    @contextmanager
    def unit(self, kind: str, shard: int) -> Iterator[None]:
        """Around a unit."""
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self.units.append(UnitSpan(kind, shard, start, time.perf_counter_ns()))


class _Thread(threading.local):
    turn: Turn | None = None


_THREAD = _Thread()


def current_turn() -> Turn | None:
    """The turn that this thread is in, if a run is recorded."""
    return _THREAD.turn


def note(what: str, blocks: Iterable[AnyBlock] = (), nbytes: int = 0, *, since_ns: int = 0) -> None:
    """Note an action on this thread's turn, if there is one; arguments as of `Turn.note`."""
    turn = _THREAD.turn
    if turn is not None:
        turn.note(what, blocks, nbytes, since_ns=since_ns)


@contextmanager
def in_turn(turn: Turn | None) -> Iterator[None]:
    """What this thread does meanwhile is noted on a turn; on none, not at all."""
    before, _THREAD.turn = _THREAD.turn, turn
    try:
        yield
    finally:
        _THREAD.turn = before
