"""Algorithm E: the effect of a new recomputation on the recomputations decided before.

`swap_recompute.py` asks `can_join` before a map may be recomputed, and calls `updated_recomputations` once the map is
chosen. `candidates.py` asks `is_there` and `settled` for the remaining candidates. `updated_recomputations` changes the
search's own decisions in place. A pass must not run a step or read a clock.

Where the newly recomputed map is a source of an earlier recomputation, the map's own sources and operators take the
map's place, and the map is computed once more for each such recomputation. Differs: a map that is on the device anyway,
between its first and last use in the backward, stays a source (the question in line 3 of Algorithm F). An operator that
both recomputations need runs once (line 6 adds up the times). A swap changes no recomputation, because the swapped
source comes back before the first use.
"""

from hydra_tune.planner.ir.lineage import holds
from hydra_tune.planner.ir.plan_state import FeatureMapCandidate, SubArrayDecisions
from hydra_tune.planner.ir.step_profile import SubArrayProfile


def can_join(array: SubArrayProfile, decisions: SubArrayDecisions, candidate: FeatureMapCandidate) -> bool:
    """Whether a candidate can be recomputed wherever earlier recomputations need the candidate."""
    return all(
        holds(array, _joined(decisions, recomputation, candidate)[1], recomputation.map.first_backward)
        for recomputation in decisions.recomputes.values()
        if candidate.name in recomputation.sources and not is_there(candidate, recomputation)
    )


def updated_recomputations(array: SubArrayProfile, decisions: SubArrayDecisions, candidate: FeatureMapCandidate) -> int:
    """Put a candidate's lineage in the candidate's place in the recomputations decided before.

    Changes `decisions`, which do not hold the candidate yet.

    Returns:
        Number of recomputations of the candidate in a step (`recomp_cnt`).
    """
    count = 1
    for recomputation in decisions.recomputes.values():
        if candidate.name in recomputation.sources and not is_there(candidate, recomputation):
            recomputation.sources, recomputation.ops = _joined(decisions, recomputation, candidate)
            seconds = sum(array.forward[rank].seconds for rank in recomputation.ops)
            recomputation.total_seconds += seconds - recomputation.seconds
            recomputation.seconds = seconds
            count += 1
    return count


def is_there(source: FeatureMapCandidate, other: FeatureMapCandidate) -> bool:
    """Whether a map that is not kept is on the device at another's first use in the backward (`active_bw_interval`)."""
    return source.map.first_backward <= other.map.first_backward <= source.map.last_backward


def settled(
    decisions: SubArrayDecisions, one: FeatureMapCandidate, sources: frozenset[str], ops: frozenset[int]
) -> tuple[frozenset[str], frozenset[int]]:
    """Return a lineage in which recomputed sources that are away when needed are replaced by their own lineages."""
    while True:
        # Sorted, because the order of a set of strings changes from process to process, and plans must not.
        recomputed_sources = (decisions.recomputes[name] for name in sorted(sources) if name in decisions.recomputes)
        absent_source = next((source for source in recomputed_sources if not is_there(source, one)), None)
        if absent_source is None:
            return sources, ops
        sources, ops = (sources - {absent_source.name}) | absent_source.sources, ops | absent_source.ops


def _joined(
    decisions: SubArrayDecisions, one: FeatureMapCandidate, source: FeatureMapCandidate
) -> tuple[frozenset[str], frozenset[int]]:
    return settled(decisions, one, (one.sources - {source.name}) | source.sources, one.ops | source.ops)
