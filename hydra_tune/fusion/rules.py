"""Operators on stacked members for which `torch.vmap` has no good way: the same arithmetic, as one call for all members.

Each takes the operator's own arguments, every tensor with the members in front, and returns the result with the members in
front; or None where the arguments are of a kind that is left to `torch.vmap`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_MATRIX, _MEAN, _SUM = 3, 1, 2

aten: Any = torch.ops.aten


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`(N, ..., in)` and `(N, out, in)` to `(N, ..., out)`, as one batched product."""
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
    """Of class numbers, `(N, samples, classes)` and `(N, samples)`: one loss of all members' samples, then reduced each."""
    if weight is not None or label_smoothing or logits.dim() != _MATRIX or target.is_floating_point():
        return None
    single: Tensor = aten.cross_entropy_loss(logits.flatten(0, 1), target.flatten(), None, 0, ignore_index).view_as(
        target
    )
    if reduction == _SUM:
        return single.sum(1)
    if reduction == _MEAN:
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
    """Members are so many more samples: `(N, batch, heads, tokens, width)` as `(N * batch, heads, tokens, width)`."""
    if dropout_p or query.dim() != 5:  # noqa: PLR2004
        return None
    members, batch = query.shape[:2]
    mask = attn_mask
    if mask is not None:
        wide = mask.reshape(members, *[1] * (5 - mask.dim()), *mask.shape[1:])
        mask = wide.expand(members, batch, *wide.shape[2:]).flatten(0, 1)
    made: Tensor = aten.scaled_dot_product_attention(
        *(tensor.flatten(0, 1) for tensor in (query, key, value)),
        mask,
        0.0,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return made.view(members, batch, *made.shape[1:])


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] | str = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Tensor | None:
    """`(N, batch, channels, height, width)`: members are groups of channels, which lie innermost, where kernels are fast."""
    if x.dim() != 5:  # noqa: PLR2004
        return None
    members, batch = x.shape[:2]
    wide = x.transpose(0, 1).reshape(batch, -1, *x.shape[3:]).contiguous(memory_format=torch.channels_last)
    operator = aten.conv2d.padding if isinstance(padding, str) else aten.conv2d.default
    all_bias = None if bias is None else bias.flatten()
    made: Tensor = operator(wide, weight.flatten(0, 1), all_bias, stride, padding, dilation, groups * members)
    return made.view(batch, members, -1, *made.shape[2:]).transpose(0, 1)


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """`(N, batch, channels, ...)`: members are so many more samples, but for their own scales."""
    made: Tensor = aten.group_norm(x.flatten(0, 1), num_groups, None, None, eps, cudnn_enabled)
    made = made.view_as(x)
    own = (x.size(0), 1, x.size(2), *[1] * (x.dim() - 3))
    if weight is not None:
        made = made * weight.view(own)
    return made if bias is None else made + bias.view(own)


RULES: dict[Any, Callable[..., Any]] = {
    aten.linear.default: linear,
    aten.cross_entropy_loss.default: cross_entropy,
    aten.scaled_dot_product_attention.default: attention,
    aten.group_norm.default: group_norm,
    aten.conv2d.default: convolution,
    aten.conv2d.padding: convolution,
}
