"""Algorithm F: the candidates, and what a decision changes for those that are left.

Differs from the algorithm as printed:
* Not every feature map is a candidate: those of less than a 512th of the largest one's bytes are kept.
* A candidate whose source has been swapped, and which cannot be computed from that one's own sources (they are
  random, or overwritten by then), keeps it as its source, and the swapped map comes back sooner.
* Line 8: a candidate takes over the operators of what was its source, and one that both need counts once; the times
  are not added up.
* Lines 17 and 18: how often a source of what was decided on would be computed is counted over all recomputations, as
  lines 9 to 14 do: once for itself and once for each that has it as a source and needs it while it is not there. The
  `recomp_cnt` of what was decided on leaves out the source's own recomputation, and others that have it as a source.
"""

from hydra_tune.fusion.planner.arrays import Array
from hydra_tune.fusion.planner.lineage import holds, lineage
from hydra_tune.fusion.planner.recomputations import is_there, settled
from hydra_tune.fusion.planner.schedule import Candidate, Decisions

SMALLEST_SHARE = 512
"""Feature maps of less than the largest one's bytes through this are kept: they are many, and moving them frees nothing."""


def candidates_of(array: Array, side: int) -> dict[str, Candidate]:
    """The feature maps of a sub-array that may be swapped or recomputed.

    Args:
        array: of the sub-array.
        side: which of the schedule's it is.
    """
    found = {}
    largest = max((one.num_bytes for one in array.maps.values()), default=0)
    for name, one in array.maps.items():
        if name in array.results or one.num_bytes * SMALLEST_SHARE < largest:
            continue
        how = lineage(array, name)
        candidate = Candidate(side=side, map=one, can_swap=name in array.in_seconds, can_recompute=how is not None)
        if how is not None:
            candidate.sources, candidate.ops = how.sources, how.ops
            candidate.seconds = candidate.total_seconds = seconds_of(array, how.ops)
        if candidate.can_swap or candidate.can_recompute:
            found[name] = candidate
    return found


def seconds_of(array: Array, ops: frozenset[int]) -> float:
    """What running forward operators again takes."""
    return sum(array.forward[rank].seconds for rank in ops)


def updated_candidates(
    array: Array, decisions: Decisions, decided: Candidate, count: int, candidates: dict[str, Candidate]
) -> None:
    """Take a decision into account.

    Args:
        array: of the sub-array.
        decisions: for it, with the new one.
        decided: what has been decided on.
        count: how many times it is recomputed in a step; 0 if it is swapped.
        candidates: of the same sub-array, without the decided one; changed.
    """
    for one in candidates.values():
        if decided.name in one.sources and not is_there(decided, one):
            _replace_source(array, decisions, one, decided, is_swapped=not count)
            one.total_seconds = one.seconds * _times(decisions, one)
        if one.name in decided.sources and count:
            one.total_seconds = one.seconds * _times(decisions, one)


def _replace_source(
    array: Array, decisions: Decisions, one: Candidate, decided: Candidate, *, is_swapped: bool
) -> None:
    sources, ops = (one.sources - {decided.name}) | decided.sources, one.ops | decided.ops
    sources, ops = settled(decisions, one, sources, ops)
    if decided.can_recompute and holds(array, ops, one.map.first_backward):
        one.sources, one.ops, one.seconds = sources, ops, seconds_of(array, ops)
    elif not is_swapped:
        one.can_recompute = False


def _times(decisions: Decisions, one: Candidate) -> int:
    """How often it would be computed in a step: for itself, and for each recomputation whose source it is."""
    others = decisions.recomputes.values()
    return 1 + sum(one.name in other.sources and not is_there(one, other) for other in others)
