"""Duration of a segment: operators run one after the other, and copies beside them on one or two links.

The computing thread hands copies over, and makes small copies itself. Both delay operators as much as waiting does, so
both count as stalls.

Algorithm C estimates swap overheads to make decisions. The duration of a finished schedule is simulated here, copy by
copy. `planner/search/portfolio.py` times each finished plan with `times_of`, `planner/passes/swap_recompute.py`
times each change that would polish a plan, and `planner/search/figures.py` reports a breakdown. Times are sums of whole
picoseconds, so slices and single operators give equal sums. The module must not know its callers: a schedule comes in.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from hydra_tune.planner.ir.instructions import TICKS, Instruction, InstructionKind, InstructionSlice, ticks
from hydra_tune.planner.ir.lowering import stretched
from hydra_tune.planner.ir.plan_state import SubArraySchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeBreakdown:
    """Breakdown of the time of a step (the paper's Figure 9).

    Attributes:
        compute: seconds of the operators that any schedule runs.
        recompute: seconds of the operators that run again.
        stall: seconds of the computing thread that go into waiting for copies, handing copies over, or making small
            copies.
        copies: seconds of all copies.
    """

    compute: float = 0.0
    recompute: float = 0.0
    stall: float = 0.0
    copies: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds in all."""
        return self.compute + self.recompute + self.stall

    def __add__(self, other: "StepTimeBreakdown") -> "StepTimeBreakdown":
        return StepTimeBreakdown(
            compute=self.compute + other.compute,
            recompute=self.recompute + other.recompute,
            stall=self.stall + other.stall,
            copies=self.copies + other.copies,
        )


def timed(pieces: Iterable[Instruction | InstructionSlice], *, is_duplex: bool) -> StepTimeBreakdown:
    """Return the times of a list of instructions."""
    # In ticks: sums of integers do not depend on how operators are grouped into slices.
    now = compute = recompute = stall = copies = 0
    free = {InstructionKind.OFFLOAD: 0, InstructionKind.PREFETCH: 0}
    ends: dict[tuple[bool, int, str], int] = {}
    for piece in pieces:
        if isinstance(piece, InstructionSlice):
            took = piece.line.clock[piece.end] - piece.line.clock[piece.begin]
            now += took
            compute, recompute = (compute, recompute + took) if piece.line.is_again else (compute + took, recompute)
        elif piece.kind in (InstructionKind.RUN, InstructionKind.RERUN):
            took = ticks(piece.seconds)
            now += took
            if piece.kind is InstructionKind.RUN:
                compute += took
            else:
                recompute += took
        elif piece.kind in (InstructionKind.OFFLOAD, InstructionKind.PREFETCH):
            took, handing = ticks(piece.seconds), ticks(piece.hand_seconds)
            now += handing
            stall += handing
            copies += took
            end = now
            # A copy that the computing thread has made itself has ended already, and uses no link.
            if not piece.is_at_once:
                # Without duplex, copies of both directions queue on a single link.
                link = piece.kind if is_duplex else InstructionKind.OFFLOAD
                free[link] = end = max(free[link], now) + took
            ends[piece.kind is InstructionKind.PREFETCH, piece.side, piece.storage] = end
        elif piece.kind in (InstructionKind.RELEASE, InstructionKind.ARRIVE):
            # Both wait for the end of a copy; deletions take no time.
            wait = max(0, ends[piece.kind is InstructionKind.ARRIVE, piece.side, piece.storage] - now)
            now += wait
            stall += wait
    return StepTimeBreakdown(
        compute=compute / TICKS, recompute=recompute / TICKS, stall=stall / TICKS, copies=copies / TICKS
    )


def times_of(schedule: SubArraySchedule, *, is_duplex: bool) -> StepTimeBreakdown:
    """Return the times of a step of all sub-arrays of a schedule."""
    segment_times = (timed(stretched(schedule, segment), is_duplex=is_duplex) for segment in schedule.segments)
    return sum(segment_times, StepTimeBreakdown())
