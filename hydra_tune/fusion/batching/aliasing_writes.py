"""Find writes whose effect depends on how a tensor lies in memory.

Stacked members may lie otherwise than a member alone: behind a convolution the channels of all members are innermost, and
`flatten` copies such a tensor. So `flatten(h).relu_()` changes `h` in a member's own run, and a copy of `h` in a group.
`StackedGraph` (`batched_graph.py`) makes the search when a graph is stacked, refuses a graph with such a write, asks
`overwritten` which views must be open to writes, and calls `named`. The module must not know trials, groups or pools, and runs
no operator.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from hydra_tune.fusion.batching.batching_rules import VIEWS

aten: Any = torch.ops.aten
_COPIES_OR_VIEWS = frozenset([*VIEWS, aten.contiguous.default])
GraphCall = tuple[fx.Node, Sequence[Any], dict[str, Any]]
"""A node with its positional arguments and its keywords."""


class MemoryWrites:
    """Writes of a graph.

    Args:
        calls: the nodes of the graph, in order of execution.
        arguments: the graph's arguments; they lie stacked as alone.

    Attributes:
        hidden: the first node whose write a later node or a result sees or not, depending on the layout; None if there is
            none.
        overwritten: nodes whose memory another node overwrites, or may overwrite.
    """

    def __init__(self, calls: Sequence[GraphCall], arguments: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> None:
        self.hidden: fx.Node | None = None
        self.overwritten: set[fx.Node] = set()
        last_reads = dict.fromkeys(outputs, len(calls))
        for position, (_, positional, keywords) in reversed(list(enumerate(calls))):
            for node in _nodes((positional, keywords)):
                last_reads.setdefault(node, position)
        # The nodes that surely share memory, by node.
        memory: dict[fx.Node, set[fx.Node]] = {node: {node} for node in arguments}
        ordinary = set(arguments)  # nodes that lie stacked as alone
        doubtful: list[tuple[fx.Node, fx.Node]] = []  # a node, and its copy or view
        for position, (node, positional, keywords) in enumerate(calls):
            for written in _written(node, positional, keywords):
                reached = _reached(memory, doubtful, written)
                self.overwritten |= reached
                others = reached - memory[written]
                if self.hidden is None and any(last_reads.get(other, -1) > position for other in others):
                    self.hidden = node
            memory[node] = {node}
            if not node.all_input_nodes:
                ordinary.add(node)
            for source in _sources(node, positional, keywords):
                if node.target in _COPIES_OR_VIEWS and ordinary.isdisjoint(memory[source]):
                    doubtful.append((source, node))
                    continue
                merged = memory[source] | memory[node]
                memory.update(dict.fromkeys(merged, merged))


def _reached(
    memory: dict[fx.Node, set[fx.Node]], doubtful: Sequence[tuple[fx.Node, fx.Node]], node: fx.Node
) -> set[fx.Node]:
    """Return the nodes that share memory with a node, or may share memory."""
    reached, grows = set(memory[node]), True
    while grows:
        size = len(reached)
        for pair in doubtful:
            if not reached.isdisjoint(pair):
                reached.update(*(memory[end] for end in pair))
        grows = len(reached) > size
    return reached


def _nodes(value: Any) -> Iterator[fx.Node]:
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, fx.Node))


def named(
    target: OpOverload[..., Any], positional: Sequence[Any], keywords: Mapping[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """Yield the arguments of an operator's schema that a call gives, each with its value."""
    schema = target._schema.arguments  # noqa: SLF001
    yield from zip(schema, positional, strict=False)
    yield from ((argument, keywords[argument.name]) for argument in schema if argument.name in keywords)


def _written(node: fx.Node, positional: Sequence[Any], keywords: dict[str, Any]) -> Iterator[fx.Node]:
    """Yield the arguments that a node overwrites."""
    if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:  # noqa: SLF001
        for argument, value in named(node.target, positional, keywords):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from _nodes(value)


def _sources(node: fx.Node, positional: Sequence[Any], keywords: dict[str, Any]) -> Iterator[fx.Node]:
    """Yield the arguments whose memory a node's value shares or may share."""
    if not isinstance(node.target, OpOverload):
        yield from _nodes((positional, keywords))  # such as `getitem`, or a region, whose results are passed on
        return
    for argument, value in named(node.target, positional, keywords):
        if argument.alias_info is not None:
            yield from _nodes(value)
