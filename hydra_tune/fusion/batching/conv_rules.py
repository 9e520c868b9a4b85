"""Convolutions, pooling, upsampling, batch and group norm on stacked members: members become additional channels.

`StackedGraph` (`batched_graph.py`) finds the rules through `batching_rules.py`, and calls a rule at each run of such an
operator on stacked members. A rule must not mix channels of several members, and must not know trials, groups or pools. A
rule for convolutions, pooling or upsampling returns None for input without a batch dimension, and the graph then tries
`torch.vmap`.

Note: layout. Outputs have the shape `(N, batch, channels, ...)`. Where the kernel keeps the layout of its input, outputs lie in
memory as `(batch, ..., N, channels)`, with all members' channels innermost, where kernels are fast. A rule accepts its
predecessor's output in this layout without a copy, and elementwise operators preserve the layout. Where the layout ends
(`settled`), gradients are converted back into the layout.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_CHANNELS = 2

aten: Any = torch.ops.aten


def wide(x: Tensor) -> Tensor:
    """Return `(N, batch, channels, ...)` as `(batch, N * channels, ...)` with channels innermost, a view if possible."""
    spatial_dims = range(_CHANNELS + 1, x.dim())
    channels_last = x.permute(1, *spatial_dims, 0, _CHANNELS)
    merged = channels_last.reshape(*channels_last.shape[:-2], x.size(0) * x.size(_CHANNELS)).contiguous()
    return merged.permute(0, -1, *range(1, merged.dim() - 1))


def narrow(x: Tensor, members: int) -> Tensor:
    """Invert `wide`."""
    return x.view(x.size(0), members, -1, *x.shape[2:]).transpose(0, 1)


class _GradientLayoutIdentity(torch.autograd.Function):
    """Identity whose gradient takes the layout of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.layout = x.shape, x.stride()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        shape, stride = ctx.layout
        if gradient.stride() == stride:
            return gradient
        return torch.empty_strided(shape, stride, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


def settled(x: Tensor) -> Tensor:
    """Return a tensor whose gradient will be in the wide layout, if the tensor is; otherwise return the tensor."""
    is_wide = x.dim() > _CHANNELS + 1 and x.stride(_CHANNELS) == 1 and x.stride(0) == x.size(_CHANNELS)
    if not is_wide or x.is_contiguous() or not x.requires_grad:
        return x
    out: Tensor = _GradientLayoutIdentity.apply(x)  # type: ignore[no-untyped-call]
    return out


def convolution(spatial: int, *, transposed: bool = False) -> Callable[..., Tensor | None]:
    """Return a stacked convolution over `spatial` dimensions, with each member's own weights."""

    def plain(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Sequence[int] = (1,),
        padding: Sequence[int] | str = (0,),
        dilation: Sequence[int] = (1,),
        groups: int = 1,
    ) -> Tensor | None:
        """Convolve stacked inputs `(N, batch, channels, ...)`; return None for inputs without a batch dimension."""
        # Unbatched input: left to `torch.vmap`.
        if x.dim() != spatial + _CHANNELS + 1:
            return None
        # Padding by name (`same`, `valid`) has an overload of its own.
        packet = getattr(aten, f"conv{spatial}d")
        operator = packet.padding if isinstance(padding, str) else packet.default
        flat_bias = None if bias is None else bias.flatten()
        # Members are groups of a grouped convolution, so each member's channels meet only the member's own weights.
        out = operator(wide(x), weight.flatten(0, 1), flat_bias, stride, padding, dilation, groups * x.size(0))
        return narrow(out, x.size(0))

    def turned(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Sequence[int] = (1,),
        padding: Sequence[int] = (0,),
        output_padding: Sequence[int] = (0,),
        groups: int = 1,
        dilation: Sequence[int] = (1,),
    ) -> Tensor | None:
        if x.dim() != spatial + _CHANNELS + 1:
            return None
        # torch names the overload `default` for one dimension, and `input` for two.
        packet = getattr(aten, f"conv_transpose{spatial}d")
        operator = packet.default if spatial == 1 else packet.input
        flat_bias = None if bias is None else bias.flatten()
        out = operator(
            wide(x), weight.flatten(0, 1), flat_bias, stride, padding, output_padding, groups * x.size(0), dilation
        )
        return narrow(out, x.size(0))

    return turned if transposed else plain


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """Normalize with each member's own statistics and scales, by channel."""
    scales = [None if t is None else t.flatten() for t in (weight, bias)]
    # Views, because the operator updates the members' statistics in place.
    statistics = [None if t is None else t.view(-1) for t in (running_mean, running_var)]
    out = aten.batch_norm(wide(x), *scales, *statistics, training, momentum, eps, cudnn_enabled)
    return narrow(out, x.size(0))


def pooling(operator: Any, dims: int) -> Callable[..., Tensor | None]:
    """Return a stacked form of an operator on the last `dims` dimensions that treats all channels alike."""

    def run(x: Tensor, *arguments: Any, **keywords: Any) -> Tensor | None:
        if x.dim() != dims + _CHANNELS + 1:
            return None
        return narrow(operator(wide(x), *arguments, **keywords), x.size(0))

    return run


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Normalize groups of channels; members become additional groups, each with its own scales."""
    scales = [None if t is None else t.flatten() for t in (weight, bias)]
    out = aten.group_norm(wide(x), num_groups * x.size(0), *scales, eps, cudnn_enabled)
    return narrow(out, x.size(0))


RULES: dict[Any, Callable[..., Any]] = {
    aten.conv1d.default: convolution(1),
    aten.conv1d.padding: convolution(1),
    aten.conv2d.default: convolution(2),
    aten.conv2d.padding: convolution(2),
    aten.conv3d.default: convolution(3),
    aten.conv3d.padding: convolution(3),
    aten.conv_transpose1d.default: convolution(1, transposed=True),
    aten.conv_transpose2d.input: convolution(2, transposed=True),
    aten.batch_norm.default: batch_norm,
    aten.group_norm.default: group_norm,
    aten.max_pool2d.default: pooling(aten.max_pool2d.default, 2),
    aten.avg_pool2d.default: pooling(aten.avg_pool2d.default, 2),
    aten.adaptive_avg_pool2d.default: pooling(aten.adaptive_avg_pool2d.default, 2),
    aten.upsample_nearest2d.vec: pooling(aten.upsample_nearest2d.vec, 2),
}
