"""Algorithm E: what a decision changes for the recomputations that were decided before.

Where the map that is now recomputed is a source of them, its own sources and operators take its place, and it is
computed once more for each. Differs: not where it is on the device anyhow, between its own first and last use in the
backward (what Algorithm F asks in its line 3). Recomputations are not changed by a swap: the swapped source comes
back before the first of them.
"""

from hydra_tune.fusion.planner.arrays import Array
from hydra_tune.fusion.planner.lineage import holds
from hydra_tune.fusion.planner.schedule import Candidate, Decisions


def can_join(array: Array, decisions: Decisions, candidate: Candidate) -> bool:
    """Whether a candidate can be recomputed wherever recomputations decided before need it.

    Args:
        array: of the sub-array.
        decisions: for it.
        candidate: of it.
    """
    return all(
        holds(array, candidate.ops, one.map.first_backward)
        for one in decisions.recomputes.values()
        if candidate.name in one.sources and not is_there(candidate, one)
    )


def updated_recomputations(decisions: Decisions, candidate: Candidate) -> int:
    """Put a candidate's lineage in its place in the recomputations decided before.

    Args:
        decisions: changed; the candidate is not yet among them.
        candidate: that is recomputed from now on.

    Returns:
        How many times it is computed again in a step (`recomp_cnt`).
    """
    count = 1
    for one in decisions.recomputes.values():
        if candidate.name in one.sources and not is_there(candidate, one):
            one.sources = (one.sources - {candidate.name}) | candidate.sources
            one.ops |= candidate.ops
            one.seconds += candidate.seconds
            one.total_seconds += candidate.seconds
            count += 1
    return count


def is_there(source: Candidate, other: Candidate) -> bool:
    """Whether a map that is not kept is on the device when another is first used in the backward (`active_bw_interval`)."""
    return source.map.first_backward <= other.map.first_backward <= source.map.last_backward
