"""The arithmetic of shard units on tensors: a forward with or without its autograd graph kept, and the backward of either.

Note: gradient order. Autograd adds the gradients of a value's uses in the reverse order of the uses, so a value used in
several shards gets the sum of the later shards first. To add in the same order, a shard's backward takes the sum
accumulated by later shards as one more root: autograd takes all roots before any node of the shard runs. The same holds for a
parameter used by several shards. Adding the sum afterwards would change the last bits.

Note: one backward for two forwards. A forward unit may keep its graph; the leaves of the graph then stand for the
live-ins and parameters until the backward unit. The leaves are tensors of the step alone, and hold no memory between the
two units; a recompute has such leaves for its live-ins, and takes the trial's own parameters. In both cases the backward
starts from the same roots in the same order and meets the same nodes with the same bits.

`ShardChain` (`chain.py`) runs the functions on real tensors in each unit, and the pilot (`shard/cost/pilot.py`) on fake
tensors before a step is cut. `MemoizedShardExecutor` (`shard/fake/fake_memo.py`) and the runners of a fused group
(`fusion/compile/batched_plan.py`, and `fusion/compile/cuda_graph_steps.py` for recorded steps) take the module's place in a
plan (`ShardPlan.computing`). The functions here run the shards that such a runner leaves. The modules of `fusion/`,
`planner/` and `batched/` pass tensors as `ShardOperands`, and `train/loop/direct.py` asks `rounds_otherwise_under_modes`. The
functions do not know the places of tensors, and take no lock: a unit enters the gate and holds its blocks before the call.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._python_dispatch import _disable_current_modes

from hydra_tune.shard.capture.opaque_call import keeps_tensors
from hydra_tune.shard.capture.step_module import Objective, loss_itself
from hydra_tune.shard.execute.saved_activations import KeptActivations
from hydra_tune.shard.partition.subgraph import ShardGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOperands:
    """Operands of a shard, in the order of the fields of `ShardGraph`; all on a single device."""

    state: Sequence[Tensor]
    constants: Sequence[Tensor]
    inputs: Sequence[Tensor]
    live_in: Sequence[Tensor]

    @property
    def all(self) -> list[Tensor]:
        """All operands in the order of the shard's arguments."""
        return [*self.state, *self.constants, *self.inputs, *self.live_in]


@dataclass(frozen=True, slots=True, kw_only=True)
class IncomingGradients:
    """Gradients that later shards hand to a shard's backward.

    Attributes:
        outputs: gradients by live-out, where there is one; None stands for a loss, whose objective is a root of the backward.
        live_in: gradients of live-ins also used by later shards, by name.
        parameters: gradients of parameters also used by later shards, by name.
    """

    outputs: Mapping[str, Tensor | None]
    live_in: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardGradients:
    """Results of a backward unit: gradients of live-ins and of parameters by name (accumulated), and losses by name."""

    live_in: dict[str, Tensor]
    parameters: dict[str, Tensor]
    outputs: dict[str, Tensor]


def forward(
    shard: ShardGraph, operands: ShardOperands, needs_gradient: frozenset[str] | None = None
) -> dict[str, Tensor]:
    """Run a shard and keep only its outputs.

    Args:
        shard: the shard.
        operands: operands of the shard.
        needs_gradient: in training, the live-ins that require gradients. The run then records gradients like the eager
            forward, because operators may choose other kernels otherwise, but saves nothing for a backward.

    Returns:
        Tensor by name of `shard.live_out`.
    """
    if needs_gradient is None:
        with torch.no_grad():
            arguments = _arguments(shard, _leaves(shard, operands, frozenset()))
            outputs = shard.module(*operands.state, *operands.constants, *operands.inputs, *arguments)
        return dict(zip(shard.live_out, outputs, strict=True))
    # The graph is recorded but never run, so the hooks drop every saved tensor and intermediate memory is freed at
    # once.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_save_nothing, _never):
        arguments = _arguments(shard, _leaves(shard, operands, needs_gradient))
        outputs = shard.module(*operands.state, *operands.constants, *operands.inputs, *arguments)
    # Detached, because each output would keep the recorded graph alive.
    return {name: tensor.detach() for name, tensor in zip(shard.live_out, outputs, strict=True)}


def _save_nothing(tensor: Tensor) -> None:
    del tensor


def _never(packed: None) -> Tensor:
    del packed
    raise AssertionError("a forward unit has no backward")


def _leaves(shard: ShardGraph, operands: ShardOperands, needs_gradient: frozenset[str]) -> dict[str, Tensor]:
    return {
        name: tensor.detach().requires_grad_(name in needs_gradient)
        for name, tensor in zip(shard.live_in, operands.live_in, strict=True)
    }


def _arguments(shard: ShardGraph, leaves: Mapping[str, Tensor]) -> list[Tensor]:
    """Live-ins as arguments of the graph: a copy where the graph overwrites a live-in, which autograd refuses for a leaf."""
    return [leaf.clone() if name in shard.cloned else leaf for name, leaf in leaves.items()]


class ShardTape:
    """The autograd graph of a forward unit, kept until its backward unit.

    Args:
        live_in, parameters: leaves of the graph by name.
        outputs: live-outs with a gradient, by name.
        saved: tensors saved by the graph.
    """

    def __init__(
        self,
        live_in: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
        saved: KeptActivations,
    ) -> None:
        self._live_in = dict(live_in)
        self._parameters = dict(parameters)
        # An edge keeps the graph alive without the memory of the output.
        self._outputs = {name: get_gradient_edge(output) for name, output in outputs.items()}
        self._saved = saved

    @property
    def keeps_more(self) -> bool:
        """Whether the context of a custom operator or an own Function keeps a tensor beside those saved by the graph."""
        nodes = backward_nodes(*(edge.node for edge in self._outputs.values()))
        return any(isinstance(node, BackwardCFunction) and keeps_tensors(node) for node in nodes)

    def settle(self) -> dict[int, Tensor]:
        """Release all memory of the tape after the forward unit.

        Returns:
            Storages saved by the graph, to be kept; see `KeptActivations.settle`.
        """
        for leaf in (*self._live_in.values(), *self._parameters.values()):
            # The leaf stays a node of the graph; only its memory goes, because the operand may move between the units.
            leaf.data = leaf.new_empty(0)
        return self._saved.settle()

    def backward(
        self,
        shard: ShardGraph,
        operands: ShardOperands,
        incoming: IncomingGradients,
        kept: Callable[[int], Tensor],
        on_free: Callable[[int], None],
    ) -> ShardGradients:
        """Run the backward; only once.

        `kept` returns the storage kept under a number, and `on_free` receives the number of each storage no longer
        needed by the graph.
        """
        _point(self._live_in, shard.live_in, operands.live_in)
        _point(self._parameters, shard.state, operands.state)
        roots: list[_Root] = [(self._outputs[n], g) for n, g in incoming.outputs.items() if n in self._outputs]
        roots += [(self._live_in[n], g) for n, g in incoming.live_in.items() if n in self._live_in]
        roots += [(self._parameters[n], g) for n, g in incoming.parameters.items() if n in self._parameters]
        # From here on only `roots` holds the graph, which is gone once the backward has run.
        self._outputs.clear()
        self._saved.present(operands.all, kept, on_free)
        try:
            _run_backward(roots)
        finally:
            self._saved.absent()
        return ShardGradients(live_in=_taken(self._live_in), parameters=_taken(self._parameters), outputs={})


class ShardExecutor(Protocol):
    """Runner of shards: this module, `shard/fake/fake_memo.py` with remembered results, or a runner of a fused group."""

    def forward(
        self, shard: ShardGraph, operands: ShardOperands, needs_gradient: frozenset[str] | None = None
    ) -> dict[str, Tensor]:
        """As `forward` of this module."""

    def taped_forward(
        self, shard: ShardGraph, operands: ShardOperands, needs_gradient: frozenset[str]
    ) -> tuple[dict[str, Tensor], ShardTape]:
        """As `taped_forward` of this module."""

    def backward(
        self,
        shard: ShardGraph,
        operands: ShardOperands,
        *,
        needs_gradient: frozenset[str],
        incoming: IncomingGradients,
        objective: Objective = loss_itself,
    ) -> ShardGradients:
        """As `backward` of this module."""


def _point(leaves: Mapping[str, Tensor], names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Point leaves at tensors; autograd gives a leaf's gradient the layout of the tensor."""
    for name, tensor in zip(names, tensors, strict=True):
        if name in leaves:
            leaves[name].data = tensor.detach()


def taped_forward(
    shard: ShardGraph, operands: ShardOperands, needs_gradient: frozenset[str]
) -> tuple[dict[str, Tensor], ShardTape]:
    """Run a shard like `forward` in training, and keep its graph.

    Returns:
        Tensor by name of `shard.live_out`, and the graph, which must be settled.

    Raises:
        NotKeepableError: the graph saves a tensor that cannot be kept.
    """
    leaves = _leaves(shard, operands, needs_gradient)
    # Separate leaves, so that the gradients do not land in the `.grad` of the trial's parameters.
    parameters = {
        name: tensor.detach().requires_grad_()
        for name, tensor in zip(shard.state, operands.state, strict=True)
        if tensor.requires_grad
    }
    state = [parameters.get(name, tensor) for name, tensor in zip(shard.state, operands.state, strict=True)]
    saved = KeptActivations(operands.all)
    with torch.enable_grad(), saved.hooks():
        arguments = _arguments(shard, leaves)
        output_tensors = shard.module(*state, *operands.constants, *operands.inputs, *arguments)
        outputs = dict(zip(shard.live_out, output_tensors, strict=True))
        outputs_with_gradient = {name: output for name, output in outputs.items() if output.requires_grad}
        tape = ShardTape(
            {n: leaf for n, leaf in leaves.items() if leaf.requires_grad}, parameters, outputs_with_gradient, saved
        )
    return {name: output.detach() for name, output in outputs.items()}, tape


def backward(
    shard: ShardGraph,
    operands: ShardOperands,
    *,
    needs_gradient: frozenset[str],
    incoming: IncomingGradients,
    objective: Objective = loss_itself,
) -> ShardGradients:
    """Run a shard with gradients, then its backward.

    Parameters are leaves, and their `.grad` is taken over and left None. `objective` maps the loss to the root of the
    backward.
    """
    leaves = _leaves(shard, operands, needs_gradient)
    state = list(zip(shard.state, operands.state, strict=True))
    parameters = {name: tensor for name, tensor in state if tensor.requires_grad}
    with torch.enable_grad():
        arguments = _arguments(shard, leaves)
        output_tensors = shard.module(*operands.state, *operands.constants, *operands.inputs, *arguments)
        # Asked again, because the user's code may thaw parameters in its forward.
        parameters |= {name: tensor for name, tensor in state if tensor.requires_grad}
        outputs = dict(zip(shard.live_out, output_tensors, strict=True))
        roots: list[_Root] = [
            (objective(outputs[name]) if gradient is None else outputs[name], gradient)
            for name, gradient in incoming.outputs.items()
            if outputs[name].requires_grad
        ]
    roots += [(leaves[name], gradient) for name, gradient in incoming.live_in.items() if name in leaves]
    roots += [(parameters[name], gradient) for name, gradient in incoming.parameters.items() if name in parameters]
    # Copied, because a loss may keep the storage of its unreduced form alive.
    losses = {name: outputs[name].detach().clone() for name, gradient in incoming.outputs.items() if gradient is None}
    # The user's own code in place of a graph is followed by a mode.
    is_followed = not isinstance(shard.module, nn.Module)
    is_left = is_followed and any(isinstance(root, Tensor) and rounds_otherwise_under_modes(root) for root, _ in roots)
    with _disable_current_modes() if is_left else nullcontext():
        _run_backward(roots)
    return ShardGradients(live_in=_taken(leaves), parameters=_taken(parameters), outputs=losses)


_Root = tuple[Tensor | GradientEdge, Tensor | None]
"""Start of a backward and its gradient; None for the loss."""


def rounds_otherwise_under_modes(root: Tensor) -> bool:
    """Whether torch takes another way to a gradient of a root, which rounds differently, while a dispatch mode is active.

    So do the gradients of `prod`, and of `masked_fill` with a tensor as value.
    """
    return any(node.name().startswith(("ProdBackward", "MaskedFillBackward1")) for node in backward_nodes(root.grad_fn))


def backward_nodes(*roots: Any) -> Iterator[Any]:
    """Iterate over the nodes of an autograd graph that begins at some nodes, each once, in no particular order."""
    visited: set[Any] = {None}
    # A list and not a recursion, because a graph may be deeper than Python's stack.
    unvisited = list(roots)
    while unvisited:
        node = unvisited.pop()
        if node in visited:
            continue
        visited.add(node)
        unvisited += [following for following, _ in node.next_functions]
        yield node


def _run_backward(roots: Sequence[_Root]) -> None:
    if roots:
        starts: Any = [root for root, _ in roots]
        torch.autograd.backward(starts, [gradient for _, gradient in roots])


def _taken(leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of leaves, and remove the gradients from the leaves."""
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    for leaf in leaves.values():
        leaf.grad = None
    return gradients
