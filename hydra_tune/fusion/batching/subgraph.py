"""Parts of a shard's captured graph: its arguments, its operators, and a subset of operators as a separate graph.

`tails_of` (`fusion/ragged/loss_heads.py`) cuts heads out of graphs when plans with different losses are compared;
`fusion/ragged/multi_head_graph.py` cuts out the common beginning when a group's plan is made, and
`fusion/matching/plan_diff.py` compares arguments and operators. Graphs here are those of plans with a single shard. The
module must not know trials, groups or pools, and leaves the graphs that come in unchanged.
"""

from collections.abc import Sequence

from torch import Tensor, fx

from hydra_tune.errors import UnfusableError
from hydra_tune.shard.partition.subgraph import ShardGraph, copy_nodes


def arguments_of(graph: ShardGraph) -> list[tuple[str, str | int]]:
    """Return kind and name of every argument of a shard's code, in order; the shard takes no values of other shards."""
    return [
        *(("state", name) for name in graph.state),
        *(("constant", name) for name in graph.constants),
        *(("input", index) for index in graph.inputs),
    ]


def placeholders_of(code: fx.GraphModule) -> list[fx.Node]:
    """Return the arguments of a shard's code."""
    return [node for node in code.graph.nodes if node.op == "placeholder"]


def operators_of(code: fx.GraphModule) -> list[fx.Node]:
    """Return the operator nodes of a shard's code, in order of execution."""
    return [node for node in code.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]


def value_of(node: fx.Node) -> Tensor:
    """Return the tensor that an operator produced during capture.

    Raises:
        UnfusableError: the operator produces several tensors.
    """
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        raise UnfusableError(
            f"its graph differs from the others' right after {node.target}, which returns several tensors"
        )
    return value


def part_of(
    code: fx.GraphModule, begins: Sequence[fx.Node], nodes: Sequence[fx.Node], ends: Sequence[fx.Node]
) -> fx.GraphModule:
    """Return the operators `nodes` of a graph as a graph with the arguments `begins` and the outputs `ends`."""
    graph = fx.Graph()
    # Bodies of regions are attributes of the graph, and a part copies only those that it runs.
    used_nodes = {argument for node in nodes for argument in node.all_input_nodes}
    attributes = [node for node in code.graph.nodes if node.op == "get_attr" and node in used_nodes]
    copy_nodes(graph, {}, begins, attributes, nodes, ends)
    return fx.GraphModule(code, graph)
