"""Algorithm G: the bytes on the device, instruction by instruction.

`planner/passes/swap_recompute.py` simulates all segments here in each round, and the other passes simulate their
changes. `planner/search/portfolio.py` takes the peak of each finished plan, `planner/search/figures.py` reports
`curve`, and `PlannedStep` (`fusion/runtime/step_planner.py`) simulates the ends as well.

Differs: the paper adds up five sums over tensors, and counts `static_mem` and, in line 3, swapped and recomputed
tensors twice. Here every storage is counted once, from the instruction that makes the storage to the instruction that
frees the storage. A swapped storage is freed where its copy has ended (`planner/ir/lowering.py`), not where the copy
begins. The module must not change a schedule.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from hydra_tune.planner.ir.instructions import Instruction, InstructionKind, InstructionSlice
from hydra_tune.planner.ir.lowering import lowered, start_bytes, stretched
from hydra_tune.planner.ir.plan_state import ScheduleSegment, SubArraySchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentMemory:
    """Memory that a segment needs.

    Attributes:
        peak_backward: rank that the backward has reached at the peak.
        peak_forward: rank that the forward has reached at the peak.
        by_rank: most bytes from the end of the previous backward operator to the end of each; the last entry is for the
            time after all of them.
    """

    peak_bytes: int
    peak_backward: int
    peak_forward: int
    by_rank: tuple[int, ...]


def simulated(schedule: SubArraySchedule, segment: ScheduleSegment) -> SegmentMemory:
    """Return the memory that a segment needs."""
    return followed(stretched(schedule, segment), start_bytes(schedule, segment))


def followed(pieces: Iterable[Instruction | InstructionSlice], start: int) -> SegmentMemory:
    """Return the memory that a list of instructions needs, beginning with `start` bytes on the device."""
    state = _SegmentMemorySimulator(start)
    for piece in pieces:
        if isinstance(piece, InstructionSlice):
            state.runs(piece)
        else:
            state.does(piece)
    return state.memory()


def curve(schedule: SubArraySchedule, segment: ScheduleSegment) -> tuple[int, ...]:
    """Return the bytes on the device during each instruction of a segment."""
    live, live_bytes = start_bytes(schedule, segment), []
    for instruction in lowered(schedule, segment):
        live += instruction.made_bytes
        live_bytes.append(live + instruction.workspace_bytes)
        live -= instruction.freed_bytes
    return tuple(live_bytes)


class _SegmentMemorySimulator:
    def __init__(self, start: int) -> None:
        self._live = self._peak = self._most = start  # `_most`: since the last backward operator
        self._backward = self._forward = 0
        self._at = (0, 0)
        self._by_rank: list[int] = []

    def does(self, one: Instruction) -> None:
        # Made bytes are there from the beginning of the instruction, and freed bytes up to its end.
        self._live += one.made_bytes
        if not one.is_backward:
            self._forward = one.rank
        # A recomputation counts as backward, but its rank is of the forward.
        elif one.kind is not InstructionKind.RERUN:
            self._backward = one.rank
        self._reaches(self._live + one.workspace_bytes, self._backward, self._forward)
        self._live -= one.freed_bytes
        if one.kind is InstructionKind.RUN and one.is_backward:
            self._backward = one.rank + 1
            self._by_rank.append(self._most)
            self._most = self._live
        elif one.kind is InstructionKind.RUN:
            self._forward = one.rank + 1

    def runs(self, one: InstructionSlice) -> None:
        line, begin, end = one
        beyond = self._live - line.before[begin]
        top = line.top(begin, end)
        # A recomputation belongs to the backward operator that follows: it adds to `_most` and moves no rank.
        if line.is_again:
            self._reaches(line.during[top] + beyond, self._backward, self._forward)
        elif line.is_backward:
            # `_most` covers the instructions since the last backward operator, so it counts for the first of the
            # slice.
            self._by_rank.append(max(self._most, line.during[begin] + beyond))
            self._by_rank += [num_bytes + beyond for num_bytes in line.during[begin + 1 : end]]
            self._reaches(line.during[top] + beyond, top, self._forward)
            self._backward = end
        else:
            self._reaches(line.during[top] + beyond, self._backward, top)
            self._forward = end
        self._live = line.before[end] + beyond
        if line.is_backward:
            self._most = self._live

    def memory(self) -> SegmentMemory:
        backward, forward = self._at
        by_rank = (*self._by_rank, self._most)
        return SegmentMemory(peak_bytes=self._peak, peak_backward=backward, peak_forward=forward, by_rank=by_rank)

    def _reaches(self, num_bytes: int, backward: int, forward: int) -> None:
        if num_bytes > self._most:
            self._most = num_bytes
            # Strictly above, so the first place of the peak counts, as in `InstructionSequence.top`.
            if num_bytes > self._peak:
                self._peak, self._at = num_bytes, (backward, forward)


def peak_of(schedule: SubArraySchedule) -> tuple[ScheduleSegment, SegmentMemory]:
    """Return the segment that needs the most memory among those that repeat, with its memory."""
    memories = [(segment, simulated(schedule, segment)) for segment in schedule.segments]
    return max(memories, key=lambda entry: entry[1].peak_bytes)
