"""Operators on stacked members that `torch.vmap` handles badly: the same arithmetic in a single call for all members.

Every rule takes the operator's own arguments, with the members in front of every tensor, and returns the result with
the members in front; `elementwise` takes the operator as well, and rules of `VIEWS` take `settles`. A rule returns None for
arguments that the graph should run under `torch.vmap` or for each member. `StackedGraph` (`batched_graph.py`) looks up a
node's rule when a graph is stacked, and calls the rule at each run of the node with stacked inputs; `MaskedReduction`
(`fusion/ragged/masked_loss.py`) calls `cross_entropy`, and `aliasing_writes.py` reads `VIEWS`. Rules must not mix members,
and must not know trials, groups or pools.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hydra_tune.fusion.batching import conv_rules
from hydra_tune.fusion.batching.conv_rules import settled
from hydra_tune.older_torch import is_pointwise

_MATRIX, _MEAN, _SUM = 3, 1, 2
_MANY_CLASSES = 64

aten: Any = torch.ops.aten


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Map `(N, ..., in)` and `(N, out, in)` to `(N, ..., out)`, as a batched product."""
    # A vector of weights, a bias other than a vector, and no inputs are legal as well.
    if weight.dim() != _MATRIX or (bias is not None and bias.dim() != _MATRIX - 1) or weight.numel() == 0:
        return None
    rows = x.reshape(x.size(0), -1, x.size(-1))
    if bias is None:
        out = torch.bmm(rows, weight.transpose(1, 2))
    else:
        out = torch.baddbmm(bias.unsqueeze(1), rows, weight.transpose(1, 2))
    return out.view(*x.shape[:-1], weight.size(1))


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Return the losses of class indices, from `(N, samples, classes)` and `(N, samples)`.

    A single loss over all members' samples runs first, then a reduction for every member, if the operator has one.
    """
    if weight is not None or label_smoothing or logits.dim() != _MATRIX or target.is_floating_point():
        return None
    single: Tensor
    if logits.size(-1) < _MANY_CLASSES:  # kernels are slow along a short last dimension
        scores = aten.log_softmax(logits.transpose(1, 2).contiguous(), 1)
        single = aten.nll_loss_nd(scores, target, None, 0, ignore_index)
    else:
        flat = aten.cross_entropy_loss(logits.flatten(0, 1), target.flatten(), None, 0, ignore_index)
        single = flat.view_as(target)
    if reduction == _SUM:
        return single.sum(1)
    if reduction == _MEAN:
        # As torch's mean, which divides by the targets that are not ignored.
        return single.sum(1) / (target != ignore_index).sum(1)
    return single


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Merge members into samples: `(N, batch, heads, tokens, width)` as `(N * batch, heads, tokens, width)`."""
    num_outer = min(2, query.dim() - 2)  # the members, and the samples unless the input is unbatched
    outer = query.shape[:num_outer]
    # A kernel with dropout would draw for all members from a single stream.
    if dropout_p or not outer == key.shape[:num_outer] == value.shape[:num_outer]:
        return None
    mask = attn_mask
    if mask is not None:
        stacked_mask = mask.reshape(outer[0], *[1] * (query.dim() - mask.dim()), *mask.shape[1:])
        mask = stacked_mask.expand(*outer, *stacked_mask.shape[num_outer:]).flatten(0, num_outer - 1)
    out: Tensor = aten.scaled_dot_product_attention(
        *(tensor.flatten(0, num_outer - 1) for tensor in (query, key, value)),
        mask,
        0.0,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return out.view(*outer, *out.shape[1:])


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """Normalize with members as additional samples, then apply each member's own weight and bias."""
    # The kernel of CPU devices takes samples in low precision beside scales in float32, and rounds once, at the end.
    wide = next((scales.dtype for scales in (weight, bias) if scales is not None), x.dtype)
    # Without scales, because the kernel takes a single set of them for all samples.
    normalized: Tensor = aten.layer_norm(x.to(wide), normalized_shape, None, None, eps, cudnn_enable)
    shape = (x.size(0), *[1] * (x.dim() - 1 - len(normalized_shape)), *normalized_shape)
    if weight is not None and bias is not None:
        normalized = torch.addcmul(bias.view(shape), normalized, weight.view(shape))
    elif weight is not None:
        normalized = normalized * weight.view(shape)
    elif bias is not None:
        normalized = normalized + bias.view(shape)
    return normalized.to(x.dtype)


def view(x: Tensor, shape: Sequence[int], *, settles: bool = True) -> Tensor:
    """View as a shape; copy where the stacked layout requires a copy.

    With `settles`, the gradient of a tensor in the wide layout (`conv_rules.py`) comes in the wide layout.
    """
    return (settled(x) if settles else x).reshape(x.size(0), *shape)


def flatten(x: Tensor, start_dim: int = 0, end_dim: int = -1, *, settles: bool = True) -> Tensor | None:
    """Flatten, as `view`."""
    if x.dim() == 1:
        return None
    # Negative dimensions count from the end, where the members' dimension shifts nothing.
    start = start_dim + 1 if start_dim >= 0 else start_dim
    end = end_dim + 1 if end_dim >= 0 else end_dim
    return (settled(x) if settles else x).flatten(start, end)


def one_hot(classes: Tensor, num_classes: int = -1) -> Tensor | None:
    """Write ones by indices, which torch checks; in a trace and under `torch.vmap`, the operator accepts any class."""
    if num_classes < 1:
        return None
    return classes.new_zeros(*classes.shape, num_classes).scatter(-1, classes.unsqueeze(-1), 1)


def is_elementwise(target: Any) -> bool:
    """Return whether an operator treats all elements alike, wherever they are."""
    return is_pointwise(target)


def elementwise(target: Any, *arguments: Any, **keywords: Any) -> Any:
    """Align the members' dimensions and run the operator.

    Return None for mixed dtypes, and for writes into a tensor with fewer dimensions than another.
    """
    tensors = [t for t in pytree.tree_leaves((arguments, keywords)) if isinstance(t, Tensor)]
    most = max(tensor.dim() for tensor in tensors)
    # Torch promotes zero-dimensional tensors weakly. A member's scalar has
    # a dimension once stacked, so mixed dtypes would promote differently.
    if len({tensor.dtype for tensor in tensors}) > 1 or (tensors[0].dim() < most and target._schema.is_mutable):  # noqa: SLF001
        return None
    aligned_tensors = [
        t if t.dim() == most else t.view(t.size(0), *[1] * (most - t.dim()), *t.shape[1:]) for t in tensors
    ]
    next_tensors = iter(aligned_tensors)
    positional, named = pytree.tree_map_only(Tensor, lambda _: next(next_tensors), (arguments, keywords))
    return target(*positional, **named)


VIEWS: dict[Any, Callable[..., Any]] = {
    aten.view.default: view,
    aten.reshape.default: view,
    aten.flatten.using_ints: flatten,
}

RULES: dict[Any, Callable[..., Any]] = {
    aten.linear.default: linear,
    aten.cross_entropy_loss.default: cross_entropy,
    aten.scaled_dot_product_attention.default: attention,
    aten.layer_norm.default: layer_norm,
    aten.one_hot.default: one_hot,
    **VIEWS,
    **conv_rules.RULES,
}
