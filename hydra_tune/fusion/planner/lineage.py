"""How a feature map can be computed again: from which sources, by which operators (§A.4, after Capuchin and Spark's lineage).

A random operator is never run again. Nor is one that overwrites what others see, but for running statistics, which it
leaves alone the second time; and nothing is computed from a storage that has been overwritten since.

Differs from Table B: `recomp_graph` is not extracted, but the ranks of its operators, which `lowering.py` and `rewrite.py`
look up in the forward; and there is no `recomp_memory`, for what a recomputation makes and frees on the way is in
the instructions whose memory is simulated.
"""

from dataclasses import dataclass

from hydra_tune.fusion.planner.arrays import Array


@dataclass(frozen=True, slots=True)
class Lineage:
    """Where a feature map comes from.

    Attributes:
        sources: other feature maps that it is computed from (`recomp_srcs`).
        ops: ranks of the forward operators that make it from them (`recomp_graph`).
    """

    sources: frozenset[str]
    ops: frozenset[int]


def lineage(array: Array, name: str) -> Lineage | None:
    """The lineage of a feature map, with all others kept; None where it cannot be computed again.

    Args:
        array: of the sub-array.
        name: of the feature map.
    """
    sources: set[str] = set()
    ops: set[int] = set()
    wanted, known = [name], {name}
    while wanted:
        storage = wanted.pop()
        for rank in array.forward_writers[storage]:
            op = array.forward[rank]
            made = {*op.makes, storage}
            if op.is_random or not set(op.writes) <= made | set(op.repeated_writes):
                return None
            ops.add(rank)
            for read in op.reads:
                if read in made or read in op.repeated_writes:
                    continue
                if _overwritten_after(array, read, rank):
                    return None
                if read in array.maps:
                    sources.add(read)
                elif read in array.sizes and read not in known:
                    known.add(read)
                    wanted.append(read)
    found = Lineage(frozenset(sources), frozenset(ops))
    return found if holds(array, found.ops, array.maps[name].first_backward) else None


def holds(array: Array, ops: frozenset[int], at_rank: int) -> bool:
    """Whether operators can be run again before the backward operator at a rank: what they read is as it was.

    What one of them makes again for another is so only with all that was written to it in between.
    """
    for rank in ops:
        for read in array.forward[rank].reads:
            if array.backward_writes.get(read, at_rank) < at_rank:
                return False
            before = {writer for writer in array.forward_writers.get(read, ()) if writer < rank}
            if before & ops and not before <= ops:
                return False
    return True


def _overwritten_after(array: Array, storage: str, rank: int) -> bool:
    writers = array.forward_writers.get(storage, ())
    return bool(writers) and writers[-1] > rank
