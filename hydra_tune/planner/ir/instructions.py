"""Instructions of a segment (runs, copies, recomputations, deletions), and prefix sums over consecutive operators.

`lowering.py` lists the instructions of a segment whenever `planner/cost` simulates the segment, `verify.py` checks the
segment, `planner/search/figures.py` reports the memory of a step over time, or `planner/passes/graph_rewrite.py` writes the
merged graph. Instructions and sequences never change once made, so threads may share them (note on reuse in `lowering.py`). The
module must not know devices, clocks or how a plan is found.

Note: speed. Planning simulates each segment many times, and between the few operators with a decision, operators just
follow each other. `InstructionSequence` adds up the time and memory of a sub-array's operators once, and a simulation
looks up a whole slice of them. A sequence counts time in whole picoseconds, so that a sum does not depend on where a
slice is cut.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple

TICKS = 10**12
"""Ticks per second."""


def ticks(seconds: float) -> int:
    """Convert seconds to picoseconds, rounded."""
    return round(seconds * TICKS)


class InstructionKind(StrEnum):
    """Action of an instruction."""

    RUN = "run"
    RERUN = "recompute"
    OFFLOAD = "offload"
    RELEASE = "release"
    PREFETCH = "prefetch"
    ARRIVE = "arrive"
    DELETE = "delete"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """An action of a segment.

    Attributes:
        is_backward: whether the instruction belongs to the sub-array's backward, as recomputations and copies back do.
        rank: of the operator, in the forward for a recomputation; of the next operator, where the instruction is none.
        storage: moved, deleted or recomputed.
        seconds: of the operator or the copy.
        hand_seconds: time of the computing thread that a copy takes.
        is_at_once: whether the computing thread makes the copy itself.
        makes: storages that are on the device from the beginning of the instruction.
        frees: storages that leave the device with the end of the instruction.
        workspace_bytes: memory that the operator needs while running.
    """

    kind: InstructionKind
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


class InstructionSequence:
    """Consecutive operators with prefix sums: a sub-array's forward or backward, or the recomputation of a map.

    Args:
        instructions: for each operator, all of the same kind.

    Attributes:
        is_again: whether the operators recompute.
        is_backward: whether the operators are of the backward, and do not recompute.
        before: bytes before each operator, and behind the last, relative to the beginning.
        during: bytes while each operator runs, relative to the beginning.
        clock: ticks until each operator begins, and until the last ends.
    """

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self.instructions = tuple(instructions)
        self.is_again = any(op.kind is InstructionKind.RERUN for op in instructions)
        self.is_backward = not self.is_again and any(op.is_backward for op in instructions)
        self.before = list(accumulate((op.made_bytes - op.freed_bytes for op in instructions), initial=0))
        needs = (op.made_bytes + op.workspace_bytes for op in instructions)
        self.during = [before + need for before, need in zip(self.before, needs, strict=False)]
        self.clock = list(accumulate((ticks(op.seconds) for op in instructions), initial=0))
        self._tops = [list(range(len(self.during)))]  # see `top`
        while len(shorter := self._tops[-1]) > (half := 1 << len(self._tops) - 1):
            self._tops.append([self._higher(left, right) for left, right in zip(shorter, shorter[half:], strict=False)])

    def top(self, begin: int, end: int) -> int:
        """Return the first operator with the most bytes in a slice, which must not be empty."""
        # A sparse table: row `power` has the rank of the maximum of every `2**power` operators, and two such ranges
        # cover the slice. On a tie the first operator wins, as in a simulation operator by operator.
        power = (end - begin).bit_length() - 1
        row = self._tops[power]
        return self._higher(row[begin], row[end - (1 << power)])

    def first_above(self, begin: int, end: int, num_bytes: int) -> int:
        """Return the first operator of a slice that needs more than so many bytes; the slice's end if none does."""
        if self.during[self.top(begin, end)] <= num_bytes:
            return end
        # A prefix's maximum only grows with the prefix, so bisection finds the first operator above the limit.
        while end - begin > 1:
            middle = (begin + end) // 2
            if self.during[self.top(begin, middle)] > num_bytes:
                end = middle
            else:
                begin = middle
        return begin

    def first_after(self, begin: int, end: int, num_ticks: int) -> int:
        """Return the first operator of a slice by whose end so many ticks have passed; the slice's end if none."""
        return bisect_left(self.clock, self.clock[begin] + num_ticks, begin + 1, end + 1) - 1

    def _higher(self, left: int, right: int) -> int:
        return left if self.during[left] >= self.during[right] else right


class InstructionSlice(NamedTuple):
    """Consecutive operators of a sequence, with no other instruction between.

    Attributes:
        begin: rank of the first operator.
        end: rank behind the last operator.
    """

    line: InstructionSequence
    begin: int
    end: int
