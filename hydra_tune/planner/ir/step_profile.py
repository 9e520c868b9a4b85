"""The planner's model of a sub-array: operators and storages, with times and sizes (Tables A and B of the paper).

`planner/profile/profiler.py` builds a `SubArrayProfile` from a step's graph, and puts copies on a simulated link.
`planner/profile/allocator_rounding.py` and `planner/search/autotune.py` make profiles with other sizes or times. The
passes (`planner/passes/candidates.py`), the search (`planner/search/portfolio.py`), `lineage.py`, `plan_state.py` and
`lowering.py` read the profile whenever a step is planned. The module must not import torch. No field of a profile is ever
changed: `dataclasses.replace` makes another profile, with empty caches.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorProfile:
    """Node of a graph (Table A); the position in the graph is the node's rank.

    Attributes:
        writes: existing storages overwritten.
        repeated_writes: storages of `writes` that a recomputation leaves untouched.
        workspace_bytes: memory needed during the run, beyond the storages read and made.
        is_random: whether the operator advances a random generator; a random operator is never recomputed.
    """

    name: str
    seconds: float
    reads: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    repeated_writes: tuple[str, ...] = ()
    workspace_bytes: int = 0
    is_random: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureMap:
    """Storage that the forward makes and the backward uses (Table B).

    Attributes:
        made: rank of the forward operator that makes the map.
        last_forward: rank of the map's last user in the forward.
        first_backward: rank of the map's first user in the backward.
        last_backward: rank of the map's last user in the backward.
        inactive_seconds: between `last_forward` and `first_backward`, when the backward directly follows the forward.
        out_seconds: of a copy to the host; infinite for a map that is never swapped.
    """

    name: str
    num_bytes: int
    made: int
    last_forward: int
    first_backward: int
    last_backward: int
    inactive_seconds: float
    out_seconds: float
    in_seconds: float


@dataclass(frozen=True, kw_only=True)
class SubArrayProfile:
    """Step of a sub-array.

    Attributes:
        backward: operators of the backward, updates included, in order.
        sizes: bytes of each storage that the operators make.
        static_bytes: of all arguments and constants (parameters, buffers, optimizer state, batch, rates), which stay on the
            device.
        out_seconds: to copy a storage to the host; storages without an entry are never swapped.
        in_seconds: to copy a storage back.
        at_once: storages that the computing thread copies itself, because a hand-over would take longer.
        hand_seconds: time of the computing thread to hand over any other copy.
        results: storages that the step leaves behind (the losses), kept to the segment's end.
        returning: feature maps that may be copied back several times in a backward, because the backward leaves them as
            they are.
    """

    name: str
    forward: tuple[OperatorProfile, ...]
    backward: tuple[OperatorProfile, ...]
    sizes: Mapping[str, int]
    static_bytes: int = 0
    out_seconds: Mapping[str, float] = field(default_factory=dict)
    in_seconds: Mapping[str, float] = field(default_factory=dict)
    at_once: frozenset[str] = frozenset()
    hand_seconds: float = 0.0
    results: frozenset[str] = frozenset()
    returning: frozenset[str] = frozenset()

    @property
    def seconds(self) -> float:
        """Seconds of all operators."""
        return sum(op.seconds for op in (*self.forward, *self.backward))

    @cached_property
    def forward_writers(self) -> Mapping[str, tuple[int, ...]]:
        """Ranks of the forward operators that make or overwrite each storage."""
        writers: dict[str, list[int]] = {}
        for rank, op in enumerate(self.forward):
            for name in dict.fromkeys((*op.makes, *op.writes)):
                writers.setdefault(name, []).append(rank)
        return {name: tuple(ranks) for name, ranks in writers.items()}

    @cached_property
    def backward_writes(self) -> Mapping[str, int]:
        """Rank of the first backward operator that overwrites each storage."""
        first_writers: dict[str, int] = {}
        for rank, op in enumerate(self.backward):
            for name in op.writes:
                first_writers.setdefault(name, rank)
        return first_writers

    @cached_property
    def forward_uses(self) -> Mapping[str, tuple[int, int]]:
        """First and last rank at which the forward touches each storage."""
        return _uses(self.forward)

    @cached_property
    def backward_uses(self) -> Mapping[str, tuple[int, int]]:
        """First and last rank at which the backward touches each storage."""
        return _uses(self.backward)

    @cached_property
    def backward_ranks(self) -> Mapping[str, tuple[int, ...]]:
        """All ranks at which the backward touches each storage."""
        ranks_by_storage: dict[str, list[int]] = {}
        for rank, op in enumerate(self.backward):
            for name in dict.fromkeys((*op.reads, *op.makes, *op.writes)):
                ranks_by_storage.setdefault(name, []).append(rank)
        return {name: tuple(ranks) for name, ranks in ranks_by_storage.items()}

    @cached_property
    def maps(self) -> Mapping[str, FeatureMap]:
        """Feature maps, in the order in which the forward makes them."""
        maker_ranks = {name: rank for rank, op in enumerate(self.forward) for name in op.makes}
        seconds_after = _after([op.seconds for op in self.forward])
        seconds_before = _before([op.seconds for op in self.backward])
        feature_maps: dict[str, FeatureMap] = {}
        for name, rank in maker_ranks.items():
            if name in self.backward_uses:
                first, last = self.backward_uses[name]
                _, end = self.forward_uses[name]
                feature_maps[name] = FeatureMap(
                    name=name,
                    num_bytes=self.sizes[name],
                    made=rank,
                    last_forward=end,
                    first_backward=first,
                    last_backward=last,
                    inactive_seconds=seconds_after[end] + seconds_before[first],
                    out_seconds=self.out_seconds.get(name, float("inf")),
                    in_seconds=self.in_seconds.get(name, float("inf")),
                )
        return feature_maps

    @cached_property
    def forward_ends(self) -> Mapping[int, tuple[str, ...]]:
        """Storages that the forward makes, without feature maps and results, by the rank of their last user."""
        return _ends(self.forward, self.forward_uses, self.maps.keys() | self.results)

    @cached_property
    def backward_ends(self) -> Mapping[int, tuple[str, ...]]:
        """Storages that the backward makes, without results, by the rank of their last user."""
        return _ends(self.backward, self.backward_uses, self.results)

    @cached_property
    def all_backward_ends(self) -> Mapping[int, tuple[str, ...]]:
        """Storages of `backward_ends` and all feature maps, by the rank of their last user; the maps come last at a rank."""
        ends: dict[int, list[str]] = {rank: list(names) for rank, names in self.backward_ends.items()}
        for name, feature_map in self.maps.items():
            ends.setdefault(feature_map.last_backward, []).append(name)
        return {rank: tuple(names) for rank, names in ends.items()}

    @cached_property
    def order(self) -> Mapping[str, int]:
        """Position of each feature map in `maps`."""
        return {name: place for place, name in enumerate(self.maps)}

    @cached_property
    def kept_bytes(self) -> int:
        """Bytes of all feature maps."""
        return sum(feature_map.num_bytes for feature_map in self.maps.values())

    @cached_property
    def lowered(self) -> dict[int, dict[Any, Any]]:
        """Cache of instructions for the sub-array, by side of the schedule (`lowering.py`)."""
        # Kept on the array, so that all schedules of a search share the instructions, and the cache ends with the
        # array.
        return {}


def _uses(ops: Iterable[OperatorProfile]) -> dict[str, tuple[int, int]]:
    uses: dict[str, tuple[int, int]] = {}
    for rank, op in enumerate(ops):
        for name in (*op.reads, *op.makes, *op.writes):
            uses[name] = (uses.get(name, (rank, rank))[0], rank)
    return uses


def _ends(
    ops: Iterable[OperatorProfile], uses: Mapping[str, tuple[int, int]], kept: Iterable[str]
) -> dict[int, tuple[str, ...]]:
    kept_names = set(kept)
    ends: dict[int, list[str]] = {}
    for op in ops:
        for name in op.makes:
            if name not in kept_names:
                ends.setdefault(uses[name][1], []).append(name)
    return {rank: tuple(names) for rank, names in ends.items()}


def _after(seconds: list[float]) -> list[float]:
    """Seconds of all operators behind each operator."""
    sums = [0.0] * len(seconds)
    for rank in range(len(seconds) - 2, -1, -1):
        sums[rank] = sums[rank + 1] + seconds[rank + 1]
    return sums


def _before(seconds: list[float]) -> list[float]:
    """Seconds of all operators before each operator."""
    sums = [0.0] * len(seconds)
    for rank in range(1, len(seconds)):
        sums[rank] = sums[rank - 1] + seconds[rank - 1]
    return sums
