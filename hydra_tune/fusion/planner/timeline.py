"""How long a segment takes: operators one after the other, copies beside them on one link or on one in each direction.

What hands copies over, and makes the small ones itself, is the thread that computes: that is in its way as waiting is.

The swap overheads that Algorithm C estimates decide what is done; what a finished schedule takes is simulated here,
copy by copy.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from hydra_tune.fusion.planner.instructions import TICKS, Instruction, Kind, Stretch, ticks
from hydra_tune.fusion.planner.lowering import stretched
from hydra_tune.fusion.planner.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Where the time goes (the paper's Figure 9).

    Attributes:
        compute: seconds of the operators that any schedule runs.
        recompute: of those that are run again.
        stall: that are waited for copies, or spent on handing them over or making them at once.
        copies: of all copies.
    """

    compute: float = 0.0
    recompute: float = 0.0
    stall: float = 0.0
    copies: float = 0.0

    @property
    def seconds(self) -> float:
        """All in all."""
        return self.compute + self.recompute + self.stall

    @property
    def overlapped(self) -> float:
        """Share of the copies' time that is hidden; 1 without copies."""
        return 1.0 if not self.copies else max(0.0, 1.0 - self.stall / self.copies)

    def __add__(self, other: "Times") -> "Times":
        return Times(
            compute=self.compute + other.compute,
            recompute=self.recompute + other.recompute,
            stall=self.stall + other.stall,
            copies=self.copies + other.copies,
        )


def timed(pieces: Iterable[Instruction | Stretch], *, is_duplex: bool) -> Times:
    """The times of a list of instructions.

    Args:
        pieces: in order.
        is_duplex: whether copies to the host and back go side by side.
    """
    now = compute = recompute = stall = copies = 0
    free = {Kind.OFFLOAD: 0, Kind.PREFETCH: 0}
    ends: dict[tuple[bool, int, str], int] = {}
    for one in pieces:
        if isinstance(one, Stretch):
            took = one.line.clock[one.end] - one.line.clock[one.begin]
            now += took
            compute, recompute = (compute, recompute + took) if one.line.is_again else (compute + took, recompute)
        elif one.kind in (Kind.RUN, Kind.RERUN):
            took = ticks(one.seconds)
            now += took
            if one.kind is Kind.RUN:
                compute += took
            else:
                recompute += took
        elif one.kind in (Kind.OFFLOAD, Kind.PREFETCH):
            took, handing = ticks(one.seconds), ticks(one.hand_seconds)
            now += handing
            stall += handing
            copies += took
            end = now
            if not one.is_at_once:
                link = one.kind if is_duplex else Kind.OFFLOAD
                free[link] = end = max(free[link], now) + took
            ends[one.kind is Kind.PREFETCH, one.side, one.storage] = end
        elif one.kind in (Kind.RELEASE, Kind.ARRIVE):
            wait = max(0, ends[one.kind is Kind.ARRIVE, one.side, one.storage] - now)
            now += wait
            stall += wait
    return Times(compute=compute / TICKS, recompute=recompute / TICKS, stall=stall / TICKS, copies=copies / TICKS)


def times_of(schedule: Schedule, *, is_duplex: bool) -> Times:
    """The times of a step of all sub-arrays of a schedule."""
    found = Times()
    for segment in schedule.segments:
        found += timed(stretched(schedule, segment), is_duplex=is_duplex)
    return found
