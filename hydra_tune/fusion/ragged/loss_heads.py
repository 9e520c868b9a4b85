"""Different losses and metrics of a model: the model's graph runs for all members, each loss only for its members.

The captured graphs of trials with equal models and different losses begin with the same operators, namely the model's.
The rest of a graph is the trial's loss head. A stacked graph with heads runs the beginning once for all members, and
every head on the rows of its members. `likeness` (`fusion/matching/plan_diff.py`) makes the heads when trials with
different losses are compared, `multi_head_graph.py` runs the heads in the group's steps, and `GroupExecutor`
(`fusion/group/group_executor.py`) gives each member the results of the member's own head. `GroupPlanFactory`
(`fusion/compile/batched_plan_cache.py`) keeps stacked plans by the `MultiHeadPlan` object, so the class must stay comparable
by identity (`eq=False`). The module must not know groups.

Note: end of the beginning. The beginning extends as far as the graphs are equal. If a value made by then takes part in
the gradients of some losses only, the beginning ends before the value. A head uses no parameters, draws no random
numbers and overwrites nothing, because a head works on copies of rows. Differences between such trials therefore depend
only on the model's outputs, and the same parameters have gradients in all trials.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from hydra_tune.errors import UnfusableError
from hydra_tune.fusion.batching.subgraph import arguments_of, operators_of, part_of, placeholders_of, value_of
from hydra_tune.shard.analysis.random_ops import draws_random_numbers
from hydra_tune.shard.partition.plan import ShardPlan


@dataclass(frozen=True, slots=True, eq=False)
class LossHead:
    """Computation of a plan after the common beginning.

    Attributes:
        code: takes the values `made`, then the batch's `inputs`, then the `constants`.
        results: index among the code's outputs, by name of the result.
    """

    code: fx.GraphModule
    made: tuple[int, ...]
    inputs: tuple[int, ...]
    constants: dict[str, Tensor]
    results: dict[str, int]


@dataclass(frozen=True, slots=True, eq=False)
class MultiHeadPlan:
    """Single-shard plans that differ only in their ends.

    Attributes:
        length: number of common operators.
    """

    plans: tuple[ShardPlan, ...]
    length: int
    tails: tuple[LossHead, ...]


@dataclass(frozen=True, slots=True)
class HeadAssignment:
    """Assignment of heads to members.

    Attributes:
        of: for each member, the number of its head.
    """

    tails: MultiHeadPlan
    of: tuple[int, ...]

    def names(self, index: int) -> frozenset[str]:
        """Return the names of a member's results."""
        return frozenset(self.tails.tails[self.of[index]].results)


def tails_of(plans: Sequence[ShardPlan], length: int) -> MultiHeadPlan:
    """Return the heads of single-shard plans with `length` equal leading operators and no difference in anything else.

    Raises:
        UnfusableError: the plans have no heads that could run for some members only; the message gives the reason.
    """
    for plan in plans:
        if set(plan.shards[-1].graph.live_out) != set(plan.outputs):
            raise UnfusableError(
                "its losses differ from the others', and some of its results are not computed by an operator"
            )
    none: set[int] = set()
    while True:
        tails = tuple(_tail(plan, length, number) for number, plan in enumerate(plans))
        # A plan that only evaluates has no gradients to compare.
        reached: list[set[int]] = [
            _reached(plan, tail) if plan.mode == "train" else none for plan, tail in zip(plans, tails, strict=True)
        ]
        partly_reached = none.union(*reached) - reached[0].intersection(*reached)
        if not partly_reached:
            return MultiHeadPlan(tuple(plans), length, tails)
        # Shorten the common part by an operator at a time until every loss sends gradients into the same common
        # values. Otherwise some members would lack gradients that the stacked backward computes for others.
        length -= 1


def _tail(plan: ShardPlan, length: int, number: int) -> LossHead:
    graph = plan.shards[-1].graph
    code = graph.code
    assert code is not None, "compared before"
    operators = operators_of(code)
    begins = {node: index for index, node in enumerate(operators[:length])}
    tail_nodes = operators[length:]
    for node in tail_nodes:
        _check(node)
        # A region's operators run on copies of rows as well.
        for region in _regions(node, code):
            for inner_node in region.graph.nodes:
                _check(inner_node)
    (ends,) = (node.args[0] for node in code.graph.nodes if node.op == "output")
    output_nodes = list(ends)
    arguments = dict(zip(placeholders_of(code), arguments_of(graph), strict=True))
    used_nodes = {argument for node in tail_nodes for argument in node.all_input_nodes} | set(output_nodes)
    common_nodes = sorted((node for node in used_nodes if node in begins), key=begins.__getitem__)
    taken_nodes = {
        kind: [node for node, kind_and_name in arguments.items() if node in used_nodes and kind_and_name[0] == kind]
        for kind in ("state", "input", "constant")
    }
    if taken_nodes["state"]:
        raise UnfusableError(
            "its graph uses parameters or buffers beyond the first operator that differs from the others'"
        )
    if not common_nodes:
        raise UnfusableError("its results do not depend on its model's outputs")
    for node in common_nodes:
        value_of(node)
    part = part_of(code, [*common_nodes, *taken_nodes["input"], *taken_nodes["constant"]], tail_nodes, output_nodes)
    # Numbered by head, because the constants of two heads may have the same name.
    constants = {
        f"{arguments[node][1]}:{number}": plan.constants[str(arguments[node][1])] for node in taken_nodes["constant"]
    }
    return LossHead(
        code=part,
        made=tuple(begins[node] for node in common_nodes),
        inputs=tuple(int(arguments[node][1]) for node in taken_nodes["input"]),
        constants=constants,
        results={name: graph.live_out.index(output) for name, output in zip(plan.names, plan.outputs, strict=True)},
    )


def _check(node: fx.Node) -> None:
    """Refuse an operator that cannot run on some of the rows."""
    if draws_random_numbers(node):
        raise UnfusableError(f"its graph differs from the others' before {node.target}, which draws random numbers")
    if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:  # noqa: SLF001
        raise UnfusableError(f"its graph differs from the others' before {node.target}, which overwrites a tensor")


def _regions(node: fx.Node, code: fx.GraphModule) -> list[fx.GraphModule]:
    regions: list[fx.GraphModule] = []
    for argument in node.all_input_nodes:
        region = getattr(code, str(argument.target), None) if argument.op == "get_attr" else None
        if isinstance(region, fx.GraphModule):
            regions += [region, *(inner for inner_node in region.graph.nodes for inner in _regions(inner_node, region))]
    return regions


def _reached(plan: ShardPlan, tail: LossHead) -> set[int]:
    """Return the common operators whose values receive gradients from a plan's loss."""
    placeholders = placeholders_of(tail.code)
    trained = _trained(plan)
    # Autograd on fake tensors answers the question without memory or arithmetic.
    mode = FakeTensorMode()
    with mode, torch.enable_grad():
        fakes = [_like(value_of(node)) for node in placeholders[: len(tail.made) + len(tail.inputs)]]
        leaves = {
            number: tensor.requires_grad_()
            for number, tensor in zip(tail.made, fakes, strict=False)
            if number in trained and tensor.is_floating_point()
        }
        outputs = tail.code(*fakes, *(_like(constant) for constant in tail.constants.values()))
        loss = outputs[tail.results[plan.names[0]]]
        if not loss.requires_grad:
            raise UnfusableError("its loss has no gradients")
        gradients = torch.autograd.grad(loss.sum(), list(leaves.values()), allow_unused=True)
    return {number for number, gradient in zip(leaves, gradients, strict=True) if gradient is not None}


def _trained(plan: ShardPlan) -> set[int]:
    graph = plan.shards[-1].graph
    assert graph.code is not None, "compared before"
    arguments = zip(placeholders_of(graph.code), arguments_of(graph), strict=True)
    dependent_nodes = {node for node, (kind, _) in arguments if kind == "state"}
    operators = operators_of(graph.code)
    for node in operators:
        if not dependent_nodes.isdisjoint(node.all_input_nodes):
            dependent_nodes.add(node)
    return {number for number, node in enumerate(operators) if node in dependent_nodes}


def _like(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
