"""What has been decided for the sub-arrays of a device: swaps, recomputations, and where forward operators are multiplexed.

One state for both segments of a pair, for what is decided for a sub-array shows in both: in one its backward gets
back what in the other its forward gave away.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hydra_tune.fusion.planner.arrays import Array, FeatureMap

_EPSILON = 1e-12


@dataclass(slots=True, kw_only=True)
class Candidate:
    """A feature map that may be swapped or recomputed (Table B).

    Attributes:
        side: whose it is.
        map: what is known of it.
        sources: feature maps that it would be recomputed from (`recomp_srcs`).
        ops: ranks of the forward operators that would (`recomp_graph`).
        seconds: of one recomputation (`recomp_time`).
        total_seconds: of all in a step (`total_recomp_time`).
        can_swap: whether it may be swapped.
        can_recompute: whether it may be recomputed.
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
        """Of the storage."""
        return self.map.name

    @property
    def ratio(self) -> float:
        """Bytes saved for each second of recomputing (`recompute_ratio`)."""
        return self.map.num_bytes / max(self.total_seconds, _EPSILON)


@dataclass(slots=True)
class Decisions:
    """For one sub-array.

    Attributes:
        swaps: feature map -> rank of the backward operator before which it is sent for (`prefetch_prompt`).
        recomputes: feature map -> how it is recomputed, before its first use in the backward.
        slots: rank of a backward operator -> seconds of the other sub-array's forward that are run before it.
        returns: swapped feature map -> ranks of backward operators behind which it is taken away once more, until its next
            use -> ranks before which it is sent for again.
    """

    swaps: dict[str, int] = field(default_factory=dict)
    recomputes: dict[str, Candidate] = field(default_factory=dict)
    slots: dict[int, float] = field(default_factory=dict)
    returns: dict[str, dict[int, int]] = field(default_factory=dict)

    def copy(self) -> "Decisions":
        """One that may be changed."""
        recomputes = {name: replace(one) for name, one in self.recomputes.items()}
        returns = {name: dict(each) for name, each in self.returns.items()}
        return Decisions(dict(self.swaps), recomputes, dict(self.slots), returns)

    def first_need(self, one: FeatureMap) -> int:
        """Rank of the first backward operator that needs a feature map, itself or for a recomputation."""
        return min([one.first_backward, *self._recomputed_from(one)])

    def changed_needs(self, maps: Mapping[str, FeatureMap]) -> dict[str, tuple[int, int]]:
        """First and last need of the feature maps that others are recomputed from."""
        found: dict[str, tuple[int, int]] = {}
        for other in self.recomputes.values():
            at = other.map.first_backward
            for name in other.sources:
                first, last = found.get(name) or (maps[name].first_backward, maps[name].last_backward)
                found[name] = min(first, at), max(last, at)
        return found

    def uses(self, one: FeatureMap, ranks: Sequence[int]) -> list[int]:
        """Ranks of the backward operators that need a feature map, themselves or for a recomputation.

        Args:
            one: the feature map.
            ranks: of those that use it.
        """
        return sorted({*ranks, *self._recomputed_from(one)})

    def recompute_seconds(self, rank: int, source: str = "") -> float:
        """How long is recomputed before a backward operator.

        Args:
            rank: of the operator.
            source: what is made of this feature map is left out.
        """
        each = (one for one in self.recomputes.values() if one.map.first_backward == rank and source not in one.sources)
        return sum(one.seconds for one in each)

    def _recomputed_from(self, source: FeatureMap) -> Iterable[int]:
        return (one.map.first_backward for one in self.recomputes.values() if source.name in one.sources)


@dataclass(frozen=True, slots=True)
class Segment:
    """A merged graph.

    Attributes:
        backward: whose backward is in it, if any.
        forward: whose forward.
    """

    backward: int | None
    forward: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Sub-arrays of a device and what has been decided for them.

    Attributes:
        arrays: one, or a pair.
        decisions: for each.
        limit_bytes: of the device's memory.
    """

    arrays: tuple[Array, ...]
    decisions: tuple[Decisions, ...]
    limit_bytes: int

    @property
    def segments(self) -> tuple[Segment, ...]:
        """What is run over and over: of a pair `[BW_0, FW_1]` and `[BW_1, FW_0]`, of one sub-array its two halves."""
        if len(self.arrays) == 1:
            return (Segment(None, 0), Segment(0, None))
        return (Segment(0, 1), Segment(1, 0))

    @property
    def ends(self) -> tuple[Segment, ...]:
        """What a pair is begun and ended with: the first forward and the last backward of each, alone."""
        return tuple(Segment(*ends) for side in range(len(self.arrays)) for ends in ((None, side), (side, None)))

    @property
    def static_bytes(self) -> int:
        """Of what stays on the device."""
        return sum(array.static_bytes for array in self.arrays)

    def segment_of(self, side: int) -> Segment:
        """That with a sub-array's backward."""
        return next(segment for segment in self.segments if segment.backward == side)

    def copy(self) -> "Schedule":
        """One whose decisions may be changed."""
        return replace(self, decisions=tuple(one.copy() for one in self.decisions))

    def timed_by(self, arrays: tuple[Array, ...]) -> "Schedule":
        """The same decisions for arrays that differ in their times alone; the same operators are in the slots.

        Args:
            arrays: in place of its own.
        """
        found = replace(self.copy(), arrays=arrays)
        for segment in self.segments:
            if segment.backward is None or segment.forward is None:
                continue
            ops, before = arrays[segment.forward].forward, [0, *(self.forward_before(segment) or ())]
            slots = {
                rank: sum(op.seconds for op in ops[before[rank] : before[rank + 1]])
                for rank in self.decisions[segment.backward].slots
            }
            found.decisions[segment.backward].slots = slots
        return found

    def multiplexed(self, segment: Segment) -> dict[int, int] | None:
        """For the backward operators of a segment before which forward operators are run, how many have run by then.

        None where there are not enough of them for what the slots want.
        """
        assert segment.backward is not None, "no backward"
        found: dict[int, int] = {}
        if segment.forward is None:
            return found
        ops, done = self.arrays[segment.forward].forward, 0
        for rank, wanted in sorted(self.decisions[segment.backward].slots.items()):
            rest = wanted
            while rest > _EPSILON:
                if done == len(ops):
                    return None
                rest -= ops[done].seconds
                done += 1
            found[rank] = done
        return found

    def forward_before(self, segment: Segment) -> list[int] | None:
        """For each backward operator of a segment, how many forward operators are run before it; None as above."""
        multiplexed = self.multiplexed(segment)
        if multiplexed is None or segment.backward is None:
            return None
        found: list[int] = []
        done = 0
        for rank, count in multiplexed.items():
            found += [done] * (rank - len(found))
            done = count
        return found + [done] * (len(self.arrays[segment.backward].backward) - len(found))


def undecided(arrays: tuple[Array, ...], limit_bytes: int) -> Schedule:
    """Everything kept, and no forward operator multiplexed.

    Args:
        arrays: one, or a pair.
        limit_bytes: of the device's memory.
    """
    return Schedule(arrays=arrays, decisions=tuple(Decisions() for _ in arrays), limit_bytes=limit_bytes)
