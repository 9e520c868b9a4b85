"""Decisions for a device's sub-arrays: swaps, recomputations, and the places of multiplexed forward operators.

A single state covers both segments of a pair, because a decision for a sub-array shows in both: the forward in one
segment gives a map away, and the backward in the other gets the map back.

`Planner` (`planner/search/portfolio.py`) starts each plan from an undecided `SubArraySchedule`. The passes
(`planner/passes/swap_recompute.py`, `planner/passes/min_cut.py` and `planner/passes/double_swap.py`) then add
decisions, and `lowering.py` turns the decisions into instructions. `verify.py`, `planner/cost/`,
`planner/search/figures.py` and `planner/run/runner.py` read a schedule, and planned units
(`fusion/runtime/planned_executor.py` and `fusion/runtime/paired_unit.py`) name graphs by `ScheduleSegment`. The module must
not know devices, clocks or how a plan is found.

Note: ownership. Decisions and candidates change in place, though a schedule is frozen. A pass changes only a schedule
from `SubArraySchedule.copy`, because several plans start from the same schedule.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hydra_tune.planner.ir.step_profile import FeatureMap, SubArrayProfile

# A picosecond, the unit of a sequence's clock (`instructions.py`): a smaller rest of seconds comes from rounding.
_EPSILON = 1e-12


@dataclass(slots=True, kw_only=True)
class FeatureMapCandidate:
    """A feature map that may be swapped or recomputed (Table B).

    Attributes:
        side: index of the map's sub-array in the schedule.
        sources: feature maps from which the candidate would be recomputed (`recomp_srcs`).
        ops: ranks of the forward operators that would recompute the candidate (`recomp_graph`).
        seconds: of a single recomputation (`recomp_time`).
        total_seconds: of all recomputations in a step (`total_recomp_time`), the cost of recomputing by Algorithm D.
    """

    side: int
    map: FeatureMap
    sources: frozenset[str] = frozenset()
    ops: frozenset[int] = frozenset()
    seconds: float = 0.0
    total_seconds: float = 0.0
    can_swap: bool = True
    can_recompute: bool = True

    @property
    def name(self) -> str:
        """Name of the storage."""
        return self.map.name

    @property
    def ratio(self) -> float:
        """Bytes saved for each second of recomputing (`recompute_ratio`)."""
        return self.map.num_bytes / max(self.total_seconds, _EPSILON)


@dataclass(slots=True)
class SubArrayDecisions:
    """Decisions for a single sub-array.

    Attributes:
        swaps: feature map -> rank of the backward operator before which the copy back begins (`prefetch_prompt`).
        recomputes: feature map -> how the map is recomputed, before its first use in the backward.
        slots: rank of a backward operator -> seconds of the other sub-array's forward that run before the operator.
        returns: swapped feature map -> rank of a backward operator behind which the map leaves the device once more,
            until its next use -> rank before which the next copy back begins.
    """

    swaps: dict[str, int] = field(default_factory=dict)
    recomputes: dict[str, FeatureMapCandidate] = field(default_factory=dict)
    slots: dict[int, float] = field(default_factory=dict)
    returns: dict[str, dict[int, int]] = field(default_factory=dict)

    def copy(self) -> "SubArrayDecisions":
        """Return a copy that may be changed."""
        # Later decisions change candidates in place (Algorithm E), so a copy needs candidates of its own.
        recomputes = {name: replace(candidate) for name, candidate in self.recomputes.items()}
        returns = {name: dict(prompts) for name, prompts in self.returns.items()}
        return SubArrayDecisions(dict(self.swaps), recomputes, dict(self.slots), returns)

    def first_need(self, one: FeatureMap) -> int:
        """Rank of the first backward operator that needs a feature map, directly or for a recomputation."""
        return min([one.first_backward, *self._recomputed_from(one)])

    def changed_needs(self, maps: Mapping[str, FeatureMap]) -> dict[str, tuple[int, int]]:
        """First and last need of each feature map that is a source of recomputations."""
        needs: dict[str, tuple[int, int]] = {}
        for recomputation in self.recomputes.values():
            rank = recomputation.map.first_backward
            for name in recomputation.sources:
                first, last = needs.get(name) or (maps[name].first_backward, maps[name].last_backward)
                needs[name] = min(first, rank), max(last, rank)
        return needs

    def uses(self, one: FeatureMap, ranks: Sequence[int]) -> list[int]:
        """Ranks of the backward operators that need a feature map: directly (`ranks`), or for a recomputation."""
        return sorted({*ranks, *self._recomputed_from(one)})

    def recompute_seconds(self, rank: int, source: str = "") -> float:
        """Seconds of the recomputations before a backward operator, without recomputations from `source`."""
        recomputations = (
            candidate
            for candidate in self.recomputes.values()
            if candidate.map.first_backward == rank and source not in candidate.sources
        )
        return sum(candidate.seconds for candidate in recomputations)

    def _recomputed_from(self, source: FeatureMap) -> Iterable[int]:
        return (
            candidate.map.first_backward for candidate in self.recomputes.values() if source.name in candidate.sources
        )


@dataclass(frozen=True, slots=True)
class ScheduleSegment:
    """A merged graph.

    Attributes:
        backward: index of the sub-array whose backward is in the graph, if any.
        forward: index of the sub-array whose forward is in the graph, if any.
    """

    backward: int | None
    forward: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SubArraySchedule:
    """Sub-arrays that run in turn on a device, and the decisions for each.

    Attributes:
        arrays: a single sub-array, or a pair.
    """

    arrays: tuple[SubArrayProfile, ...]
    decisions: tuple[SubArrayDecisions, ...]
    limit_bytes: int

    @property
    def segments(self) -> tuple[ScheduleSegment, ...]:
        """Segments that repeat: `[BW_0, FW_1]` and `[BW_1, FW_0]` of a pair, FW and BW of a single sub-array."""
        if len(self.arrays) == 1:
            return (ScheduleSegment(None, 0), ScheduleSegment(0, None))
        return (ScheduleSegment(0, 1), ScheduleSegment(1, 0))

    @property
    def ends(self) -> tuple[ScheduleSegment, ...]:
        """Segments outside the turns: each sub-array's forward and backward alone, as at the beginning and end of a run."""
        return tuple(
            ScheduleSegment(*ends) for side in range(len(self.arrays)) for ends in ((None, side), (side, None))
        )

    @property
    def static_bytes(self) -> int:
        """Bytes that stay on the device."""
        return sum(array.static_bytes for array in self.arrays)

    def segment_of(self, side: int) -> ScheduleSegment:
        """Return the segment with a sub-array's backward."""
        return next(segment for segment in self.segments if segment.backward == side)

    def copy(self) -> "SubArraySchedule":
        """Return a copy whose decisions may be changed."""
        return replace(self, decisions=tuple(decisions.copy() for decisions in self.decisions))

    def timed_by(self, arrays: tuple[SubArrayProfile, ...]) -> "SubArraySchedule":
        """Return the same decisions for arrays that differ only in their times.

        The slots keep their forward operators and get the new seconds.
        """
        retimed_schedule = replace(self.copy(), arrays=arrays)
        for segment in self.segments:
            if segment.backward is None or segment.forward is None:
                continue
            # Shifted by one: `num_before[rank]` operators run before the previous backward operator, so the slot has
            # those from there to `num_before[rank + 1]`.
            ops, num_before = arrays[segment.forward].forward, [0, *(self.forward_before(segment) or ())]
            slots = {
                rank: sum(op.seconds for op in ops[num_before[rank] : num_before[rank + 1]])
                for rank in self.decisions[segment.backward].slots
            }
            retimed_schedule.decisions[segment.backward].slots = slots
        return retimed_schedule

    def multiplexed(self, segment: ScheduleSegment) -> dict[int, int] | None:
        """Rank of each backward operator with a slot -> number of forward operators that have run when the operator begins.

        None where the forward has too few operators to fill the slots.
        """
        assert segment.backward is not None, "no backward"
        num_by_rank: dict[int, int] = {}
        if segment.forward is None:
            return num_by_rank
        ops, num_done = self.arrays[segment.forward].forward, 0
        # Slots hold seconds, not ranks: a new slot moves the operators of later slots back instead of taking them away.
        for rank, slot_seconds in sorted(self.decisions[segment.backward].slots.items()):
            seconds_left = slot_seconds
            while seconds_left > _EPSILON:
                if num_done == len(ops):
                    return None
                seconds_left -= ops[num_done].seconds
                num_done += 1
            num_by_rank[rank] = num_done
        return num_by_rank

    def forward_before(self, segment: ScheduleSegment) -> list[int] | None:
        """For each backward operator, the number of forward operators that run before it; None as in `multiplexed`."""
        multiplexed = self.multiplexed(segment)
        if multiplexed is None or segment.backward is None:
            return None
        counts: list[int] = []
        num_done = 0
        for rank, count in multiplexed.items():
            counts += [num_done] * (rank - len(counts))
            num_done = count
        return counts + [num_done] * (len(self.arrays[segment.backward].backward) - len(counts))


def undecided(arrays: tuple[SubArrayProfile, ...], limit_bytes: int) -> SubArraySchedule:
    """Return a schedule that keeps everything and multiplexes no forward operator."""
    return SubArraySchedule(
        arrays=arrays, decisions=tuple(SubArrayDecisions() for _ in arrays), limit_bytes=limit_bytes
    )
