"""Compare plans of several trials, which may differ only in dropout probabilities, losses and metrics.

Trials whose architecture keys differ only in numbers can still have equal graphs, because a dropout probability is just
an argument of an operator. The comparison walks the captured graphs node by node and, outside regions such as
`torch.no_grad()`, ignores the probabilities. `GroupPlanFactory` (`fusion/compile/batched_plan_cache.py`) compares plans before
a group is formed, and again when a group stacks a plan for its present members. `stacked_plan`
(`fusion/compile/batched_plan.py`) uses `with_stand_ins` and `refuse_whole`; `GroupTrial` (`fusion/group/group_trial.py`) keeps
the `MemberDifferences` for the units. The module must not train a group.

Note: a difference that is overlooked trains a member on another member's graph, so anything not known to be equal counts as
a difference.

Note: recognized probabilities. The operator's masks must be separable from the operator, and the graph must contain the
operator in any case: `torch.dropout`, also of whole channels, dropout inside attention, and dropout between recurrent
layers. A model that omits the operator at probability 0 has a different graph, and so does a model that uses the
probability elsewhere as well.

Note: losses and metrics. Graphs with a common beginning may have different ends (`fusion/ragged/loss_heads.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from hydra_tune.errors import UnfusableError
from hydra_tune.fusion.batching.subgraph import arguments_of, operators_of, placeholders_of
from hydra_tune.fusion.ragged.loss_heads import HeadAssignment, tails_of
from hydra_tune.shard.analysis.random_ops import named_arguments
from hydra_tune.shard.capture.batch import same_values
from hydra_tune.shard.partition.plan import ShardPlan
from hydra_tune.shard.partition.plan_cache import PreparedPlan
from hydra_tune.shard.partition.subgraph import ShardGraph

aten: Any = torch.ops.aten
_PROBABILITIES = {
    aten.dropout.default: "p",
    aten.feature_dropout.default: "p",
    aten.scaled_dot_product_attention.default: "dropout_p",
    aten.lstm.input: "dropout",
    aten.gru.input: "dropout",
    aten.rnn_tanh.input: "dropout",
    aten.rnn_relu.input: "dropout",
}
_STAND_IN = 0.25  # any value between 0 and 1 does: operators special-case only 0 and 1

Probabilities = dict[str, list[float]]
"""Dropout probabilities, one for each member, by the name of the dropout node."""


@dataclass(frozen=True, slots=True)
class MemberDifferences:
    """Differences between members that compute together.

    Attributes:
        rows: assignment of losses or metrics to members; None: all members have the same.
        numbered: the members' own plans, where Python computes inputs of the plans from numbers.
    """

    drops: Probabilities
    rows: HeadAssignment | None = None
    numbered: tuple[PreparedPlan, ...] = ()

    def part(self, begin: int, end: int | None = None) -> "MemberDifferences":
        """Return the differences between the members from `begin` up to `end`."""
        rows = None if self.rows is None else replace(self.rows, of=self.rows.of[begin:end])
        if rows is not None and set(rows.of) == {0}:
            rows = None
        drops = {name: ps[begin:end] for name, ps in self.drops.items()}
        return MemberDifferences(drops, rows, self.numbered[begin:end])


def with_stand_ins(code: fx.GraphModule, slots: frozenset[str]) -> fx.GraphModule:
    """Return a graph in which the named nodes always drop, whatever their own probability."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in code.graph.nodes:
        if node.op == "output":
            graph.output(fx.node.map_arg(node.args[0], copies.__getitem__))
            continue
        copy = copies[node] = graph.node_copy(node, copies.__getitem__)
        # An operator with probability 0 draws nothing, so a graph captured from
        # such a member would lack the random primitive that the other members need.
        if node.name in slots:
            _set(copy, _STAND_IN)
    return fx.GraphModule(code, graph)


def likeness(plans: Sequence[ShardPlan]) -> MemberDifferences:
    """Return the differences between plans, one plan for each member, if the members may compute together.

    Raises:
        UnfusableError: the plans differ in anything else, named in the message.
    """
    kinds: list[ShardPlan] = []
    kind_numbers = [_kind_of(plan, kinds) for plan in plans]
    rows = None
    if len(kinds) > 1:
        # All kinds share a single beginning: the shortest that the first kind has in common with another kind.
        length = min(_common(kinds[0], kind) for kind in kinds[1:])
        rows = HeadAssignment(tails_of(kinds, length), tuple(kind_numbers))
    return MemberDifferences(_differing(plans), rows)


def _kind_of(plan: ShardPlan, kinds: list[ShardPlan]) -> int:
    for number, kind in enumerate(kinds):
        try:
            _check_plans(kind, plan)
        except UnfusableError:
            continue
        return number
    # A difference in anything but losses or metrics is refused later, by `_common`.
    kinds.append(plan)
    return len(kinds) - 1


def _differing(plans: Sequence[ShardPlan]) -> Probabilities:
    by_slot: Probabilities = {}
    every = [dict(_of_plan(plan)) for plan in plans]
    for name, p in every[0].items():
        values = [by_node.get(name, p) for by_node in every]
        if any(value != p for value in values):
            by_slot[name] = values
    return by_slot


def _of_plan(plan: ShardPlan) -> list[tuple[str, float]]:
    return [
        (node.name, float(p))
        for shard in plan.shards
        if shard.graph.code is not None
        for node in shard.graph.code.graph.nodes
        if (p := _probability(node)) is not None
    ]


def _probability(node: fx.Node) -> float | None:
    """Return the probability of an active dropout node; None for other nodes and for dropout outside training."""
    if node.op != "call_function" or node.target not in _PROBABILITIES:
        return None
    named = named_arguments(node)
    if named.get("train") is False:
        return None
    p = named[_PROBABILITIES[node.target]]
    return float(p) if isinstance(p, int | float) else None


def _set(node: fx.Node, p: float) -> None:
    name = _PROBABILITIES[node.target]
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]  # noqa: SLF001
        if argument.name == name and position < len(node.args):
            node.update_arg(position, p)
            return
    node.update_kwarg(name, p)


def refuse_whole(plan: ShardPlan) -> None:
    """Refuse a plan without a graph.

    Raises:
        UnfusableError: the plan runs the user's own code; the message gives the reason.
    """
    if plan.eager:
        raise UnfusableError(
            f"its model runs whole ({plan.why_eager}): there is no graph of it that several trials could share"
        )


def _check_plans(a: ShardPlan, b: ShardPlan) -> None:
    if a is b:
        return
    for plan in (a, b):
        refuse_whole(plan)
    if len(a.shards) != len(b.shards) or a.outputs != b.outputs or a.mode != b.mode:
        raise UnfusableError("its graph is cut into different shards, or has different results")
    if a.constants.keys() != b.constants.keys():
        raise UnfusableError(f"its graph has {len(b.constants)} tensors of its own, and the others' {len(a.constants)}")
    for name, constant in a.constants.items():
        if not same_values(constant, b.constants[name]):
            raise UnfusableError(f"its graph has another value of the tensor {name} than the others'")
    for shard, other_shard in zip(a.shards, b.shards, strict=True):
        _check_shards(shard.graph, other_shard.graph)


def _common(a: ShardPlan, b: ShardPlan) -> int:
    """Return the number of equal leading operators of two single-shard plans that differ only in their results."""
    difference = _told(a, b)
    if a.eager or b.eager or a.mode != b.mode:
        raise UnfusableError(difference)
    if max(len(a.shards), len(b.shards)) > 1:
        raise UnfusableError(f"{difference}; losses and metrics may be a member's own where a model is one shard")
    names = ("trained", "shared_gradients", "has_backward")
    of_graph = ("state", "written_state", "saved_state")
    shard, other_shard = a.shards[-1], b.shards[-1]
    are_alike = all(getattr(shard, name) == getattr(other_shard, name) for name in names)
    if not are_alike or any(getattr(shard.graph, name) != getattr(other_shard.graph, name) for name in of_graph):
        raise UnfusableError(difference)
    length = _equal_operators(a, b)
    try:
        tails_of([a, b], length)
    except UnfusableError as error:
        raise UnfusableError(f"{difference}; {error}") from error
    return length


def _told(a: ShardPlan, b: ShardPlan) -> str:
    try:
        _check_plans(a, b)
    except UnfusableError as error:
        return str(error)
    return "its graph is the same"


def _equal_operators(a: ShardPlan, b: ShardPlan) -> int:
    code, other_code = (plan.shards[-1].graph.code for plan in (a, b))
    if code is None or other_code is None:
        raise UnfusableError("its graph is compiled")
    numbers = _begun(a, code, {}) | _begun(b, other_code, a.constants)
    for node in (*code.graph.nodes, *other_code.graph.nodes):
        if node.op == "get_attr":
            numbers[node] = _attribute(node, code, other_code)
    length = 0
    for operator, other_operator in zip(operators_of(code), operators_of(other_code), strict=False):
        is_alike = (
            operator.op == other_operator.op
            and operator.target == other_operator.target
            and operator.name == other_operator.name
        )
        if not is_alike or _key(operator, numbers, is_outer=True) != _key(other_operator, numbers, is_outer=True):
            break
        # Equal operators receive the same number, so the keys of later
        # operators compare arguments by position instead of by identity.
        numbers[operator] = numbers[other_operator] = length
        length += 1
    return length


def _begun(plan: ShardPlan, code: fx.GraphModule, others: Mapping[str, Tensor]) -> dict[fx.Node, object]:
    """Return an identity for every argument of a shard; equal arguments of two plans have equal identities."""
    identities: dict[fx.Node, object] = {}
    for node, (kind, name) in zip(placeholders_of(code), arguments_of(plan.shards[-1].graph), strict=True):
        is_other = (
            kind == "constant" and str(name) in others and not same_values(plan.constants[str(name)], others[str(name)])
        )
        identities[node] = (kind, name, is_other)
    return identities


def _attribute(node: fx.Node, one: fx.GraphModule, other: fx.GraphModule) -> object:
    name = str(node.target)
    try:
        _check_attributes(getattr(one, name, None), getattr(other, name, None), name)
    except UnfusableError:
        # Attributes with different values get an identity that no other graph
        # shares, so operators that use such an attribute compare as different.
        return id(node.graph), name
    return name


def _check_shards(a: ShardGraph, b: ShardGraph) -> None:
    names = ("state", "constants", "inputs", "live_in", "live_out", "written_state", "saved_state", "cloned")
    if any(getattr(a, name) != getattr(b, name) for name in names) or a.code is None or b.code is None:
        raise UnfusableError("its graph is cut into different shards, or uses different parameters")
    _check_graphs(a.code, b.code, is_outer=True)


def _check_graphs(a: fx.GraphModule, b: fx.GraphModule, *, is_outer: bool) -> None:
    a_nodes, b_nodes = list(a.graph.nodes), list(b.graph.nodes)
    numbers: dict[fx.Node, object] = {node: number for nodes in (a_nodes, b_nodes) for number, node in enumerate(nodes)}
    if len(a_nodes) != len(b_nodes):
        raise UnfusableError(f"its graph has {len(b_nodes)} operators, and the others' {len(a_nodes)}")
    for one, two in zip(a_nodes, b_nodes, strict=True):
        if one.op == two.op == "get_attr":
            _check_attributes(getattr(a, str(one.target)), getattr(b, str(two.target)), str(two.target))
            continue
        is_alike = one.op == two.op and (one.op in ("placeholder", "output") or one.target == two.target)
        if not is_alike or one.name != two.name or _key(one, numbers, is_outer) != _key(two, numbers, is_outer):
            raise UnfusableError(f"its graph has {two.target} ({two.name}) with other arguments than the others'")


def _check_attributes(one: object, two: object, name: str) -> None:
    if isinstance(one, fx.GraphModule) and isinstance(two, fx.GraphModule):
        _check_graphs(one, two, is_outer=False)
    elif not (isinstance(one, Tensor) and isinstance(two, Tensor) and same_values(one, two)):
        raise UnfusableError(f"its graph holds other values than the others' ({name})")


def _key(node: fx.Node, numbers: Mapping[fx.Node, object], is_outer: bool) -> str:
    """Return a printable key of a node: its arguments, and the geometry of its value."""
    left_out = _PROBABILITIES.get(node.target) if is_outer and node.op == "call_function" else None
    if left_out is not None:
        arguments: Any = {name: value for name, value in named_arguments(node).items() if name != left_out}
    else:
        arguments = (node.args, dict(node.kwargs))
    numbered: Any = lambda n: _NodeIdentity(numbers[n])  # noqa: E731
    mapped = fx.node.map_arg(arguments, numbered)
    result = node.meta.get("val")
    geometry = (tuple(result.shape), result.dtype, result.stride()) if isinstance(result, Tensor) else None
    # As text, in which nodes are positions and floats are exact.
    return repr((mapped, geometry))


class _NodeIdentity:
    def __init__(self, number: object) -> None:
        self._number = number

    def __repr__(self) -> str:
        return f"%{self._number}"
