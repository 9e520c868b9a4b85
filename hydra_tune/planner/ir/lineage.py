"""Lineage of a feature map: the sources and forward operators that compute the map again (§A.4).

`candidates_of` (`planner/passes/candidates.py`) computes the lineages before the first decision. The same file and
`planner/passes/recompute_updates.py` ask `holds` before lineages are joined. The module must not change a profile, and
must not know devices or clocks.

The idea follows Capuchin and Spark's lineage. A random operator never runs again. Nor does an operator that overwrites
storages which others see; running statistics are the exception, because a recomputation leaves them untouched. No map
is computed from a storage that has been overwritten since the operator read it.

Differs from Table B: instead of an extracted `recomp_graph`, a lineage holds the ranks of the operators, and
`lowering.py` and `planner/passes/graph_rewrite.py` look the operators up in the forward. There is no `recomp_memory`,
because the memory simulation sees everything that a recomputation makes and frees as instructions.
"""

from dataclasses import dataclass

from hydra_tune.planner.ir.step_profile import SubArrayProfile


@dataclass(frozen=True, slots=True)
class FeatureMapLineage:
    """Origin of a feature map.

    Attributes:
        sources: other feature maps that the recomputation reads (`recomp_srcs`).
        ops: ranks of the forward operators that compute the map from the sources (`recomp_graph`).
    """

    sources: frozenset[str]
    ops: frozenset[int]


def lineage(array: SubArrayProfile, name: str) -> FeatureMapLineage | None:
    """Return the lineage of a feature map if all other maps are kept; None where the map cannot be computed again."""
    sources: set[str] = set()
    ops: set[int] = set()
    pending_storages, visited_storages = [name], {name}
    while pending_storages:
        storage = pending_storages.pop()
        for rank in array.forward_writers[storage]:
            op = array.forward[rank]
            # Writes into the storage that is being computed are part of computing it; other writes would be visible
            # elsewhere.
            own_storages = {*op.makes, storage}
            if op.is_random or not set(op.writes) <= own_storages | set(op.repeated_writes):
                return None
            ops.add(rank)
            for read in op.reads:
                if read in own_storages or read in op.repeated_writes:
                    continue
                if _overwritten_after(array, read, rank):
                    return None
                if read in array.maps:
                    sources.add(read)
                # Used by the forward alone, so freed by the time of the backward: compute this storage again as well.
                # Static tensors have no size here, and are always on the device.
                elif read in array.sizes and read not in visited_storages:
                    visited_storages.add(read)
                    pending_storages.append(read)
    origin = FeatureMapLineage(frozenset(sources), frozenset(ops))
    return origin if holds(array, origin.ops, array.maps[name].first_backward) else None


def holds(array: SubArrayProfile, ops: frozenset[int], at_rank: int) -> bool:
    """Whether forward operators can run again before the backward operator at a rank, on unchanged inputs.

    The backward must not have overwritten their inputs by then. An input that the recomputation makes again needs every
    write that came before the read in the forward.
    """
    for rank in ops:
        for read in array.forward[rank].reads:
            if array.backward_writes.get(read, at_rank) < at_rank:
                return False
            earlier_writers = {writer for writer in array.forward_writers.get(read, ()) if writer < rank}
            if earlier_writers & ops and not earlier_writers <= ops:
                return False
    return True


def _overwritten_after(array: SubArrayProfile, storage: str, rank: int) -> bool:
    writers = array.forward_writers.get(storage, ())
    return bool(writers) and writers[-1] > rank
