"""Random operators of captured graphs, made to draw from a generator of the trial instead of torch's default one.

Torch's CPU operators share one default generator, so units that draw from it take turns. All of torch's random primitives can
draw from another generator, but the operators made of them (dropout, attention) do not say so. So each random operator of a
graph is recorded, while the graph runs on fake tensors, as the primitives that torch makes of it, and those that draw are given
a generator. Running the record is running the operator, gradients included: torch itself takes composite operators apart above
autograd. The records know no trial: a run takes the generator that its thread draws from (`drawing_from`).

Where a thread has no generator of its own, as on GPUs, the operator itself runs. It keeps all its temporaries until it returns,
the record each until its last use, so what the pilot measures with the operator is enough for both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hydra_tune.devices.cpu import own_generator
from hydra_tune.shard.stochastic import body_of, draws_random_numbers

_LOOPS = frozenset(
    # One call of a primitive per time step and layer: slower one by one from Python than taking turns.
    f"aten::{name}"
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
)
_COUNTED = frozenset(
    # Random primitives that move the generator by as much whatever the values they are given and wherever it stands.
    [torch.ops.aten.bernoulli_.float, torch.ops.aten.bernoulli.p, torch.ops.aten.bernoulli.default]
)
_REGIONS = (
    # Operators whose body runs once, as it stands.
    torch.ops.higher_order.wrap_with_set_grad_enabled,
    torch.ops.higher_order.wrap_with_autocast,
)


class Draw(nn.Module):
    """Stands for one random operator, as a function of the tensors it is given."""

    def __init__(self, operator: fx.Graph, record: fx.Graph) -> None:
        super().__init__()
        self._operator = fx.GraphModule({}, operator)
        self._record = fx.GraphModule({}, record)

    @property
    def is_counted(self) -> bool:
        """Whether it moves the generator by as much whatever tensors it is given."""
        targets = [node.target for node in self._record.graph.nodes if node.op == "call_function"]
        return all(
            target in _COUNTED
            for target in targets
            if isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags
        )

    def forward(self, *tensors: Tensor) -> Tensor:
        """The operator's result, drawn from the thread's own generator if it has one."""
        generator = own_generator()
        if generator is None:
            return self._operator.forward(*tensors)  # type: ignore[no-any-return]
        if not torch.is_autocast_enabled("cpu"):
            return self._record.forward(generator, *tensors)  # type: ignore[no-any-return]
        # What autocast casts for the operator is in the record, and inside of it torch casts nothing more.
        torch.set_autocast_enabled("cpu", False)
        try:
            return self._record.forward(generator, *tensors)  # type: ignore[no-any-return]
        finally:
            torch.set_autocast_enabled("cpu", True)


@dataclass(slots=True, kw_only=True)
class Draws:
    """Stand-ins for the random operators of a graph.

    Attributes:
        operators: node -> its stand-in; a random operator that cannot be recorded is missing.
        bodies: node that names the body of a region -> that body with its random operators replaced.
    """

    operators: dict[fx.Node, Draw] = field(default_factory=dict)
    bodies: dict[fx.Node, fx.GraphModule] = field(default_factory=dict)

    def cover(self, nodes: Sequence[fx.Node]) -> bool:
        """Whether every random operator among some nodes has a stand-in."""
        return all(
            node in self.operators or any(argument in self.bodies for argument in node.all_input_nodes)
            for node in nodes
            if node.op == "call_function" and draws_random_numbers(node)
        )

    def are_counted(self, nodes: Sequence[fx.Node]) -> bool:
        """Whether the stand-ins for some nodes all move the generator by as much at each run."""
        found = [self.operators[node] for node in nodes if node in self.operators]
        for node in nodes:
            for body in (self.bodies[argument] for argument in node.all_input_nodes if argument in self.bodies):
                found += [module for module in body.modules() if isinstance(module, Draw)]
        return all(draw.is_counted for draw in found)

    def copy(self, graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """Copy a node to another graph, or its stand-in."""
        if node not in self.operators:
            return graph.node_copy(node, lambda argument: copies[argument])
        return graph.create_node(
            "call_module", _attribute(node), tuple(copies[n] for n in node.all_input_nodes), name=node.name
        )

    def attributes(self, nodes: Sequence[fx.Node]) -> dict[str, Any]:
        """What copies of some nodes, attributes among them, find in their module."""
        found: dict[str, Any] = {}
        for node in nodes:
            if node.op == "get_attr":
                original = getattr(node.graph.owning_module, str(node.target))
                found[str(node.target)] = self.bodies.get(node, original)
            elif node in self.operators:
                found[_attribute(node)] = self.operators[node]
        return found


def _attribute(node: fx.Node) -> str:
    return f"draw_{node.name}"


class DrawFinder(fx.Interpreter):
    """Runs a graph and records its random operators on the way.

    Args:
        module: the graph.
        draws: takes what is found.
    """

    def __init__(self, module: fx.GraphModule, draws: Draws) -> None:
        super().__init__(module)
        self._draws = draws

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        if n.op != "call_function" or not draws_random_numbers(n):
            return super().run_node(n)
        if isinstance(n.target, OpOverload):
            return self._record(n, n.target)
        if isinstance(n.target, HigherOrderOperator) and n.target in _REGIONS:
            return self._enter(n, n.target)
        return super().run_node(n)

    def _record(self, n: fx.Node, target: OpOverload[..., Any]) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        tensors = [self.env[argument] for argument in n.all_input_nodes]
        if target._schema.name in _LOOPS or not all(isinstance(t, Tensor) for t in tensors):  # noqa: SLF001
            return target(*args, **kwargs)
        recorder = _Recorder(tensors)
        with recorder:
            result = target(*args, **kwargs)
        record = recorder.record(result)
        if record is not None:
            self._draws.operators[n] = Draw(_alone(n), record)
        return result

    def _enter(self, n: fx.Node, target: HigherOrderOperator) -> Any:
        """Run a region, body included, and put a copy of the body in its place if all of it could be recorded."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        runs: list[Any] = list(args)
        for position, argument in enumerate(n.args):
            body = body_of(n, argument)
            if body is None:
                continue
            assert isinstance(argument, fx.Node)
            inside = Draws()
            runs[position] = DrawFinder(body, inside).run
            result = target(*runs, **kwargs)
            if inside.cover(list(body.graph.nodes)):
                self._draws.bodies[argument] = _replaced(body, inside)
            return result
        return target(*args, **kwargs)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the primitives that one operator runs, with a generator for those that draw.

    Autograd runs some of its own: it detaches what it keeps, and makes views anew whose base was overwritten. A replay above
    autograd brings these about by itself, so they are not noted; nor is what depends on them.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = fx.Graph()
        self._generator = self._graph.placeholder("generator")
        self._nodes = {id(t): self._graph.placeholder(f"tensor_{i}") for i, t in enumerate(tensors)}
        self._alive = list(tensors)  # told apart by identity, so none may be freed
        self._possible = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "prim" and func is not torch.ops.aten.detach.default:  # prim: questions, as for the device
            self._possible = self._possible and self._note(func, args, kwargs or {}, result)
        return result

    def record(self, result: Any) -> fx.Graph | None:
        """The record, or None if the operator cannot be replayed with a generator."""
        node = self._nodes.get(id(result))
        if not self._possible or node is None:
            return None
        self._graph.output(node)
        self._graph.lint()
        return self._graph

    def _note(self, func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
        """Note one primitive; returns False if none like it can be replayed."""
        draws = torch.Tag.nondeterministic_seeded in func.tags
        primitive = _drawing(func) if draws else func
        if primitive is None or not isinstance(result, Tensor):
            return False
        self._alive.append(result)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not all(id(tensor) in self._nodes for tensor in given):
            return not (draws or func._schema.is_mutable)  # noqa: SLF001
        noted_args, noted_kwargs = tree_map(self._node, (args, kwargs))
        if draws:
            noted_kwargs["generator"] = self._generator
        self._nodes[id(result)] = self._graph.call_function(primitive, noted_args, noted_kwargs)
        return True

    def _node(self, value: Any) -> Any:
        return self._nodes[id(value)] if isinstance(value, Tensor) else value


def _drawing(func: OpOverload[..., Any]) -> OpOverload[..., Any] | None:
    """The overload of a random primitive that takes a generator, and else the same arguments."""
    packet: Any = func._overloadpacket  # noqa: SLF001
    for candidate in (func, *(getattr(packet, name) for name in packet.overloads())):
        takes = _signature(candidate)
        if takes.pop("generator", None) is not None and takes == _signature(func, but="generator"):
            return candidate  # type: ignore[no-any-return]
    return None


def _signature(func: OpOverload[..., Any], but: str = "") -> dict[str, str]:
    return {a.name: str(a.type) for a in func._schema.arguments if a.name != but}  # noqa: SLF001


def _alone(node: fx.Node) -> fx.Graph:
    """A graph of one operator on the tensors it is given."""
    graph = fx.Graph()
    copies = {argument: graph.placeholder(argument.name) for argument in node.all_input_nodes}
    graph.output(graph.node_copy(node, lambda argument: copies[argument]))
    return graph


def _replaced(body: fx.GraphModule, draws: Draws) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in body.graph.nodes:
        copies[node] = draws.copy(graph, node, copies)
    return fx.GraphModule(draws.attributes(list(body.graph.nodes)), graph)
