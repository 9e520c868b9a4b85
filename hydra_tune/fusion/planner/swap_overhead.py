"""Algorithm C: by how much a swap would delay the step, and where its way back would begin.

The swap is added to a copy of the schedule, and forward operators of the other sub-array are multiplexed before the
feature map's first use in the backward, as long as they hide more of the copy and memory allows; then the copy begins
as many backward operators earlier as are needed and as there is room for it.

Differs from the algorithm as printed:
* A forward operator that proves unsafe is taken out again, and so are all of them if the map is recomputed instead:
  what is found is a proposal, which `policy.py` takes or leaves.
* It ends with the forward graph.
* An operator is safe if the segment's peak falls below what it was, or is within the limit, and no place comes above
  the limit that was not: as long as there are maps to be decided the peak is above it whatever is done with this one.
* Forward operators that earlier swaps count on are not taken from them (`adjust_graph`): later slots take the
  operators behind, and where there are none left the addition is unsafe.
* Whether the peak interval is reached is read off the simulated memory, not off a flag (line 7 of Algorithm B forgets
  to pass it).
* There is no `last_prompt` (lines 8 and 33 to 37): candidates do not come in the order of their uses, so the last
  swap's prompt need not be the first. A conflict is a swap that is on its way at the access, whichever that is; what
  remains of it (line 13) is its copy without the backward operators and recomputations that it has had beside it.
* What a swap takes of the thread that computes is added, and small maps that this thread copies itself hide nothing.
* What is recomputed of this map at the access (line 4) waits for its copy, and hides none of it.
* The link may be busy with several other swaps: an operator hides this copy only where no other swap is on its way.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from hydra_tune.fusion.planner.arrays import Op
from hydra_tune.fusion.planner.memory import Memory, simulated
from hydra_tune.fusion.planner.schedule import Candidate, Schedule, Segment

_EPSILON = 1e-12


class Case(StrEnum):
    """The paper's cases (§4.2.2)."""

    NO_OVERLAP = "1a"
    NO_OVERLAP_CONFLICT = "1b"
    FORWARD_ONLY = "2a"
    MIXED = "2b"
    PARTIAL = "3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A swap as it would be.

    Attributes:
        seconds: that it delays the step (`s_overhead`).
        prompt: rank of the backward operator before which the copy back begins (`prefetch_prompt`).
        slots: as of `Decisions`.
        case: which of the paper's.
    """

    seconds: float
    prompt: int
    slots: dict[int, float]
    case: Case


def swap_overhead(
    schedule: Schedule, candidate: Candidate, *, is_interleaved: bool = True, before: Memory | None = None
) -> Proposal:
    """What swapping a candidate would cost.

    Args:
        schedule: what has been decided before; left as it is.
        candidate: of it.
        is_interleaved: whether forward operators may be multiplexed.
        before: the memory of the segment with the candidate's backward as it is, if that is known.
    """
    return _Search(schedule, candidate, before).proposal(is_interleaved=is_interleaved)


class _Search:
    def __init__(self, schedule: Schedule, candidate: Candidate, before: Memory | None) -> None:
        self._candidate = candidate
        self._trial = schedule.copy()
        self._decided = self._trial.decisions[candidate.side]
        self._segment: Segment = schedule.segment_of(candidate.side)
        self._array = schedule.arrays[candidate.side]
        self._access = self._decided.first_need(candidate.map)
        others = (
            (min(prompt, self._decided.first_need(self._array.maps[name])), name)
            for name, prompt in self._decided.swaps.items()
            if name != candidate.name
        )
        self._flights = [(prompt, self._decided.first_need(self._array.maps[name]), name) for prompt, name in others]
        self._known = before
        self._schedule = schedule
        self._decided.swaps[candidate.name] = self._access
        self._now = simulated(self._trial, self._segment)

    def proposal(self, *, is_interleaved: bool) -> Proposal:
        if self._candidate.name in self._array.at_once:
            both = self._candidate.map.out_seconds + self._candidate.map.in_seconds
            return Proposal(seconds=both, prompt=self._access, slots=self._decided.slots, case=Case.NO_OVERLAP)
        found = self._beside(is_interleaved=is_interleaved)
        return replace(found, seconds=found.seconds + 2 * self._array.hand_seconds)

    def _beside(self, *, is_interleaved: bool) -> Proposal:
        rest = self._candidate.map.in_seconds - self._decided.recompute_seconds(self._access, self._candidate.name)
        whole = rest
        if self._now.by_rank[self._access] > self._trial.limit_bytes:
            return self._without_overlap(rest)
        if is_interleaved:
            rest = self._add_forward(rest)
        case = Case.FORWARD_ONLY
        prompt = self._access
        if rest > _EPSILON:
            rest, prompt = self._walk_back(rest)
            case = Case.MIXED if rest <= _EPSILON else Case.PARTIAL
            if rest == whole:
                return self._without_overlap(rest)
        return Proposal(seconds=max(rest, 0.0), prompt=prompt, slots=self._decided.slots, case=case)

    @property
    def _before(self) -> Memory:
        if self._known is None:
            self._known = simulated(self._schedule, self._segment)
        return self._known

    def _without_overlap(self, rest: float) -> Proposal:
        """Case 1: the copy begins when the map is needed, or when another that is on its way has come."""
        in_flight = sum(self._remaining(prompt, need, name) for prompt, need, name in self._flights)
        case = Case.NO_OVERLAP_CONFLICT if in_flight > _EPSILON else Case.NO_OVERLAP
        return Proposal(seconds=max(rest, 0.0) + in_flight, prompt=self._access, slots=self._decided.slots, case=case)

    def _remaining(self, prompt: int, need: int, name: str) -> float:
        """What is left at this map's first use of a swap that has begun before."""
        if not prompt <= self._access < need:
            return 0.0
        ranks = range(prompt, self._access)
        done = sum(self._array.backward[rank].seconds + self._decided.recompute_seconds(rank) for rank in ranks)
        return max(0.0, self._array.maps[name].in_seconds - done)

    def _add_forward(self, rest: float) -> float:
        """Cases 2 and 3: multiplex forward operators before the access, one by one."""
        if self._segment.forward is None:
            return rest
        ops = self._trial.arrays[self._segment.forward].forward
        while rest > _EPSILON:
            before = self._trial.forward_before(self._segment)
            assert before is not None, "slots that were found before"
            end, added = before[self._access], 0.0
            while end < len(ops) and added <= _EPSILON:
                added += ops[end].seconds
                end += 1
            if added <= _EPSILON:
                return rest
            slots = dict(self._decided.slots)
            self._decided.slots[self._access] = self._covered(before, ops) + added
            if not self._is_safe():
                self._decided.slots = slots
                return rest
            rest -= added
        return rest

    def _covered(self, before: list[int], ops: tuple[Op, ...]) -> float:
        first = before[self._access - 1] if self._access else 0
        return sum(op.seconds for op in ops[first : before[self._access]])

    def _is_safe(self) -> bool:
        if self._trial.forward_before(self._segment) is None:
            return False
        limit, memory = self._trial.limit_bytes, simulated(self._trial, self._segment)
        if memory.peak_bytes > limit and memory.peak_bytes >= self._before.peak_bytes:
            return False
        pairs = zip(memory.by_rank, self._before.by_rank, strict=True)
        return all(now <= max(limit, before) for now, before in pairs)

    def _walk_back(self, rest: float) -> tuple[float, int]:
        """Begin the copy earlier, as long as there is room for the map; what is left then, and where it begins."""
        prompt = self._access
        while rest > _EPSILON and prompt > 0 and self._has_room(self._now, prompt - 1):
            prompt -= 1
            if not any(begin <= prompt < need for begin, need, _ in self._flights):
                rest -= self._array.backward[prompt].seconds + self._decided.recompute_seconds(prompt)
        return rest, prompt

    def _has_room(self, memory: Memory, rank: int) -> bool:
        return memory.by_rank[rank] + self._candidate.map.num_bytes <= self._trial.limit_bytes
