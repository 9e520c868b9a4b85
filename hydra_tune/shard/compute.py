"""The arithmetic of shard units on tensors: forward without gradients, and recompute with backward.

Note: gradient order. Autograd adds the gradients of a value's uses in the reverse order of its uses, so a value used in
several shards gets the later shards' sum first. To add in the same order, what the later shards have accumulated enters a
shard's backward as one more root, before anything of the shard itself. The same holds for a parameter that several shards
use. Adding afterwards would change the last bits.

These functions run on real tensors and, in the pilot, on fake ones; they know nothing of where tensors live.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hydra_tune.shard.split import ShardGraph
from hydra_tune.shard.steps import Objective, loss_itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """What a shard is run on, in the order of the `ShardGraph`'s fields; all on one device."""

    state: Sequence[Tensor]
    constants: Sequence[Tensor]
    inputs: Sequence[Tensor]
    live_in: Sequence[Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """What a backward unit makes: gradients of live-ins by name, and of parameters by name (accumulated)."""

    live_in: dict[str, Tensor]
    parameters: dict[str, Tensor]
    outputs: dict[str, Tensor]


def forward(shard: ShardGraph, operands: Operands, needs_gradient: frozenset[str] | None = None) -> dict[str, Tensor]:
    """Run a shard and keep only its outputs.

    Args:
        shard: the shard.
        operands: what it is run on.
        needs_gradient: in training, the live-ins that require gradients. The run then records gradients like the eager
            forward, for operators may choose other kernels without, but saves nothing for a backward.

    Returns:
        Tensor by name of `shard.live_out`.
    """
    if needs_gradient is None:
        with torch.no_grad():
            arguments = list(_arguments(shard, operands, frozenset()).values())
            outputs = shard.module(*operands.state, *operands.constants, *operands.inputs, *arguments)
        return dict(zip(shard.live_out, outputs, strict=True))
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_save_nothing, _never):
        leaves = _arguments(shard, operands, needs_gradient)
        outputs = shard.module(*operands.state, *operands.constants, *operands.inputs, *leaves.values())
    return {name: tensor.detach() for name, tensor in zip(shard.live_out, outputs, strict=True)}


def _arguments(shard: ShardGraph, operands: Operands, needs_gradient: frozenset[str]) -> dict[str, Tensor]:
    """The live-ins as the graph takes them: a copy where it overwrites one, which a leaf would refuse."""
    leaves = {
        name: tensor.detach().requires_grad_(name in needs_gradient)
        for name, tensor in zip(shard.live_in, operands.live_in, strict=True)
    }
    return {name: leaf.clone() if name in shard.cloned else leaf for name, leaf in leaves.items()}


def _save_nothing(tensor: Tensor) -> None:
    del tensor


def _never(packed: None) -> Tensor:
    del packed
    raise AssertionError("a forward unit has no backward")


def backward(
    shard: ShardGraph,
    operands: Operands,
    *,
    needs_gradient: frozenset[str],
    output_gradients: Mapping[str, Tensor | None],
    accumulated: Mapping[str, Tensor],
    parameter_gradients: Mapping[str, Tensor],
    objective: Objective = loss_itself,
) -> Gradients:
    """Run a shard with gradients, then backward.

    Args:
        shard: the shard.
        operands: parameters are leaves; their `.grad` is taken over and left None.
        needs_gradient: live-ins that require gradients.
        output_gradients: gradient of each live-out; None stands for the loss itself, whose objective the backward starts from.
        accumulated: gradients of live-ins from later shards, by name.
        parameter_gradients: gradients of parameters from later shards, by name.
        objective: of the loss.
    """
    leaves = {
        name: tensor.detach().requires_grad_(name in needs_gradient)
        for name, tensor in zip(shard.live_in, operands.live_in, strict=True)
    }
    arguments = [leaf.clone() if name in shard.cloned else leaf for name, leaf in leaves.items()]
    parameters = {
        name: tensor for name, tensor in zip(shard.state, operands.state, strict=True) if tensor.requires_grad
    }
    with torch.enable_grad():
        made = shard.module(*operands.state, *operands.constants, *operands.inputs, *arguments)
        outputs = dict(zip(shard.live_out, made, strict=True))
        roots = [
            (objective(outputs[name]) if gradient is None else outputs[name], gradient)
            for name, gradient in output_gradients.items()
            if outputs[name].requires_grad
        ]
    roots += [(leaves[name], gradient) for name, gradient in accumulated.items() if name in leaves]
    roots += [(parameters[name], gradient) for name, gradient in parameter_gradients.items() if name in parameters]
    # Copied, because a loss may keep the storage of its unreduced form alive.
    losses = {name: outputs[name].detach().clone() for name, gradient in output_gradients.items() if gradient is None}
    if roots:
        torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])
    return Gradients(
        live_in={name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None},
        parameters={name: gradient for name, p in parameters.items() if (gradient := _take(p)) is not None},
        outputs=losses,
    )


def _take(parameter: Tensor) -> Tensor | None:
    gradient, parameter.grad = parameter.grad, None
    return gradient
