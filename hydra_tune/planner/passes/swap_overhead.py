"""Algorithm C: the delay that a swap would cause, and the place where the copy back would begin.

In each round with a candidate to swap, `swap_recompute.py` asks for a proposal for the candidate that lies idle longest; at
the end, `polish` there asks once more for swaps that delay the step. A pass must not run a step or read a clock. The swap
is added to a copy of the schedule. Forward operators of the other sub-array are multiplexed before the feature map's first
use in the backward, as long as the operators hide more of the copy and memory allows. The copy then begins as many backward
operators earlier as are needed to hide the rest and as leave room for the map.

Differs from the algorithm as printed:
* The result is a proposal, and `swap_recompute.py` takes or leaves the proposal. An unsafe forward operator is taken
  out again, and so are all of them if the map is recomputed instead.
* Multiplexing ends with the forward graph.
* An operator is safe if the segment's peak falls or is within the limit, and no place rises above the limit that was
  below. As long as maps are undecided the peak exceeds the limit anyway, so a stricter rule would reject every
  operator.
* Forward operators of earlier swaps stay with those swaps (`adjust_graph`). Later slots take the operators behind, and
  where none are left the addition is unsafe.
* The simulated memory shows whether the peak interval is reached, in place of a flag (line 7 of Algorithm B forgets to
  pass the flag).
* There is no `last_prompt` (lines 8 and 33 to 37). Candidates do not come in the order of their uses, so the last
  swap's prompt need not be the first. Any swap under way at the access is a conflict. The rest of such a swap (line 13)
  is its copy without the backward operators and recomputations that have run beside the copy.
* The time that a swap takes of the computing thread is added, and small maps that the computing thread copies itself
  hide nothing.
* Recomputations from this map at the access (line 4) wait for the map's copy, and hide none of the copy.
* The link may be busy with several other swaps: an operator hides this copy only where no other swap is under way.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from hydra_tune.planner.cost.peak_memory import SegmentMemory, simulated
from hydra_tune.planner.ir.plan_state import FeatureMapCandidate, ScheduleSegment, SubArraySchedule
from hydra_tune.planner.ir.step_profile import OperatorProfile

_EPSILON = 1e-12


class SwapCase(StrEnum):
    """Cases of the paper (§4.2.2)."""

    NO_OVERLAP = "1a"
    NO_OVERLAP_CONFLICT = "1b"
    FORWARD_ONLY = "2a"
    MIXED = "2b"
    PARTIAL = "3"


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapProposal:
    """A swap that the policy may take.

    Attributes:
        seconds: delay of the step (`s_overhead`).
        prompt: rank of the backward operator before which the copy back begins (`prefetch_prompt`).
    """

    seconds: float
    prompt: int
    slots: dict[int, float]
    case: SwapCase


def swap_overhead(
    schedule: SubArraySchedule,
    candidate: FeatureMapCandidate,
    *,
    is_interleaved: bool = True,
    before: SegmentMemory | None = None,
) -> SwapProposal:
    """Return the proposal to swap a candidate, with its cost.

    `before` is the memory of the segment with the candidate's backward, without the swap, if known.
    """
    return _SwapOverheadSearch(schedule, candidate, before).proposal(is_interleaved=is_interleaved)


class _SwapOverheadSearch:
    def __init__(
        self, schedule: SubArraySchedule, candidate: FeatureMapCandidate, before: SegmentMemory | None
    ) -> None:
        self._candidate = candidate
        self._trial = schedule.copy()
        self._decided = self._trial.decisions[candidate.side]
        self._segment: ScheduleSegment = schedule.segment_of(candidate.side)
        self._array = schedule.arrays[candidate.side]
        self._access = self._decided.first_need(candidate.map)
        other_swaps = (
            (min(prompt, self._decided.first_need(self._array.maps[name])), name)
            for name, prompt in self._decided.swaps.items()
            if name != candidate.name
        )
        # Copies back that other swaps have under way: first rank, rank of the need, and map. A source of recomputations
        # is needed sooner, so its prompt may lie behind the need, and moves there.
        self._flights = [
            (prompt, self._decided.first_need(self._array.maps[name]), name) for prompt, name in other_swaps
        ]
        self._known = before
        self._schedule = schedule
        # Begin with the latest prompt, the access: the search then looks for something better.
        self._decided.swaps[candidate.name] = self._access
        self._now = simulated(self._trial, self._segment)

    def proposal(self, *, is_interleaved: bool) -> SwapProposal:
        if self._candidate.name in self._array.at_once:
            # The computing thread makes both copies itself, so nothing runs beside them.
            copy_seconds = self._candidate.map.out_seconds + self._candidate.map.in_seconds
            return SwapProposal(
                seconds=copy_seconds, prompt=self._access, slots=self._decided.slots, case=SwapCase.NO_OVERLAP
            )
        proposal = self._beside(is_interleaved=is_interleaved)
        # A swap hands over two copies: to the host and back.
        return replace(proposal, seconds=proposal.seconds + 2 * self._array.hand_seconds)

    def _beside(self, *, is_interleaved: bool) -> SwapProposal:
        # Line 4: recomputations before the access hide part of the copy, except for those that wait for this map.
        seconds_left = self._candidate.map.in_seconds - self._decided.recompute_seconds(
            self._access, self._candidate.name
        )
        seconds_to_hide = seconds_left
        if self._now.by_rank[self._access] > self._trial.limit_bytes:
            return self._without_overlap(seconds_left)
        if is_interleaved:
            seconds_left = self._add_forward(seconds_left)
        case = SwapCase.FORWARD_ONLY
        prompt = self._access
        if seconds_left > _EPSILON:
            seconds_left, prompt = self._walk_back(seconds_left)
            case = SwapCase.MIXED if seconds_left <= _EPSILON else SwapCase.PARTIAL
            if seconds_left == seconds_to_hide:
                return self._without_overlap(seconds_left)
        return SwapProposal(seconds=max(seconds_left, 0.0), prompt=prompt, slots=self._decided.slots, case=case)

    @property
    def _before(self) -> SegmentMemory:
        if self._known is None:
            self._known = simulated(self._schedule, self._segment)
        return self._known

    def _without_overlap(self, rest: float) -> SwapProposal:
        """Case 1: the copy begins when the map is needed, or when another copy under way has ended."""
        in_flight = sum(self._remaining(prompt, need, name) for prompt, need, name in self._flights)
        case = SwapCase.NO_OVERLAP_CONFLICT if in_flight > _EPSILON else SwapCase.NO_OVERLAP
        return SwapProposal(
            seconds=max(rest, 0.0) + in_flight, prompt=self._access, slots=self._decided.slots, case=case
        )

    def _remaining(self, prompt: int, need: int, name: str) -> float:
        """Seconds that another swap's copy still needs at this map's first use; 0 if that swap is not under way."""
        if not prompt <= self._access < need:
            return 0.0
        ranks = range(prompt, self._access)
        hidden_seconds = sum(
            self._array.backward[rank].seconds + self._decided.recompute_seconds(rank) for rank in ranks
        )
        return max(0.0, self._array.maps[name].in_seconds - hidden_seconds)

    def _add_forward(self, rest: float) -> float:
        """Cases 2 and 3: multiplex forward operators before the access, one by one; return the seconds left to hide."""
        if self._segment.forward is None:
            return rest
        ops = self._trial.arrays[self._segment.forward].forward
        while rest > _EPSILON:
            num_before = self._trial.forward_before(self._segment)
            assert num_before is not None, "slots that were found before"
            end, added = num_before[self._access], 0.0
            # Operators without duration hide nothing. They come along with the next operator that has some.
            while end < len(ops) and added <= _EPSILON:
                added += ops[end].seconds
                end += 1
            if added <= _EPSILON:
                return rest
            slots = dict(self._decided.slots)
            self._decided.slots[self._access] = self._covered(num_before, ops) + added
            if not self._is_safe():
                self._decided.slots = slots
                return rest
            rest -= added
        return rest

    def _covered(self, before: list[int], ops: tuple[OperatorProfile, ...]) -> float:
        begin = before[self._access - 1] if self._access else 0
        return sum(op.seconds for op in ops[begin : before[self._access]])

    def _is_safe(self) -> bool:
        if self._trial.forward_before(self._segment) is None:
            return False
        limit, memory = self._trial.limit_bytes, simulated(self._trial, self._segment)
        if memory.peak_bytes > limit and memory.peak_bytes >= self._before.peak_bytes:
            return False
        pairs = zip(memory.by_rank, self._before.by_rank, strict=True)
        return all(num_bytes <= max(limit, bytes_before) for num_bytes, bytes_before in pairs)

    def _walk_back(self, rest: float) -> tuple[float, int]:
        """Begin the copy earlier, as far as there is room for the map; return the seconds left and the prompt."""
        prompt = self._access
        while rest > _EPSILON and prompt > 0 and self._has_room(self._now, prompt - 1):
            prompt -= 1
            # While another swap occupies the link, this operator hides that swap's copy, not this one.
            if not any(begin <= prompt < need for begin, need, _ in self._flights):
                rest -= self._array.backward[prompt].seconds + self._decided.recompute_seconds(prompt)
        return rest, prompt

    def _has_room(self, memory: SegmentMemory, rank: int) -> bool:
        return memory.by_rank[rank] + self._candidate.map.num_bytes <= self._trial.limit_bytes
