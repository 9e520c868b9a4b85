"""Algorithm G: how many bytes are on the device, instruction by instruction.

Differs: the paper adds up five sums over tensors, of which `static_mem` and, in line 3, what is swapped or recomputed
are counted twice; here every storage is counted once, from the instruction that makes it to the one that frees it. A
swapped storage is freed where its copy has ended (`lowering.py`), not where it begins.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from hydra_tune.fusion.planner.instructions import Instruction, Kind, Stretch
from hydra_tune.fusion.planner.lowering import lowered, start_bytes, stretched
from hydra_tune.fusion.planner.schedule import Schedule, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a segment needs.

    Attributes:
        peak_bytes: the most that is there at once.
        peak_backward: rank that the backward has come to there.
        peak_forward: rank that the forward has come to.
        by_rank: the most that is there before and while each backward operator runs; the last of them, after all.
    """

    peak_bytes: int
    peak_backward: int
    peak_forward: int
    by_rank: tuple[int, ...]


def simulated(schedule: Schedule, segment: Segment) -> Memory:
    """The memory of a segment.

    Args:
        schedule: what has been decided.
        segment: of it.
    """
    return followed(stretched(schedule, segment), start_bytes(schedule, segment))


def followed(pieces: Iterable[Instruction | Stretch], start: int) -> Memory:
    """The memory of a list of instructions.

    Args:
        pieces: in order.
        start: bytes that are there before.
    """
    state = _Followed(start)
    for one in pieces:
        if isinstance(one, Stretch):
            state.runs(one)
        else:
            state.does(one)
    return state.memory()


def curve(schedule: Schedule, segment: Segment) -> tuple[int, ...]:
    """Bytes during each instruction of a segment.

    Args:
        schedule: what has been decided.
        segment: of it.
    """
    live, found = start_bytes(schedule, segment), []
    for one in lowered(schedule, segment):
        live += one.made_bytes
        found.append(live + one.workspace_bytes)
        live -= one.freed_bytes
    return tuple(found)


class _Followed:
    def __init__(self, start: int) -> None:
        self._live = self._peak = self._most = start  # the most since the last backward operator
        self._backward = self._forward = 0
        self._at = (0, 0)
        self._by_rank: list[int] = []

    def does(self, one: Instruction) -> None:
        """An instruction by itself."""
        self._live += one.made_bytes
        if not one.is_backward:
            self._forward = one.rank
        elif one.kind is not Kind.RERUN:
            self._backward = one.rank
        self._reaches(self._live + one.workspace_bytes, self._backward, self._forward)
        self._live -= one.freed_bytes
        if one.kind is Kind.RUN and one.is_backward:
            self._backward = one.rank + 1
            self._by_rank.append(self._most)
            self._most = self._live
        elif one.kind is Kind.RUN:
            self._forward = one.rank + 1

    def runs(self, one: Stretch) -> None:
        """Operators that follow one another."""
        line, begin, end = one
        beyond = self._live - line.before[begin]
        top = line.top(begin, end)
        if line.is_again:
            self._reaches(line.during[top] + beyond, self._backward, self._forward)
        elif line.is_backward:
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

    def memory(self) -> Memory:
        """What has been found."""
        backward, forward = self._at
        by_rank = (*self._by_rank, self._most)
        return Memory(peak_bytes=self._peak, peak_backward=backward, peak_forward=forward, by_rank=by_rank)

    def _reaches(self, num_bytes: int, backward: int, forward: int) -> None:
        if num_bytes > self._most:
            self._most = num_bytes
            if num_bytes > self._peak:
                self._peak, self._at = num_bytes, (backward, forward)


def peak_of(schedule: Schedule) -> tuple[Segment, Memory]:
    """The segment of a schedule that needs the most memory."""
    each = [(segment, simulated(schedule, segment)) for segment in schedule.segments]
    return max(each, key=lambda found: found[1].peak_bytes)
