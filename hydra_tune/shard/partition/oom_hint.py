"""Suggests a remedy for an operator that does not fit a device by itself: the number of pieces needed.

The number is a guess from the cost of the whole operator, for an error message; real pieces are measured once a task
asks for pieces.
"""

from collections.abc import Sequence
from math import ceil

from hydra_tune.shard.analysis.graph_analysis import GraphAnalysis
from hydra_tune.shard.cost.pilot import ShardCost
from hydra_tune.shard.operators.split_modules import ColumnSplitEmbedding, RowSplitEmbedding, SplitLinear

_WHOLE = {"torch.nn.modules.linear.Linear", "torch.nn.modules.sparse.Embedding"}
_CUT = {f"{kind.__module__}.{kind.__qualname__}" for kind in (SplitLinear, ColumnSplitEmbedding, RowSplitEmbedding)}
_UNEVEN = 1.25  # largest ratio of a piece to the mean


def in_pieces(analysis: GraphAnalysis, parts: Sequence[tuple[tuple[int, int], ShardCost]], capacity_bytes: int) -> str:
    """Return the remedy as text for a message, or "" if operators other than those of `split_operators` do not fit.

    Args:
        analysis: analysis of the step.
        parts: first and last position of each part between neighbouring cuts, and the part's cost.
        capacity_bytes: most bytes of a shard.
    """
    pieces_by_operator: dict[tuple[str, str], int] = {}
    for (first, last), cost in parts:
        if cost.peak_bytes <= capacity_bytes:
            continue
        operators = [p for p in range(first, last) if cost.state_bytes and analysis.classes[p] in _WHOLE | _CUT]
        count = _pieces(cost, capacity_bytes)
        # Pieces of weights would not help here, so the message must not promise that they do.
        if not operators or not count:
            return ""
        for position in operators:
            layer = analysis.layers[position].partition("@")[0]  # export numbers the calls of a module after "@"
            kind = (layer, analysis.classes[position])
            pieces_by_operator[kind] = max(pieces_by_operator.get(kind, 0), count)
    if not pieces_by_operator:
        return ""
    count = max(pieces_by_operator.values())  # tied operators need the same number
    whole = {layer: count for layer, kind in pieces_by_operator if kind in _WHOLE}
    if len(whole) < len(pieces_by_operator):
        return "cut more pieces by split_operators, "
    return f"train the weights in pieces (split_operators={whole}), "


def _pieces(cost: ShardCost, capacity_bytes: int) -> int:
    """Number of pieces that would fit; 0 if the operator's inputs leave no room for any piece."""
    beside = 2 * cost.value_bytes  # values and their gradients
    room = capacity_bytes - beside
    return ceil((cost.peak_bytes - beside) / room * _UNEVEN) if room > 0 else 0
