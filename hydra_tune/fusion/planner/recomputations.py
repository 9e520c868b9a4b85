"""Algorithm E: what a decision changes for the recomputations that were decided before.

Where the map that is now recomputed is a source of them, its own sources and operators take its place, and it is
computed once more for each. Differs: not where it is on the device anyhow, between its own first and last use in the
backward (what Algorithm F asks in its line 3). An operator that both need is run once (line 6 adds up their times).
Recomputations are not changed by a swap: the swapped source comes back before the first of them.
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
        holds(array, _joined(decisions, one, candidate)[1], one.map.first_backward)
        for one in decisions.recomputes.values()
        if candidate.name in one.sources and not is_there(candidate, one)
    )


def updated_recomputations(array: Array, decisions: Decisions, candidate: Candidate) -> int:
    """Put a candidate's lineage in its place in the recomputations decided before.

    Args:
        array: of the sub-array.
        decisions: changed; the candidate is not yet among them.
        candidate: that is recomputed from now on.

    Returns:
        How many times it is computed again in a step (`recomp_cnt`).
    """
    count = 1
    for one in decisions.recomputes.values():
        if candidate.name in one.sources and not is_there(candidate, one):
            one.sources, one.ops = _joined(decisions, one, candidate)
            seconds = sum(array.forward[rank].seconds for rank in one.ops)
            one.total_seconds += seconds - one.seconds
            one.seconds = seconds
            count += 1
    return count


def is_there(source: Candidate, other: Candidate) -> bool:
    """Whether a map that is not kept is on the device when another is first used in the backward (`active_bw_interval`)."""
    return source.map.first_backward <= other.map.first_backward <= source.map.last_backward


def settled(
    decisions: Decisions, one: Candidate, sources: frozenset[str], ops: frozenset[int]
) -> tuple[frozenset[str], frozenset[int]]:
    """A lineage with those of its sources that are recomputed, and not there when it is needed, replaced by theirs.

    Args:
        decisions: for the sub-array.
        one: whose lineage it is.
        sources: of it.
        ops: of it.
    """
    while True:
        away = (decisions.recomputes[name] for name in sorted(sources) if name in decisions.recomputes)
        gone = next((source for source in away if not is_there(source, one)), None)
        if gone is None:
            return sources, ops
        sources, ops = (sources - {gone.name}) | gone.sources, ops | gone.ops


def _joined(decisions: Decisions, one: Candidate, source: Candidate) -> tuple[frozenset[str], frozenset[int]]:
    return settled(decisions, one, (one.sources - {source.name}) | source.sources, one.ops | source.ops)
