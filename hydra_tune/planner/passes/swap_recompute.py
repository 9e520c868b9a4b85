"""Algorithm B: swap or recompute feature maps, until the bytes on the device are within the limit.

Each round compares two candidates. The candidate that lies idle longest would be swapped, and the candidate that saves
the most bytes per second would be recomputed. The algorithm takes the choice that by estimate delays the step less, and at a
tie recomputes. `Planner` (`planner/search/portfolio.py`) runs the algorithm several times for each sub-array or pair, each
time with other allowed actions; `min_cut.py` calls `recomputed` with maps of its own choice. The search changes a copy of the
schedule that comes in. A pass must not run a step or read a clock.

Differs from the algorithm as printed:
* Line 17: the recomputing branch takes out the recomputed candidate.
* Candidates of both sub-arrays of a pair are decided on together, because each decision shows in both segments.
* Candidates are the maps that lie idle at the peak: no other map brings the peak down.
* A candidate is only swapped, never recomputed, where a source of the candidate is recomputed, and the operators of
  both cannot run again by then (`holds` in `planner/ir/lineage.py`).
* Where no candidate is left to bring the peak down, the forward operators multiplexed in the segment are taken out.
* If the peak is still too high, swapped maps that the backward uses on both sides of the peak leave the device there
  once more (`double_swap.py`).
* At the end, if the limit is met, swaps that were timed while memory was short everywhere are timed again, and needless
  decisions are undone.
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass
from math import inf

from hydra_tune.planner.cost.latency import StepTimeBreakdown, timed
from hydra_tune.planner.cost.peak_memory import SegmentMemory, followed, peak_of, simulated
from hydra_tune.planner.ir.lowering import start_bytes, stretched
from hydra_tune.planner.ir.plan_state import FeatureMapCandidate, ScheduleSegment, SubArraySchedule
from hydra_tune.planner.passes.candidates import candidates_of, updated_candidates
from hydra_tune.planner.passes.double_swap import returned
from hydra_tune.planner.passes.recompute_updates import can_join, updated_recomputations
from hydra_tune.planner.passes.swap_overhead import SwapCase, SwapProposal, swap_overhead


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedPlanActions:
    """Actions that a plan may use.

    Attributes:
        interleaves: whether forward operators may be multiplexed into a backward.
        is_duplex: whether copies in both directions go side by side.
    """

    swaps: bool = True
    recomputes: bool = True
    interleaves: bool = True
    is_duplex: bool = True


@dataclass(frozen=True, slots=True)
class FeatureMapDecision:
    """A decision of the algorithm, for people and tests.

    Attributes:
        case: of the swap; None for a recomputation.
        seconds: the estimated delay.
    """

    side: int
    name: str
    case: SwapCase | None
    seconds: float


def planned(
    schedule: SubArraySchedule, policy: AllowedPlanActions | None = None
) -> tuple[SubArraySchedule, list[FeatureMapDecision]]:
    """Decide until memory is within the limit, or no decision is left that could help.

    Returns:
        The schedule, which may still exceed the limit, and the decisions in order.
    """
    search = _SwapRecomputeSearch(schedule.copy(), policy or AllowedPlanActions())
    search.run()
    if peak_of(search.schedule)[1].peak_bytes <= schedule.limit_bytes:
        search.polish()
    return search.schedule, search.decided


def recomputed(
    schedule: SubArraySchedule, wanted: Container[tuple[int, str]], *, is_polished: bool
) -> SubArraySchedule:
    """Recompute the feature maps that another algorithm has chosen, as far as possible.

    `wanted` holds pairs of side and feature map. With `is_polished`, needless recomputations are undone.
    """
    search = _SwapRecomputeSearch(schedule.copy(), AllowedPlanActions(swaps=False, interleaves=False))
    search.recompute(wanted)
    if is_polished and peak_of(search.schedule)[1].peak_bytes <= schedule.limit_bytes:
        search.polish()
    return search.schedule


class _SwapRecomputeSearch:
    def __init__(self, schedule: SubArraySchedule, policy: AllowedPlanActions) -> None:
        self.schedule, self._policy = schedule, policy
        self.decided: list[FeatureMapDecision] = []
        self._memories: dict[ScheduleSegment, SegmentMemory] = {}
        self._candidates = [candidates_of(array, side) for side, array in enumerate(schedule.arrays)]

    def run(self) -> None:
        """Run lines 5 to 27 of the algorithm."""
        while True:
            self._memories = {segment: simulated(self.schedule, segment) for segment in self.schedule.segments}
            segment, memory = max(self._memories.items(), key=lambda entry: entry[1].peak_bytes)
            if memory.peak_bytes <= self.schedule.limit_bytes:
                return
            idle = self._idle(segment, memory)
            swap = max(
                (candidate for candidate in idle if self._may_swap(candidate)),
                key=lambda candidate: candidate.map.inactive_seconds,
                default=None,
            )
            again = max(
                (candidate for candidate in idle if self._may_recompute(candidate)),
                key=lambda candidate: candidate.ratio,
                default=None,
            )
            if swap is None and again is None:
                if not self._unmultiplexed(segment) and not self._returned(segment, memory):
                    return
                continue
            proposal = None if swap is None else self._proposal(swap)
            if swap is not None and proposal is not None and (again is None or proposal.seconds < again.total_seconds):
                self._swap(swap, proposal)
            else:
                assert again is not None, "either of them"
                self._recompute(again)

    def recompute(self, wanted: Container[tuple[int, str]]) -> None:
        """Recompute the wanted maps, in the order in which the forward makes them."""
        for candidates in self._candidates:
            for candidate in list(candidates.values()):
                if (candidate.side, candidate.name) in wanted and self._may_recompute(candidate):
                    self._recompute(candidate)

    def polish(self) -> None:
        """Time swaps again and undo needless decisions, as long as the step does not slow down and memory suffices."""
        seconds = self._seconds(self.schedule)
        for shortened in self._without_returns():
            changed_seconds = self._seconds(shortened)
            if changed_seconds <= seconds:
                self.schedule, seconds = shortened, changed_seconds
        for decision in list(self.decided):
            earlier_schedule = self.schedule
            for changed in (self._undone(decision), self._timed_again(decision)):
                if changed is None:
                    continue
                changed_seconds = self._seconds(changed)
                # At equal time an undone decision is kept, since the map then moves less; a swap timed again has to be
                # faster.
                if changed_seconds <= seconds and (
                    changed_seconds < seconds or decision.name not in changed.decisions[decision.side].swaps
                ):
                    self.schedule, seconds = changed, changed_seconds
                    break
            if self.schedule is not earlier_schedule and decision.name not in self._all(decision.side):
                self.decided.remove(decision)

    def _without_returns(self) -> Iterator[SubArraySchedule]:
        """Yield the current schedule without one of its absences between uses, for each absence in turn."""
        absences = [
            (side, name, departure)
            for side, decisions in enumerate(self.schedule.decisions)
            for name in decisions.returns
            for departure in decisions.returns[name]
        ]
        for side, name, departure in absences:
            changed = self.schedule.copy()
            del changed.decisions[side].returns[name][departure]
            yield changed

    def _all(self, side: int) -> set[str]:
        decisions = self.schedule.decisions[side]
        return decisions.swaps.keys() | decisions.recomputes.keys()

    def _undone(self, one: FeatureMapDecision) -> SubArraySchedule | None:
        changed = self.schedule.copy()
        decisions = changed.decisions[one.side]
        if one.name in decisions.swaps:
            del decisions.swaps[one.name]
            # An absence needs the host copy, which only a swap makes.
            decisions.returns.pop(one.name, None)
            return changed
        if any(one.name in recomputation.sources for recomputation in decisions.recomputes.values()):
            return None
        del decisions.recomputes[one.name]
        return changed

    def _timed_again(self, one: FeatureMapDecision) -> SubArraySchedule | None:
        changed = self.schedule.copy()
        decisions = changed.decisions[one.side]
        # A swap that is estimated to delay nothing cannot gain.
        if one.name not in decisions.swaps or not one.seconds:
            return None
        del decisions.swaps[one.name]
        candidate = FeatureMapCandidate(side=one.side, map=self.schedule.arrays[one.side].maps[one.name])
        proposal = swap_overhead(changed, candidate, is_interleaved=self._policy.interleaves)
        decisions.swaps[one.name], decisions.slots = proposal.prompt, proposal.slots
        return changed

    def _seconds(self, schedule: SubArraySchedule) -> float:
        """Seconds of a step of a schedule; infinite above the limit."""
        times = StepTimeBreakdown()
        for segment in schedule.segments:
            pieces = stretched(schedule, segment)
            if followed(pieces, start_bytes(schedule, segment)).peak_bytes > schedule.limit_bytes:
                return inf
            times += timed(pieces, is_duplex=self._policy.is_duplex)
        return times.seconds

    def _unmultiplexed(self, segment: ScheduleSegment) -> bool:
        """Take the forward operators out of a segment's backward; return whether there were any."""
        if segment.backward is None or not self.schedule.decisions[segment.backward].slots:
            return False
        self.schedule.decisions[segment.backward].slots = {}
        return True

    def _returned(self, segment: ScheduleSegment, memory: SegmentMemory) -> bool:
        """Let a map leave the device at the peak, between two uses; return whether there was such a map."""
        if segment.backward is None or not self._policy.swaps:
            return False
        candidates = self._candidates[segment.backward]
        changed = returned(
            self.schedule, segment, memory, {name for name, candidate in candidates.items() if candidate.can_swap}
        )
        if changed is None:
            return False
        self.schedule = changed
        # A returning map may not have been swapped before: take such a map off the candidates, as for any other swap.
        for name in candidates.keys() & changed.decisions[segment.backward].swaps.keys():
            candidate = candidates[name]
            self._take(candidate, 0)
            self.decided.append(FeatureMapDecision(candidate.side, name, SwapCase.NO_OVERLAP, candidate.map.in_seconds))
        return True

    def _idle(self, segment: ScheduleSegment, memory: SegmentMemory) -> list[FeatureMapCandidate]:
        """Candidates that are on the device at the peak and unused there."""
        idle_candidates: list[FeatureMapCandidate] = []
        if segment.backward is not None:
            decisions = self.schedule.decisions[segment.backward]
            candidates = self._candidates[segment.backward].values()
            idle_candidates += [
                candidate for candidate in candidates if decisions.first_need(candidate.map) > memory.peak_backward
            ]
        if segment.forward is not None:
            candidates = self._candidates[segment.forward].values()
            idle_candidates += [
                candidate for candidate in candidates if candidate.map.last_forward < memory.peak_forward
            ]
        return idle_candidates

    def _may_swap(self, one: FeatureMapCandidate) -> bool:
        return self._policy.swaps and one.can_swap

    def _may_recompute(self, one: FeatureMapCandidate) -> bool:
        return (
            self._policy.recomputes
            and one.can_recompute
            and can_join(self.schedule.arrays[one.side], self.schedule.decisions[one.side], one)
        )

    def _proposal(self, one: FeatureMapCandidate) -> SwapProposal:
        memory = self._memories[self.schedule.segment_of(one.side)]
        return swap_overhead(self.schedule, one, is_interleaved=self._policy.interleaves, before=memory)

    def _swap(self, one: FeatureMapCandidate, proposal: SwapProposal) -> None:
        decisions = self.schedule.decisions[one.side]
        decisions.swaps[one.name] = proposal.prompt
        decisions.slots = proposal.slots
        self._take(one, 0)
        self.decided.append(FeatureMapDecision(one.side, one.name, proposal.case, proposal.seconds))

    def _recompute(self, one: FeatureMapCandidate) -> None:
        decisions = self.schedule.decisions[one.side]
        seconds = one.total_seconds
        count = updated_recomputations(self.schedule.arrays[one.side], decisions, one)
        one.total_seconds = one.seconds * count
        decisions.recomputes[one.name] = one
        self._take(one, count)
        self._update_prompts(one)
        self.decided.append(FeatureMapDecision(one.side, one.name, None, seconds))

    def _take(self, one: FeatureMapCandidate, count: int) -> None:
        array, candidates = self.schedule.arrays[one.side], self._candidates[one.side]
        del candidates[one.name]
        updated_candidates(array, self.schedule.decisions[one.side], one, count, candidates)

    def _update_prompts(self, recomputed: FeatureMapCandidate) -> None:
        """Move the copies back after a new recomputation (line 22).

        A source comes back before the recomputation. Other copies may begin later, since the recomputation hides part
        of them.
        """
        decisions = self.schedule.decisions[recomputed.side]
        array = self.schedule.arrays[recomputed.side]
        rank = recomputed.map.first_backward
        for name, prompt in list(decisions.swaps.items()):
            need = decisions.first_need(array.maps[name])
            decisions.swaps[name] = min(prompt, need)
            slack = 0.0 if name in recomputed.sources else recomputed.seconds  # a recomputation waits for its sources
            # The recomputation hides as much of the copy as these operators did, so the copy begins behind them.
            while decisions.swaps[name] < rank <= need and array.backward[decisions.swaps[name]].seconds <= slack:
                slack -= array.backward[decisions.swaps[name]].seconds
                decisions.swaps[name] += 1
