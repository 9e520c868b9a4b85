"""Instructions: what is run, moved, recomputed and freed; and operators that follow one another, added up at once.

Note: speed. A plan takes thousands of simulations of its segments, and between the few places where something is decided
operators only follow one another. What they take and need is added up once for a sub-array (`Line`); a simulation looks it
up for a whole stretch of them. Times are whole picoseconds there, so that sums do not depend on where a stretch is cut.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple

TICKS = 10**12
"""Of a second."""


def ticks(seconds: float) -> int:
    """Picoseconds, rounded."""
    return round(seconds * TICKS)


class Kind(StrEnum):
    """What an instruction does."""

    RUN = "run"
    RERUN = "recompute"
    OFFLOAD = "offload"
    RELEASE = "release"
    PREFETCH = "prefetch"
    ARRIVE = "arrive"
    DELETE = "delete"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One of a segment's.

    Attributes:
        kind: what it does.
        side: for which sub-array.
        is_backward: whether it belongs to that one's backward.
        rank: of the operator; of the next one, where it is none.
        storage: what is moved or deleted; what is recomputed.
        seconds: of the operator or the copy.
        hand_seconds: that a copy takes of the thread that computes.
        is_at_once: whether that thread makes the copy.
        makes: storages that are there from its beginning.
        frees: storages that are not there after its end.
        made_bytes: bytes of `makes`.
        freed_bytes: bytes of `frees`.
        workspace_bytes: what the operator needs while it runs.
    """

    kind: Kind
    side: int
    is_backward: bool
    rank: int
    storage: str = ""
    seconds: float = 0.0
    hand_seconds: float = 0.0
    is_at_once: bool = False
    makes: tuple[str, ...] = ()
    frees: tuple[str, ...] = ()
    made_bytes: int = 0
    freed_bytes: int = 0
    workspace_bytes: int = 0


class Line:
    """The operators of a sub-array's forward or backward in order, or those that recompute a map, with sums.

    Args:
        instructions: one for each operator, all of one kind.

    Attributes:
        instructions: these.
        is_again: whether they recompute.
        is_backward: whether they are of the backward otherwise.
        before: bytes before each operator, and behind the last, beyond those at the beginning.
        during: bytes while each operator runs, likewise.
        clock: ticks until each operator begins, and the last ends.
    """

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self.instructions = tuple(instructions)
        self.is_again = any(one.kind is Kind.RERUN for one in instructions)
        self.is_backward = not self.is_again and any(one.is_backward for one in instructions)
        self.before = list(accumulate((one.made_bytes - one.freed_bytes for one in instructions), initial=0))
        needs = (one.made_bytes + one.workspace_bytes for one in instructions)
        self.during = [before + need for before, need in zip(self.before, needs, strict=False)]
        self.clock = list(accumulate((ticks(one.seconds) for one in instructions), initial=0))
        self._tops = [list(range(len(self.during)))]  # place of the most in so many operators, by powers of two
        while len(shorter := self._tops[-1]) > (half := 1 << len(self._tops) - 1):
            self._tops.append([self._higher(left, right) for left, right in zip(shorter, shorter[half:], strict=False)])

    def top(self, begin: int, end: int) -> int:
        """The first place of the most bytes in a stretch, which is not empty."""
        power = (end - begin).bit_length() - 1
        row = self._tops[power]
        return self._higher(row[begin], row[end - (1 << power)])

    def first_above(self, begin: int, end: int, num_bytes: int) -> int:
        """The first operator of a stretch that needs more than so many bytes; the stretch's end if none does."""
        if self.during[self.top(begin, end)] <= num_bytes:
            return end
        while end - begin > 1:
            middle = (begin + end) // 2
            if self.during[self.top(begin, middle)] > num_bytes:
                end = middle
            else:
                begin = middle
        return begin

    def first_after(self, begin: int, end: int, num_ticks: int) -> int:
        """The first operator of a stretch at whose end so many ticks have gone by since its beginning; its end if none."""
        return bisect_left(self.clock, self.clock[begin] + num_ticks, begin + 1, end + 1) - 1

    def _higher(self, left: int, right: int) -> int:
        return left if self.during[left] >= self.during[right] else right


class Stretch(NamedTuple):
    """Operators that follow one another, with nothing between.

    Attributes:
        line: whose they are.
        begin: the first one's rank.
        end: the rank behind the last.
    """

    line: Line
    begin: int
    end: int
