"""Recomputation alone, by a minimum cut: keep the fewest bytes of feature maps from which the others can be computed.

`Planner` (`planner/search/portfolio.py`) makes the `min-cut` plan of each sub-array or pair here, beside the plans of
Algorithm B. The paper has no such pass.

Source: torch's min-cut partitioner with an activation memory budget, on the planner's own storages and measured times.
The cut separates storages that cannot be computed again from storages that the backward uses, and the plan keeps the
maps on the cut. Where the cut recomputes more than the limit asks for, further maps are kept, as many as there is room for,
to within a 256th of the bytes of all recomputed maps. Maps that take longest to compute for their bytes are kept first
(torch's `greedy_knapsack`).

Differs: a storage that only the forward uses is never kept in place of the maps made from the storage, because a plan
keeps feature maps alone.

The pass must not run a step, read a clock, or change the schedule that comes in.
"""

from collections.abc import Collection
from math import inf

from torch._functorch._activation_checkpointing.knapsack import greedy_knapsack

from hydra_tune.planner.cost.peak_memory import peak_of
from hydra_tune.planner.ir.plan_state import FeatureMapCandidate, SubArraySchedule
from hydra_tune.planner.ir.step_profile import SubArrayProfile
from hydra_tune.planner.passes.candidates import candidates_of
from hydra_tune.planner.passes.swap_recompute import recomputed

_HALVINGS = 8  # finds the share to within 1/256
_SOURCE, _SINK = "source", "sink"


def min_cut(array: SubArrayProfile) -> frozenset[str]:
    """Return the feature maps to keep for least memory; all others can be computed again from the kept maps."""
    import networkx as nx  # noqa: PLC0415 - the import takes a fifth of a second, and few pools plan

    candidates = candidates_of(array, 0)
    graph = nx.DiGraph()
    for op in array.forward:
        for name in (*op.makes, *op.writes):
            if name not in array.sizes:
                continue
            # Each storage is an edge from "in" to "out", and its capacity is the cost of keeping the storage. A plan
            # can keep only feature maps, so other edges have infinite capacity.
            is_map = name in array.maps
            graph.add_edge(("in", name), ("out", name), capacity=float(array.sizes[name]) if is_map else inf)
            if is_map:
                graph.add_edge(("out", name), _SINK, capacity=inf)
            if op.is_random or (is_map and not _can_be_computed(candidates, name)):
                graph.add_edge(_SOURCE, ("in", name), capacity=inf)
            for read in op.reads:
                if read in array.sizes and read != name:
                    graph.add_edge(("out", read), ("in", name), capacity=inf)
    # Without a source nothing has to be kept, and without a sink there are no maps.
    if _SOURCE not in graph or _SINK not in graph:
        return frozenset()
    _, (near, _) = nx.minimum_cut(graph, _SOURCE, _SINK)
    return frozenset(name for name in array.maps if ("in", name) in near and ("out", name) not in near)


def min_cut_planned(schedule: SubArraySchedule) -> SubArraySchedule:
    """Recompute maps that a minimum cut does not keep, and no more of them than the limit asks for.

    Returns:
        The schedule, which may still exceed the limit.
    """
    recomputable: list[FeatureMapCandidate] = []
    for side, array in enumerate(schedule.arrays):
        kept_names = min_cut(array)
        recomputable += [
            candidate
            for name, candidate in candidates_of(array, side).items()
            if candidate.can_recompute and name not in kept_names
        ]
    # The knapsack divides by sizes.
    recomputable = [candidate for candidate in recomputable if candidate.map.num_bytes]
    low, high = 0.0, 1.0
    # Find the largest share of the bytes that can be kept: a larger share recomputes less and raises the peak.
    for _ in range(_HALVINGS):
        share = (low + high) / 2
        if peak_of(_with(schedule, recomputable, share))[1].peak_bytes <= schedule.limit_bytes:
            low = share
        else:
            high = share
    return _with(schedule, recomputable, low, is_polished=True)


def _can_be_computed(candidates: dict[str, FeatureMapCandidate], name: str) -> bool:
    return name in candidates and candidates[name].can_recompute


def _with(
    schedule: SubArraySchedule, again: Collection[FeatureMapCandidate], budget: float, *, is_polished: bool = False
) -> SubArraySchedule:
    """Recompute all of `again`, except for maps that fit into a share of the bytes of all."""
    candidates = list(again)
    sizes = [float(candidate.map.num_bytes) for candidate in candidates]
    # The results are the kept seconds, the kept places and the recomputed places.
    _, _, recomputed_places = greedy_knapsack(
        sizes, [candidate.seconds for candidate in candidates], budget * sum(sizes)
    )
    return recomputed(
        schedule,
        {(candidates[place].side, candidates[place].name) for place in recomputed_places},
        is_polished=is_polished,
    )
