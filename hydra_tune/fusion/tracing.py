"""The forward and backward of a stacked shard as one flat graph, without autograd and `torch.vmap` at run time.

For small models most of a step is not arithmetic but what comes before it: dispatch through `torch.vmap`, and autograd's
bookkeeping. Both are the same at each step, so they are done once, on tensors without bytes, and what operators they come to is
kept. Random numbers are arguments of the graph: what a shard draws is noted, and drawn before it runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from hydra_tune.devices.own_generator import own_generator
from hydra_tune.fusion.drawing import GroupGenerator, Noise, given, noting
from hydra_tune.shard.compute import Gradients, Operands

_SAME = frozenset([torch.ops.aten.detach.default, torch.ops.aten.alias.default])
_VIEWS = frozenset(
    [torch.ops.aten.view.default, torch.ops.aten.expand.default, torch.ops.aten._unsafe_view.default]  # noqa: SLF001
)
_TRANSPOSE, _PRODUCT = torch.ops.aten.transpose.int, torch.ops.aten.bmm.default


@dataclass(frozen=True, slots=True)
class Traced:
    """A shard's forward and backward, traced.

    Attributes:
        module: takes the operands and the noise, returns the losses and the gradients of `trained`.
        trained: the parameters that have gradients.
        noise: what it draws.
        loss: the name of the losses.
    """

    module: fx.GraphModule
    trained: tuple[str, ...]
    noise: tuple[Noise, ...]
    loss: str

    def draw(self, device: torch.device) -> list[Tensor]:
        """The random numbers of one run."""
        if not self.noise:
            return []
        group = own_generator()
        assert isinstance(group, GroupGenerator), "stacked members draw from generators of their own"
        return [one.draw(group, device) for one in self.noise]

    def run(self, operands: Operands, noise: Sequence[Tensor] | None = None) -> Gradients:
        """The gradients of each member's loss, and the losses.

        Args:
            operands: of the shard.
            noise: its random numbers, if they have been drawn.
        """
        if noise is None:
            noise = self.draw(operands.all[0].device)
        with torch.no_grad():
            losses, *gradients = self.module(*operands.all, *noise)
        return Gradients(
            live_in={}, parameters=dict(zip(self.trained, gradients, strict=True)), outputs={self.loss: losses}
        )


def traced_forward(run: Any, operands: Operands) -> fx.GraphModule:
    """Trace a shard that draws nothing, without gradients.

    Args:
        run: the stacked shard.
        operands: tensors of the sizes to trace for.

    Returns:
        What takes the operands and returns the shard's outputs.
    """
    with torch.no_grad():
        module = make_fx(run, tracing_mode="fake")(*(tensor.detach() for tensor in operands.all))
    _tidy(module)
    return module


def traced(
    run: Any, names: Sequence[str], operands: Operands, trains: Sequence[bool], loss: str, count: int
) -> Traced | None:
    """Trace a shard that makes nothing but the loss; None where it draws numbers that depend on values.

    Args:
        run: the stacked shard.
        names: of its parameters and buffers.
        operands: tensors of the sizes to trace for; only their geometry counts.
        trains: for each of the names, whether its gradient is wanted.
        loss: what the shard's output is called.
        count: members.
    """
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(tensor.detach()) for tensor in operands.all]
    with mode, torch.no_grad(), noting() as noted:
        run(*fakes)
    if not noted.is_hoistable:
        return None
    with mode:
        noise = [n.room(count, fakes[0].device) for n in noted.found]
    places = [place for place, one in enumerate(trains) if one]
    reached: list[int] = []

    def joint(*tensors: Tensor) -> list[Tensor]:
        own = list(tensors[: len(fakes)])
        for place in places:
            own[place] = own[place].detach().requires_grad_()
        with given(tensors[len(fakes) :]), torch.enable_grad():
            (losses,) = run(*own)
            gradients = torch.autograd.grad(losses.sum(), [own[place] for place in places], allow_unused=True)
        reached[:] = [place for place, g in zip(places, gradients, strict=True) if g is not None]
        return [losses, *(gradient for gradient in gradients if gradient is not None)]

    module = make_fx(joint, tracing_mode="fake")(*fakes, *noise)
    _tidy(module)
    return Traced(module, tuple(names[place] for place in reached), tuple(noted.found), loss)


def _tidy(module: fx.GraphModule) -> None:
    """Leave out nodes that give back what they are given, and have products made the way round that they are wanted."""
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            continue
        if node.target in _SAME or (node.target in _VIEWS and _are_alike(node.meta.get("val"), source.meta.get("val"))):
            node.replace_all_uses_with(source)
            module.graph.erase_node(node)
        elif node.target is _TRANSPOSE and source.target is _PRODUCT and len(source.users) == 1:
            _turn(module.graph, node, source)
    module.graph.eliminate_dead_code()
    module.recompile()


def _turn(graph: fx.Graph, node: fx.Node, product: fx.Node) -> None:
    """The transpose of a product is the product of the transposes, and lies as it is read."""
    if set(node.args[1:]) not in ({1, 2}, {-1, -2}):
        return
    left, right = product.args
    assert isinstance(left, fx.Node), "a product is of tensors"
    assert isinstance(right, fx.Node), "a product is of tensors"
    with graph.inserting_before(node):
        turned = graph.call_function(_PRODUCT, (_transposed(graph, right), _transposed(graph, left)))
    turned.meta = dict(node.meta)
    node.replace_all_uses_with(turned)
    graph.erase_node(node)
    graph.erase_node(product)


def _transposed(graph: fx.Graph, node: fx.Node) -> fx.Node:
    if node.target is _TRANSPOSE and set(node.args[1:]) == {1, 2}:
        (source,) = node.all_input_nodes
        return source
    return graph.call_function(_TRANSPOSE, (node, 1, 2))


def _are_alike(a: object, b: object) -> bool:
    return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.stride() == b.stride()
