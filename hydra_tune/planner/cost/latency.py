"""Duration of a segment: operators run one after the other, and copies beside them on one or two links.

The computing thread hands copies over, and makes small copies itself. Both delay operators as much as waiting does, so
both count as stalls.

Algorithm C estimates swap overheads to make decisions. The duration of a finished schedule is simulated here, copy by
copy.
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

    @property
    def overlapped(self) -> float:
        """Share of the copies' time that is hidden; 1 without copies."""
        return 1.0 if not self.copies else max(0.0, 1.0 - self.stall / self.copies)

    def __add__(self, other: "StepTimeBreakdown") -> "StepTimeBreakdown":
        return StepTimeBreakdown(
            compute=self.compute + other.compute,
            recompute=self.recompute + other.recompute,
            stall=self.stall + other.stall,
            copies=self.copies + other.copies,
        )


def timed(pieces: Iterable[Instruction | InstructionSlice], *, is_duplex: bool) -> StepTimeBreakdown:
    """Return the times of a list of instructions.

    Args:
        pieces: in order.
        is_duplex: whether copies to the host and copies back go side by side.
    """
    # In ticks: sums of integers do not depend on how operators are grouped into stretches.
    now = compute = recompute = stall = copies = 0
    free = {InstructionKind.OFFLOAD: 0, InstructionKind.PREFETCH: 0}
    ends: dict[tuple[bool, int, str], int] = {}
    for one in pieces:
        if isinstance(one, InstructionSlice):
            took = one.line.clock[one.end] - one.line.clock[one.begin]
            now += took
            compute, recompute = (compute, recompute + took) if one.line.is_again else (compute + took, recompute)
        elif one.kind in (InstructionKind.RUN, InstructionKind.RERUN):
            took = ticks(one.seconds)
            now += took
            if one.kind is InstructionKind.RUN:
                compute += took
            else:
                recompute += took
        elif one.kind in (InstructionKind.OFFLOAD, InstructionKind.PREFETCH):
            took, handing = ticks(one.seconds), ticks(one.hand_seconds)
            now += handing
            stall += handing
            copies += took
            end = now
            # A copy that the computing thread has made itself has ended already, and uses no link.
            if not one.is_at_once:
                # Without duplex, copies of both directions queue on a single link.
                link = one.kind if is_duplex else InstructionKind.OFFLOAD
                free[link] = end = max(free[link], now) + took
            ends[one.kind is InstructionKind.PREFETCH, one.side, one.storage] = end
        elif one.kind in (InstructionKind.RELEASE, InstructionKind.ARRIVE):
            wait = max(0, ends[one.kind is InstructionKind.ARRIVE, one.side, one.storage] - now)
            now += wait
            stall += wait
    return StepTimeBreakdown(
        compute=compute / TICKS, recompute=recompute / TICKS, stall=stall / TICKS, copies=copies / TICKS
    )


def times_of(schedule: SubArraySchedule, *, is_duplex: bool) -> StepTimeBreakdown:
    """Return the times of a step of all sub-arrays of a schedule."""
    found = StepTimeBreakdown()
    for segment in schedule.segments:
        found += timed(stretched(schedule, segment), is_duplex=is_duplex)
    return found
