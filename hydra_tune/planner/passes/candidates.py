"""Algorithm F: the candidates, and the effect of a decision on the remaining candidates.

`swap_recompute.py` makes the candidates of each sub-array before the first round, and updates the remaining candidates
after each decision. `min_cut.py` and `planner/search/figures.py` only ask for the first candidates. `candidates_of` leaves
the profile as found; `updated_candidates` changes the search's own candidates in place, and nothing else. A pass must not run
a step or read a clock.

Differs from the algorithm as printed:
* Not every feature map is a candidate: the losses are kept, and so is a map with less than a 512th of the largest map's
  bytes, or a map that can be neither swapped nor computed again.
* A candidate normally replaces a swapped source by the sources of that source. Where those cannot compute the candidate
  (random, or overwritten by then), the candidate keeps the swapped source, and the swapped map comes back sooner.
* Line 8: a candidate takes over the operators of its former source. An operator that both need counts once, so the
  times are not simply added up.
* Lines 17 and 18: for a source of the decided map, the number of computations is counted over all recomputations, as
  lines 9 to 14 do: once for the source itself, and once for each recomputation that reads the source while the source
  is away. The `recomp_cnt` of the decided map would leave out the source's own recomputation, and other maps with the
  same source.
"""

from hydra_tune.planner.ir.lineage import holds, lineage
from hydra_tune.planner.ir.plan_state import FeatureMapCandidate, SubArrayDecisions
from hydra_tune.planner.ir.step_profile import SubArrayProfile
from hydra_tune.planner.passes.recompute_updates import is_there, settled

SMALLEST_SHARE = 512
"""Feature maps smaller than 1/512 of the largest are kept: they are numerous, and moving small tensors frees little."""


def candidates_of(array: SubArrayProfile, side: int) -> dict[str, FeatureMapCandidate]:
    """Return the feature maps of a sub-array that may be swapped or recomputed, by name."""
    candidates = {}
    largest = max((feature_map.num_bytes for feature_map in array.maps.values()), default=0)
    for name, feature_map in array.maps.items():
        if name in array.results or feature_map.num_bytes * SMALLEST_SHARE < largest:
            continue
        origin = lineage(array, name)
        candidate = FeatureMapCandidate(
            side=side, map=feature_map, can_swap=name in array.in_seconds, can_recompute=origin is not None
        )
        if origin is not None:
            candidate.sources, candidate.ops = origin.sources, origin.ops
            candidate.seconds = candidate.total_seconds = seconds_of(array, origin.ops)
        if candidate.can_swap or candidate.can_recompute:
            candidates[name] = candidate
    return candidates


def seconds_of(array: SubArrayProfile, ops: frozenset[int]) -> float:
    """Seconds to run forward operators again."""
    return sum(array.forward[rank].seconds for rank in ops)


def updated_candidates(
    array: SubArrayProfile,
    decisions: SubArrayDecisions,
    decided: FeatureMapCandidate,
    count: int,
    candidates: dict[str, FeatureMapCandidate],
) -> None:
    """Update the remaining candidates after a decision.

    `count` is the number of recomputations of the decided map in a step, 0 after a swap. `candidates`, all of the same
    sub-array and without the decided candidate, change.
    """
    for candidate in candidates.values():
        if decided.name in candidate.sources and not is_there(decided, candidate):
            _replace_source(array, decisions, candidate, decided, is_swapped=not count)
            candidate.total_seconds = candidate.seconds * _times(decisions, candidate)
        if candidate.name in decided.sources and count:
            candidate.total_seconds = candidate.seconds * _times(decisions, candidate)


def _replace_source(
    array: SubArrayProfile,
    decisions: SubArrayDecisions,
    one: FeatureMapCandidate,
    decided: FeatureMapCandidate,
    *,
    is_swapped: bool,
) -> None:
    sources, ops = (one.sources - {decided.name}) | decided.sources, one.ops | decided.ops
    sources, ops = settled(decisions, one, sources, ops)
    if decided.can_recompute and holds(array, ops, one.map.first_backward):
        one.sources, one.ops, one.seconds = sources, ops, seconds_of(array, ops)
    # A swapped source can come back sooner. A recomputed source cannot, so the candidate can only be swapped.
    elif not is_swapped:
        one.can_recompute = False


def _times(decisions: SubArrayDecisions, one: FeatureMapCandidate) -> int:
    """Number of computations of a candidate in a step.

    The candidate is computed once for itself, and once for each recomputation that reads the map while the map is away.
    """
    recomputations = decisions.recomputes.values()
    return 1 + sum(
        one.name in recomputation.sources and not is_there(one, recomputation) for recomputation in recomputations
    )
