"""Algorithm B: which feature maps are swapped and which recomputed, until what is on the device is within the limit.

The candidate that lies idle longest would be swapped, the one that saves most bytes per second would be recomputed;
whichever delays the step less is done.

Differs from the algorithm as printed:
* Line 17: in the recomputing branch it is the recomputed candidate that is taken out.
* Candidates of both sub-arrays of a pair are decided on together, for what is decided for one shows in both segments.
* Candidates are those that lie idle at the peak: no other one brings it down.
* A recomputed source that the update would have overwritten, or that is random, makes a candidate one for swapping
  alone.
* Where nothing is left that would bring the peak down, forward operators that were multiplexed there are taken out.
* Where that does not help either, swapped maps that the backward uses on both sides of the peak are taken away there once
  more (`returns.py`).
* When all is decided, swaps that were timed while memory was short everywhere are timed again, and what has proved
  needless is undone.
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass
from math import inf

from hydra_tune.fusion.planner.candidates import candidates_of, updated_candidates
from hydra_tune.fusion.planner.lowering import start_bytes, stretched
from hydra_tune.fusion.planner.memory import Memory, followed, peak_of, simulated
from hydra_tune.fusion.planner.recomputations import can_join, updated_recomputations
from hydra_tune.fusion.planner.recompute_overhead import recompute_overhead
from hydra_tune.fusion.planner.returns import returned
from hydra_tune.fusion.planner.schedule import Candidate, Schedule, Segment
from hydra_tune.fusion.planner.swap_overhead import Case, Proposal, swap_overhead
from hydra_tune.fusion.planner.timeline import Times, timed


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What may be done.

    Attributes:
        swaps: whether feature maps may be swapped.
        recomputes: whether they may be recomputed.
        interleaves: whether forward operators may be multiplexed into a backward.
        is_duplex: whether copies in both directions go side by side.
    """

    swaps: bool = True
    recomputes: bool = True
    interleaves: bool = True
    is_duplex: bool = True


@dataclass(frozen=True, slots=True)
class Decided:
    """A step of the algorithm, for people and tests.

    Attributes:
        side: of which sub-array.
        name: of the feature map.
        case: of the swap; None if it is recomputed.
        seconds: the estimated delay.
    """

    side: int
    name: str
    case: Case | None
    seconds: float


def planned(schedule: Schedule, policy: Policy | None = None) -> tuple[Schedule, list[Decided]]:
    """Decide until memory is within the limit, or nothing is left that could help.

    Args:
        schedule: to begin with; left as it is.
        policy: what may be done.

    Returns:
        The schedule, which may be above the limit still, and the decisions in order.
    """
    search = _Search(schedule.copy(), policy or Policy())
    search.run()
    if peak_of(search.schedule)[1].peak_bytes <= schedule.limit_bytes:
        search.polish()
    return search.schedule, search.decided


def recomputed(schedule: Schedule, wanted: Container[tuple[int, str]], *, is_polished: bool) -> Schedule:
    """Recompute what others have chosen, as far as it can be.

    Args:
        schedule: to begin with; left as it is.
        wanted: sides and feature maps.
        is_polished: whether what is not needed is undone.
    """
    search = _Search(schedule.copy(), Policy(swaps=False, interleaves=False))
    search.recompute(wanted)
    if is_polished and peak_of(search.schedule)[1].peak_bytes <= schedule.limit_bytes:
        search.polish()
    return search.schedule


class _Search:
    def __init__(self, schedule: Schedule, policy: Policy) -> None:
        self.schedule, self._policy = schedule, policy
        self.decided: list[Decided] = []
        self._memories: dict[Segment, Memory] = {}
        self._candidates = [candidates_of(array, side) for side, array in enumerate(schedule.arrays)]

    def run(self) -> None:
        """Lines 5 to 27."""
        while True:
            self._memories = {segment: simulated(self.schedule, segment) for segment in self.schedule.segments}
            segment, memory = max(self._memories.items(), key=lambda found: found[1].peak_bytes)
            if memory.peak_bytes <= self.schedule.limit_bytes:
                return
            idle = self._idle(segment, memory)
            swap = max(
                (one for one in idle if self._may_swap(one)), key=lambda one: one.map.inactive_seconds, default=None
            )
            again = max((one for one in idle if self._may_recompute(one)), key=lambda one: one.ratio, default=None)
            if swap is None and again is None:
                if not self._unmultiplexed(segment) and not self._returned(segment, memory):
                    return
                continue
            proposal = None if swap is None else self._proposal(swap)
            if (
                swap is not None
                and proposal is not None
                and (again is None or proposal.seconds < recompute_overhead(again))
            ):
                self._swap(swap, proposal)
            else:
                assert again is not None, "either of them"
                self._recompute(again)

    def recompute(self, wanted: Container[tuple[int, str]]) -> None:
        """Recompute these, in the order in which they are made."""
        for candidates in self._candidates:
            for one in list(candidates.values()):
                if (one.side, one.name) in wanted and self._may_recompute(one):
                    self._recompute(one)

    def polish(self) -> None:
        """Time swaps again, and undo what is not needed; each change is kept if the step is not slower and memory suffices."""
        seconds = self._seconds(self.schedule)
        for there in self._without_returns():
            found = self._seconds(there)
            if found <= seconds:
                self.schedule, seconds = there, found
        for one in list(self.decided):
            before = self.schedule
            for changed in (self._undone(one), self._timed_again(one)):
                if changed is None:
                    continue
                found = self._seconds(changed)
                if found <= seconds and (found < seconds or one.name not in changed.decisions[one.side].swaps):
                    self.schedule, seconds = changed, found
                    break
            if self.schedule is not before and one.name not in self._all(one.side):
                self.decided.remove(one)

    def _without_returns(self) -> Iterator[Schedule]:
        """The schedule as it is when each comes, without one of the absences between uses."""
        each = [
            (side, name, left)
            for side, d in enumerate(self.schedule.decisions)
            for name in d.returns
            for left in d.returns[name]
        ]
        for side, name, left in each:
            changed = self.schedule.copy()
            del changed.decisions[side].returns[name][left]
            yield changed

    def _all(self, side: int) -> set[str]:
        decisions = self.schedule.decisions[side]
        return decisions.swaps.keys() | decisions.recomputes.keys()

    def _undone(self, one: Decided) -> Schedule | None:
        changed = self.schedule.copy()
        decisions = changed.decisions[one.side]
        if one.name in decisions.swaps:
            del decisions.swaps[one.name]
            decisions.returns.pop(one.name, None)
            return changed
        if any(one.name in other.sources for other in decisions.recomputes.values()):
            return None
        del decisions.recomputes[one.name]
        return changed

    def _timed_again(self, one: Decided) -> Schedule | None:
        changed = self.schedule.copy()
        decisions = changed.decisions[one.side]
        if one.name not in decisions.swaps or not one.seconds:
            return None
        del decisions.swaps[one.name]
        candidate = Candidate(side=one.side, map=self.schedule.arrays[one.side].maps[one.name])
        proposal = swap_overhead(changed, candidate, is_interleaved=self._policy.interleaves)
        decisions.swaps[one.name], decisions.slots = proposal.prompt, proposal.slots
        return changed

    def _seconds(self, schedule: Schedule) -> float:
        """What a schedule takes; without end if it is above the limit."""
        found = Times()
        for segment in schedule.segments:
            pieces = stretched(schedule, segment)
            if followed(pieces, start_bytes(schedule, segment)).peak_bytes > schedule.limit_bytes:
                return inf
            found += timed(pieces, is_duplex=self._policy.is_duplex)
        return found.seconds

    def _unmultiplexed(self, segment: Segment) -> bool:
        """Take forward operators out of the backward that is above the limit; whether there were any."""
        if segment.backward is None or not self.schedule.decisions[segment.backward].slots:
            return False
        self.schedule.decisions[segment.backward].slots = {}
        return True

    def _returned(self, segment: Segment, memory: Memory) -> bool:
        """Have a map that is used on both sides of the peak be away there; whether there was one."""
        if segment.backward is None or not self._policy.swaps:
            return False
        left = self._candidates[segment.backward]
        changed = returned(self.schedule, segment, memory, {name for name, one in left.items() if one.can_swap})
        if changed is None:
            return False
        self.schedule = changed
        for name in left.keys() & changed.decisions[segment.backward].swaps.keys():
            one = left[name]
            self._take(one, 0)
            self.decided.append(Decided(one.side, name, Case.NO_OVERLAP, one.map.in_seconds))
        return True

    def _idle(self, segment: Segment, memory: Memory) -> list[Candidate]:
        """Candidates that are on the device at the peak, and are not used there."""
        found: list[Candidate] = []
        if segment.backward is not None:
            decisions = self.schedule.decisions[segment.backward]
            each = self._candidates[segment.backward].values()
            found += [one for one in each if decisions.first_need(one.map) > memory.peak_backward]
        if segment.forward is not None:
            each = self._candidates[segment.forward].values()
            found += [one for one in each if one.map.last_forward < memory.peak_forward]
        return found

    def _may_swap(self, one: Candidate) -> bool:
        return self._policy.swaps and one.can_swap

    def _may_recompute(self, one: Candidate) -> bool:
        return (
            self._policy.recomputes
            and one.can_recompute
            and can_join(self.schedule.arrays[one.side], self.schedule.decisions[one.side], one)
        )

    def _proposal(self, one: Candidate) -> Proposal:
        before = self._memories[self.schedule.segment_of(one.side)]
        return swap_overhead(self.schedule, one, is_interleaved=self._policy.interleaves, before=before)

    def _swap(self, one: Candidate, proposal: Proposal) -> None:
        decisions = self.schedule.decisions[one.side]
        decisions.swaps[one.name] = proposal.prompt
        decisions.slots = proposal.slots
        self._take(one, 0)
        self.decided.append(Decided(one.side, one.name, proposal.case, proposal.seconds))

    def _recompute(self, one: Candidate) -> None:
        decisions = self.schedule.decisions[one.side]
        seconds = recompute_overhead(one)
        count = updated_recomputations(self.schedule.arrays[one.side], decisions, one)
        one.total_seconds = one.seconds * count
        decisions.recomputes[one.name] = one
        self._take(one, count)
        self._update_prompts(one)
        self.decided.append(Decided(one.side, one.name, None, seconds))

    def _take(self, one: Candidate, count: int) -> None:
        array, left = self.schedule.arrays[one.side], self._candidates[one.side]
        del left[one.name]
        updated_candidates(array, self.schedule.decisions[one.side], one, count, left)

    def _update_prompts(self, recomputed: Candidate) -> None:
        """Line 22: sources come back before they are recomputed from; what hides a copy now lets it begin later."""
        decisions = self.schedule.decisions[recomputed.side]
        array = self.schedule.arrays[recomputed.side]
        at = recomputed.map.first_backward
        for name, prompt in list(decisions.swaps.items()):
            need = decisions.first_need(array.maps[name])
            decisions.swaps[name] = min(prompt, need)
            later = 0.0 if name in recomputed.sources else recomputed.seconds  # which waits for its sources
            while decisions.swaps[name] < at <= need and array.backward[decisions.swaps[name]].seconds <= later:
                later -= array.backward[decisions.swaps[name]].seconds
                decisions.swaps[name] += 1
