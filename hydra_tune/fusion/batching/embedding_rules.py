"""`nn.Embedding` and `nn.EmbeddingBag` of stacked members: the members' tables concatenated to a single table.

`StackedGraph` (`batched_graph.py`) calls a rule at each run of an embedding operator on stacked members, `embedding_bag` only
where the graph uses no other result than the bags. An index must never reach a row of another member's table. The module must
not know trials, groups or pools.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten: Any = torch.ops.aten


def embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Look up rows of `(N, rows, width)` by indices `(N, ...)`; return `(N, ..., width)`. Padding rows get no gradient."""
    vectors: Tensor = aten.embedding(
        weight.flatten(0, 1), _concatenated(indices, weight), -1, scale_grad_by_freq, sparse
    )
    # The concatenated table has a padding row for every member, but the operator takes only
    # a single padding index. Detaching the looked-up padding rows has the same effect.
    if padding_idx < 0:
        return vectors
    return torch.where((indices == padding_idx).unsqueeze(-1), vectors.detach(), vectors)


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Sequence[Tensor | None] | None:
    """Reduce bags of `(N, rows, width)`, ids `(N, ids)` and offsets `(N, bags)` to `(N, bags, width)`.

    Other results of the operator are left out. Return None with a padding row, `include_last_offset` (ids may belong to no
    bag) or `scale_grad_by_freq`.
    """
    if include_last_offset or (padding_idx is not None and padding_idx >= 0):
        return None
    # Torch's CPU kernel mixes up the ids whose frequencies divide gradients, so other members' ids would change the result.
    if scale_grad_by_freq:
        return None
    members = weight.size(0)
    number = torch.arange(members, device=indices.device).unsqueeze(1)
    # All members have as many ids, so a member's bags begin that many ids after those of the member before.
    begins = offsets + number * indices.size(1)
    if offsets.is_cpu and offsets.numel():
        # Where torch refuses a member's bags, it must refuse the bags of all: ids before the first bag would fall into
        # the last bag of the member before.
        is_refused = (offsets[:, 0] != 0).any() | ((offsets < 0) | (offsets > indices.size(1))).any()
        begins = torch.where(is_refused, -1, begins)
    bags, *_ = aten.embedding_bag.padding_idx(
        weight.flatten(0, 1),
        _concatenated(indices, weight).flatten(),
        begins.flatten(),
        scale_grad_by_freq,
        mode,
        sparse,
        None if per_sample_weights is None else per_sample_weights.flatten(),
        False,
        None,
    )
    return bags.view(members, offsets.size(1), -1), None, None, None


def _concatenated(indices: Tensor, weight: Tensor) -> Tensor:
    """Return the indices `(N, ...)` into the concatenated table: row r of member n is row n * rows + r."""
    members, rows = weight.shape[:2]
    number = torch.arange(members, device=indices.device).view(-1, *[1] * (indices.dim() - 1))
    # An index out of a member's table would be a row of another member; -1 is out of every table, and an error as alone.
    is_row = (indices >= 0) & (indices < rows)
    return torch.where(is_row, indices + number * rows, -1)


TABLES: dict[Any, Callable[..., Any]] = {
    aten.embedding.default: embedding,
    aten.embedding_bag.padding_idx: embedding_bag,
    aten.embedding_bag.default: embedding_bag,
}
