"""Finds the nodes of a captured graph that draw random numbers, and names the arguments of nodes.

`analyse` (`graph_analysis.py`) asks about each node of a new capture, and `opaque_call` (`shard/capture/opaque_call.py`)
about each operator of a user's own Function. `rng_consumption.py` asks when the draws of a graph are counted, and
`shard/verify/value_numbering.py` when a plan is checked. `fusion/matching/plan_diff.py` and the modules of `fusion/ragged/`
read nodes' arguments or draws when graphs of trials are compared, `fusion/batching/batched_graph.py` when graphs are stacked,
and `planner/trace/step_graph.py` when a step is traced. In doubt an operator counts as drawing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

_DROPOUT_SWITCHES = {
    # Operators that draw random numbers only if one of their arguments says so: argument name -> value when they do not.
    "aten::dropout": (("p", 0.0), ("train", False)),
    "aten::native_dropout": (("p", 0.0), ("train", False)),
    "aten::feature_dropout": (("p", 0.0), ("train", False)),
    "aten::alpha_dropout": (("p", 0.0), ("train", False)),
    "aten::feature_alpha_dropout": (("p", 0.0), ("train", False)),
    "aten::scaled_dot_product_attention": (("dropout_p", 0.0),),
    "aten::_scaled_dot_product_flash_attention": (("dropout_p", 0.0),),
    "aten::_scaled_dot_product_flash_attention_for_cpu": (("dropout_p", 0.0),),
    "aten::_scaled_dot_product_efficient_attention": (("dropout_p", 0.0),),
    "aten::_scaled_dot_product_cudnn_attention": (("dropout_p", 0.0),),
    "aten::rrelu": (("training", False),),
    "aten::rrelu_with_noise": (("training", False),),
    "aten::lstm": (("dropout", 0.0), ("train", False)),
    "aten::gru": (("dropout", 0.0), ("train", False)),
    "aten::rnn_tanh": (("dropout", 0.0), ("train", False)),
    "aten::rnn_relu": (("dropout", 0.0), ("train", False)),
}
_TAGGED = frozenset({"aten", "prims", "prim", "profiler", "quantized", "torchvision"})
"""Namespaces whose operators have torch's tag if they draw. Other operators may draw without the tag."""


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether running the node may move a random generator."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):  # noqa: SLF001 - the public type of aten operators
        # A higher-order operator draws if its body draws, and an `OpaqueCall` says whether its operators may draw.
        return getattr(target, "may_draw", False) or any(
            _subgraph_is_stochastic(node, argument) for argument in node.all_input_nodes
        )
    return draws_with(target, node.args, node.kwargs)


def draws_with(operator: OpOverload[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator may move a random generator when called with the given arguments."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return hides_draws(operator)
    named = _named(operator, args, kwargs)
    switches = _DROPOUT_SWITCHES.get(operator._schema.name, ())  # noqa: SLF001
    # Without switches an operator always draws, as `all` of nothing is true.
    return all(named.get(argument) != value for argument, value in switches)


def hides_draws(operator: OpOverload[..., Any]) -> bool:
    """Whether an operator has code of a user or of another library that may draw, and no tag of torch that says so."""
    return is_foreign(operator) and torch.Tag.nondeterministic_seeded not in operator.tags


def is_foreign(target: object) -> bool:
    """Whether a node's function is none of torch's, so that nobody can see when in a run the function draws."""
    return getattr(target, "may_draw", False) or (isinstance(target, OpOverload) and target.namespace not in _TAGGED)


def _subgraph_is_stochastic(node: fx.Node, argument: fx.Node) -> bool:
    body = body_of(node, argument)
    return body is not None and any(draws_random_numbers(n) for n in body.graph.nodes if n.op == "call_function")


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """Return a node's arguments by their names in the schema."""
    return _named(node.target, node.args, node.kwargs)  # type: ignore[arg-type]


def _named(operator: OpOverload[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        argument.name: args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
        for position, argument in enumerate(operator._schema.arguments)  # noqa: SLF001
    }


def body_of(node: fx.Node, argument: object) -> fx.GraphModule | None:
    """Return the body of a higher-order operator if the argument names a body, else None."""
    if not isinstance(argument, fx.Node) or argument.op != "get_attr":
        return None
    body = getattr(node.graph.owning_module, str(argument.target), None)
    return body if isinstance(body, fx.GraphModule) else None
