"""Algorithm G: how many bytes are on the device, instruction by instruction.

Differs: the paper adds up five sums over tensors, of which `static_mem` and, in line 3, what is swapped or recomputed
are counted twice; here every storage is counted once, from the instruction that makes it to the one that frees it. A
swapped storage is freed where its copy has ended (`lowering.py`), not where it begins.
"""

from dataclasses import dataclass

from hydra_tune.fusion.planner.lowering import Instruction, Kind, lowered, start_bytes
from hydra_tune.fusion.planner.schedule import Schedule, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a segment needs.

    Attributes:
        peak_bytes: the most that is there at once.
        peak_backward: rank that the backward has come to there.
        peak_forward: rank that the forward has come to.
        by_rank: the most that is there before and while each backward operator runs; the last of them, after all.
        curve: bytes during each instruction.
    """

    peak_bytes: int
    peak_backward: int
    peak_forward: int
    by_rank: tuple[int, ...]
    curve: tuple[int, ...]


def simulated(schedule: Schedule, segment: Segment) -> Memory:
    """The memory of a segment.

    Args:
        schedule: what has been decided.
        segment: of it.
    """
    return followed(lowered(schedule, segment), start_bytes(schedule, segment))


def followed(instructions: list[Instruction], start: int) -> Memory:
    """The memory of a list of instructions.

    Args:
        instructions: in order.
        start: bytes that are there before.
    """
    live = peak = most = start
    backward = forward = 0
    at = (0, 0)
    by_rank: list[int] = []
    curve: list[int] = []
    for one in instructions:
        kind, is_backward = one.kind, one.is_backward
        live += one.made_bytes
        now = live + one.workspace_bytes
        if not is_backward:
            forward = one.rank
        elif kind is not Kind.RERUN:
            backward = one.rank
        curve.append(now)
        if now > most:
            most = now
            if now > peak:
                peak, at = now, (backward, forward)
        live -= one.freed_bytes
        if kind is Kind.RUN:
            if is_backward:
                backward = one.rank + 1
                by_rank.append(most)
                most = live
            else:
                forward = one.rank + 1
    by_rank.append(most)
    return Memory(peak_bytes=peak, peak_backward=at[0], peak_forward=at[1], by_rank=tuple(by_rank), curve=tuple(curve))


def peak_of(schedule: Schedule) -> tuple[Segment, Memory]:
    """The segment of a schedule that needs the most memory."""
    each = [(segment, simulated(schedule, segment)) for segment in schedule.segments]
    return max(each, key=lambda found: found[1].peak_bytes)
