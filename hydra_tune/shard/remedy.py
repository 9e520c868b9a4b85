"""What to say of an operator that does not fit a device by itself: into how many pieces it would have to be cut.

A guess from the cost of the whole, for an error message; the pieces are measured when a task asks for them.
"""

from collections.abc import Sequence
from math import ceil

from hydra_tune.shard.analysis import Analysis
from hydra_tune.shard.pilot import ShardCost
from hydra_tune.shard.split_modules import ColumnSplitEmbedding, RowSplitEmbedding, SplitLinear

_WHOLE = {"torch.nn.modules.linear.Linear", "torch.nn.modules.sparse.Embedding"}
_CUT = {f"{kind.__module__}.{kind.__qualname__}" for kind in (SplitLinear, ColumnSplitEmbedding, RowSplitEmbedding)}
_UNEVEN = 1.25  # how much larger than their mean a piece may be


def in_pieces(analysis: Analysis, parts: Sequence[tuple[tuple[int, int], ShardCost]], capacity_bytes: int) -> str:
    """The remedy where all that does not fit are operators that `split_operators` cuts: text for a message, or nothing.

    Args:
        analysis: of the step.
        parts: what lies between neighbouring cuts, by first and last position, and its cost.
        capacity_bytes: what a shard may take.
    """
    found: dict[tuple[str, str], int] = {}
    for (first, last), cost in parts:
        if cost.peak_bytes <= capacity_bytes:
            continue
        operators = [p for p in range(first, last) if cost.state_bytes and analysis.classes[p] in _WHOLE | _CUT]
        count = _pieces(cost, capacity_bytes)
        if not operators or not count:
            return ""  # this would not help
        for position in operators:
            layer = analysis.layers[position].partition("@")[0]  # where export numbers the calls of a module
            kind = (layer, analysis.classes[position])
            found[kind] = max(found.get(kind, 0), count)
    if not found:
        return ""
    count = max(found.values())  # tied ones need the same
    whole = {layer: count for layer, kind in found if kind in _WHOLE}
    if len(whole) < len(found):
        return "cut more pieces by split_operators, "
    return f"train the weights in pieces (split_operators={whole}), "


def _pieces(cost: ShardCost, capacity_bytes: int) -> int:
    """How many would fit; 0 where what the operator is given does not leave room for any."""
    beside = 2 * cost.value_bytes  # and its gradient
    room = capacity_bytes - beside
    return ceil((cost.peak_bytes - beside) / room * _UNEVEN) if room > 0 else 0
