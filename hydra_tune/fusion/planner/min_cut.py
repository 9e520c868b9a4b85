"""Recomputing alone, by a minimum cut: which feature maps are kept so that the others can be computed from fewest bytes.

Source: torch's min-cut partitioner with an activation memory budget, on the planner's own storages and measured times.
Among the forward's storages the cut is looked for that separates what cannot be computed again from what the backward
uses; what is kept is what it cuts. Where that recomputes more than the limit asks for, maps are kept beside, those that
take longest to compute for their bytes first (torch's `greedy_knapsack`), as many as there is room for.

Differs: storages that only the forward uses are never kept in place of what is made of them, for a plan keeps none but
feature maps.
"""

from collections.abc import Collection
from math import inf

from torch._functorch._activation_checkpointing.knapsack import greedy_knapsack

from hydra_tune.fusion.planner.arrays import Array
from hydra_tune.fusion.planner.candidates import candidates_of
from hydra_tune.fusion.planner.memory import peak_of
from hydra_tune.fusion.planner.policy import recomputed
from hydra_tune.fusion.planner.schedule import Candidate, Schedule

_HALVINGS = 8
_SOURCE, _SINK = "source", "sink"


def min_cut(array: Array) -> frozenset[str]:
    """The feature maps to keep for least memory: all others can be computed again from these.

    Args:
        array: the sub-array.
    """
    import networkx as nx  # noqa: PLC0415 - takes a fifth of a second, and few pools plan anything

    candidates = candidates_of(array, 0)
    graph = nx.DiGraph()
    for op in array.forward:
        for name in (*op.makes, *op.writes):
            if name not in array.sizes:
                continue
            is_map = name in array.maps
            graph.add_edge(("in", name), ("out", name), capacity=float(array.sizes[name]) if is_map else inf)
            if is_map:
                graph.add_edge(("out", name), _SINK, capacity=inf)
            if op.is_random or (is_map and not _can_be_computed(candidates, name)):
                graph.add_edge(_SOURCE, ("in", name), capacity=inf)
            for read in op.reads:
                if read in array.sizes and read != name:
                    graph.add_edge(("out", read), ("in", name), capacity=inf)
    if _SOURCE not in graph or _SINK not in graph:
        return frozenset()
    _, (near, _) = nx.minimum_cut(graph, _SOURCE, _SINK)
    return frozenset(name for name in array.maps if ("in", name) in near and ("out", name) not in near)


def min_cut_planned(schedule: Schedule) -> Schedule:
    """Recompute what a minimum cut does not keep, and no more of it than the limit asks for.

    Args:
        schedule: to begin with; left as it is.

    Returns:
        The schedule, which may be above the limit still.
    """
    again: list[Candidate] = []
    for side, array in enumerate(schedule.arrays):
        kept = min_cut(array)
        again += [one for name, one in candidates_of(array, side).items() if one.can_recompute and name not in kept]
    again = [one for one in again if one.map.num_bytes]
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        share = (low + high) / 2
        if peak_of(_with(schedule, again, share))[1].peak_bytes <= schedule.limit_bytes:
            low = share
        else:
            high = share
    return _with(schedule, again, low, is_polished=True)


def _can_be_computed(candidates: dict[str, Candidate], name: str) -> bool:
    return name in candidates and candidates[name].can_recompute


def _with(schedule: Schedule, again: Collection[Candidate], budget: float, *, is_polished: bool = False) -> Schedule:
    """All of `again` recomputed, but for what a share of their bytes can keep."""
    each = list(again)
    sizes = [float(one.map.num_bytes) for one in each]
    _, _, wanted = greedy_knapsack(sizes, [one.seconds for one in each], budget * sum(sizes))
    return recomputed(schedule, {(each[place].side, each[place].name) for place in wanted}, is_polished=is_polished)
