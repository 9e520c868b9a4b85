"""A captured graph on stacked members: every node as one call for all of them.

Each value is either stacked, with the members in front, or shared by all members (what is made of constants alone). A node of
shared values runs as it is. One of stacked values runs by its rule (`rules.py`), by `drawing.drawn` where it draws random
numbers, or else under `torch.vmap`.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from hydra_tune.errors import UnfusableError
from hydra_tune.fusion.drawing import drawn
from hydra_tune.fusion.recording import recorded
from hydra_tune.fusion.rules import RULES
from hydra_tune.shard.stochastic import draws_random_numbers

_CHECKS = frozenset([torch.ops.aten._assert_tensor_metadata.default])  # noqa: SLF001 - of what holds for every batch of the kind
_LEFT_OUT = frozenset(
    # What torch runs for one member after the other under `vmap`, and not for all dtypes.
    f"aten::{name}"
    for name in ("embedding_bag", "_embedding_bag", "lstm", "gru", "rnn_tanh", "rnn_relu")
)

_LOOPS = ("aten.lstm", "aten.gru", "aten.rnn_")

_Run = Callable[[int, Sequence[Any], dict[str, Any]], Any]
"""Number of members, arguments and keywords of a node -> its value."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One node: what it runs, on which nodes' values, and whose values nobody needs afterwards."""

    node: fx.Node
    run: _Run
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    last_uses: tuple[fx.Node, ...]


class StackedGraph:
    """Runs a graph for all members at once.

    Args:
        module: the graph, for one member.
        is_stacked: of each of its arguments, whether it has the members in front.

    Raises:
        UnfusableError: it has a node that cannot be run so; the message names it.
    """

    def __init__(self, module: fx.GraphModule, is_stacked: Sequence[bool]) -> None:
        self._module = module
        self._stacked: set[fx.Node] = set()
        self._arguments: list[fx.Node] = []
        self._planned: list[tuple[fx.Node, _Run, tuple[Any, ...], dict[str, Any]]] = []
        self._outputs: tuple[fx.Node, ...] = ()
        flags = iter(is_stacked)
        for node in module.graph.nodes:
            self._add(node, flags)
        self._first = list(is_stacked).index(True)
        self._calls = self._with_last_uses()

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        """The graph's outputs, all with the members in front."""
        count = arguments[self._first].size(0)
        values: dict[fx.Node, Any] = dict(zip(self._arguments, arguments, strict=True))
        for call in self._calls:
            found = [fx.node.map_arg(argument, values.__getitem__) for argument in call.arguments]
            keywords = {name: fx.node.map_arg(value, values.__getitem__) for name, value in call.keywords.items()}
            values[call.node] = call.run(count, found, keywords)
            found.clear()
            for node in call.last_uses:
                del values[node]
        return tuple(
            values[node] if node in self._stacked else _expanded(values[node], count) for node in self._outputs
        )

    def _add(self, node: fx.Node, flags: Any) -> None:
        if node.op == "placeholder":
            self._arguments.append(node)
            if next(flags):
                self._stacked.add(node)
        elif node.op == "output":
            (self._outputs,) = node.args  # type: ignore[assignment]
        elif node.op == "call_function" and isinstance(node.target, OpOverload) and draws_random_numbers(node):
            self._add_draw(node)
        elif node.op == "call_function" and node.target not in _CHECKS:
            self._add_call(node, node.args, node.kwargs)
        elif node.op == "get_attr":
            raise UnfusableError(
                f"{node.target} is a region with a body of its own, which cannot run for several trials"
            )

    def _add_draw(self, node: fx.Node) -> None:
        """A random operator, primitive by primitive."""
        record = None if str(node.target).startswith(_LOOPS) else recorded(node)
        if record is None:
            raise UnfusableError(f"{_told(node)} draws random numbers in a way that cannot be told apart by trial")
        placed: dict[fx.Node, Any] = {}
        given = iter(node.all_input_nodes)
        for one in record.nodes:
            if one.op == "placeholder":
                placed[one] = None if one.name == "generator" else next(given)
            elif one.op == "output":
                self._alias(node, placed[one.args[0]])
            else:
                arguments = fx.node.map_arg(one.args, placed.__getitem__)
                keywords = {key: fx.node.map_arg(value, placed.__getitem__) for key, value in one.kwargs.items()}
                placed[one] = one
                self._add_call(one, arguments, keywords)

    def _alias(self, node: fx.Node, value: fx.Node) -> None:
        if value in self._stacked:
            self._stacked.add(node)
        self._planned.append((node, lambda _count, found, _keywords: found[0], (value,), {}))

    def _add_call(self, node: fx.Node, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        target = node.target
        if target is operator.getitem:
            if arguments[0] in self._stacked:
                self._stacked.add(node)
            self._planned.append((node, lambda _count, found, _keywords: found[0][found[1]], arguments, keywords))
            return
        if not isinstance(target, torch._ops.OpOverload):  # noqa: SLF001 - the public type of aten operators
            raise UnfusableError(f"{_told(node)} is no plain operator and cannot run for several trials at once")
        if target._schema.name in _LEFT_OUT:  # noqa: SLF001
            raise UnfusableError(f"{_told(node)} has no form for several trials at once")
        if "generator" in keywords:
            keywords = {key: value for key, value in keywords.items() if key != "generator"}
            self._stacked.add(node)
            run = _drawing(target, [self._is_stacked(argument) for argument in arguments])
        elif self._is_stacked((arguments, keywords)):
            self._stacked.add(node)
            self._check_overwritten(node, target, arguments)
            run = self._for_all(target, arguments, keywords)
        elif _is_made_to_be_overwritten(node):
            self._stacked.add(node)
            run = _once(target, expands=True)
        else:
            run = _once(target, expands=False)
        self._planned.append((node, run, arguments, keywords))

    def _for_all(self, target: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> _Run:
        leaves = [leaf for leaf in pytree.tree_leaves((arguments, keywords)) if isinstance(leaf, fx.Node)]
        stacked = [leaf in self._stacked for leaf in leaves]
        rule = RULES.get(target)

        def run(count: int, found: Sequence[Any], given: dict[str, Any]) -> Any:
            if rule is not None:
                flags = iter(stacked)
                wide = pytree.tree_map_only(
                    Tensor, lambda t: t if next(flags) else _expanded(t, count), (tuple(found), given)
                )
                made = rule(*wide[0], **wide[1])
                if made is not None:
                    return made
            return _mapped(target, found, given, stacked)

        return run

    def _check_overwritten(self, node: fx.Node, target: Any, arguments: tuple[Any, ...]) -> None:
        """Refuse a node that writes members' values into what they share."""
        for position, declared in enumerate(target._schema.arguments):  # noqa: SLF001
            written = declared.alias_info is not None and declared.alias_info.is_write
            if written and position < len(arguments) and not self._is_stacked(arguments[position]):
                raise UnfusableError(f"{_told(node)} overwrites a tensor that does not depend on the trial")

    def _is_stacked(self, value: Any) -> bool:
        return any(leaf in self._stacked for leaf in pytree.tree_leaves(value) if isinstance(leaf, fx.Node))

    def _with_last_uses(self) -> list[_Call]:
        last: dict[fx.Node, int] = {}
        for position, (node, _, arguments, keywords) in enumerate(self._planned):
            last[node] = position
            for leaf in pytree.tree_leaves((arguments, keywords)):
                if isinstance(leaf, fx.Node):
                    last[leaf] = position
        kept = set(self._outputs)
        ends: dict[int, list[fx.Node]] = {}
        for node, position in last.items():
            if node not in kept:
                ends.setdefault(position, []).append(node)
        return [
            _Call(node, run, tuple(arguments), keywords, tuple(ends.get(position, ())))
            for position, (node, run, arguments, keywords) in enumerate(self._planned)
        ]


def _once(target: Any, *, expands: bool) -> _Run:
    """A node of shared values."""

    def run(count: int, found: Sequence[Any], keywords: dict[str, Any]) -> Any:
        made = target(*found, **keywords)
        return _expanded(made, count).clone() if expands else made

    return run


def _drawing(target: Any, is_stacked: Sequence[bool]) -> _Run:
    return lambda count, found, keywords: drawn(target, tuple(found), keywords, is_stacked, count)


def _mapped(target: Any, found: Sequence[Any], keywords: dict[str, Any], stacked: Sequence[bool]) -> Any:
    """A node of stacked values under `torch.vmap`."""
    leaves, spec = pytree.tree_flatten((tuple(found), keywords))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def run(*tensors: Tensor) -> Any:
        own = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            own[place] = tensor
        arguments, given = pytree.tree_unflatten(own, spec)
        return target(*arguments, **given)

    dimensions = tuple(0 if is_stacked else None for is_stacked in stacked)
    return torch.vmap(run, in_dims=dimensions)(*(leaves[place] for place in places))


def _is_made_to_be_overwritten(node: fx.Node) -> bool:
    """Whether something fresh is filled in place afterwards."""
    return not node.all_input_nodes and any(
        isinstance(user.target, torch._ops.OpOverload) and user.target._schema.is_mutable  # noqa: SLF001
        for user in node.users
    )


def _expanded(value: Tensor, count: int) -> Tensor:
    return value.expand(count, *value.shape)


def _told(node: fx.Node) -> str:
    return str(node.target)
