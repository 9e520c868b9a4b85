"""Different losses and metrics of a model: the model's graph runs for all members, each loss only for its members.

The captured graphs of trials with equal models and different losses begin with the same operators, namely the model's.
The rest of a graph is the trial's tail. A stacked graph with tails runs the beginning once for all members, and every
tail on the rows of its members.

Note: end of the beginning. The beginning extends as far as the graphs are equal. If a value made by then takes part in
the gradients of some losses only, the beginning ends before the value. A tail uses no parameters, draws no random
numbers and overwrites nothing, because a tail works on copies of rows. Differences between such trials therefore depend
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
        made: indices of the common operators whose values the code takes.
        inputs: as of `ShardGraph`.
        constants: names and values of the tail's own constants.
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
        plans: the plans.
        length: number of common operators.
        tails: the rest of every plan.
    """

    plans: tuple[ShardPlan, ...]
    length: int
    tails: tuple[LossHead, ...]


@dataclass(frozen=True, slots=True)
class HeadAssignment:
    """Assignment of tails to members.

    Attributes:
        tails: the available tails.
        of: for each member, the number of its tail.
    """

    tails: MultiHeadPlan
    of: tuple[int, ...]

    def names(self, index: int) -> frozenset[str]:
        """Return the names of a member's results."""
        return frozenset(self.tails.tails[self.of[index]].results)


def tails_of(plans: Sequence[ShardPlan], length: int) -> MultiHeadPlan:
    """Return the tails of single-shard plans with `length` equal leading operators and no difference in anything else.

    Raises:
        UnfusableError: the plans have no tails that could run for some members only; the message gives the reason.
    """
    for plan in plans:
        if set(plan.shards[-1].graph.live_out) != set(plan.outputs):
            raise UnfusableError("its losses are not the same, and some results are none of its operators'")
    none: set[int] = set()
    while True:
        tails = tuple(_tail(plan, length, number) for number, plan in enumerate(plans))
        reached: list[set[int]] = [
            _reached(plan, tail) if plan.mode == "train" else none for plan, tail in zip(plans, tails, strict=True)
        ]
        apart = none.union(*reached) - reached[0].intersection(*reached)
        if not apart:
            return MultiHeadPlan(tuple(plans), length, tails)
        # Shorten the common part by an operator at a time until every loss sends gradients into the same common
        # values. Otherwise some members would lack gradients that the stacked backward computes for others.
        length -= 1


def _tail(plan: ShardPlan, length: int, number: int) -> LossHead:
    """Return the operators of a plan from index `length` on, as a tail."""
    graph = plan.shards[-1].graph
    code = graph.code
    assert code is not None, "compared before"
    operators = operators_of(code)
    begins = {node: index for index, node in enumerate(operators[:length])}
    rest = operators[length:]
    for node in rest:
        _check(node)
        for region in _regions(node, code):
            for one in region.graph.nodes:
                _check(one)
    (ends,) = (node.args[0] for node in code.graph.nodes if node.op == "output")
    wanted = list(ends)
    own = dict(zip(placeholders_of(code), arguments_of(graph), strict=True))
    used = {given for node in rest for given in node.all_input_nodes} | set(wanted)
    made = sorted((node for node in used if node in begins), key=begins.__getitem__)
    taken = {
        kind: [node for node, what in own.items() if node in used and what[0] == kind]
        for kind in ("state", "input", "constant")
    }
    if taken["state"]:
        raise UnfusableError(
            "its graph uses parameters or buffers beyond the first operator that differs from the others'"
        )
    if not made:
        raise UnfusableError("its result does not depend on what its model makes")
    for node in made:
        value_of(node)
    part = part_of(code, [*made, *taken["input"], *taken["constant"]], rest, wanted)
    constants = {f"{own[node][1]}:{number}": plan.constants[str(own[node][1])] for node in taken["constant"]}
    return LossHead(
        code=part,
        made=tuple(begins[node] for node in made),
        inputs=tuple(int(own[node][1]) for node in taken["input"]),
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
    """Return the graphs that an operator runs, including nested graphs."""
    found: list[fx.GraphModule] = []
    for given in node.all_input_nodes:
        region = getattr(code, str(given.target), None) if given.op == "get_attr" else None
        if isinstance(region, fx.GraphModule):
            found += [region, *(inner for one in region.graph.nodes for inner in _regions(one, region))]
    return found


def _reached(plan: ShardPlan, tail: LossHead) -> set[int]:
    """Return the common operators whose values receive gradients from a plan's loss."""
    placeholders = placeholders_of(tail.code)
    trained = _trained(plan)
    # Autograd on fake tensors answers the question without memory or arithmetic.
    mode = FakeTensorMode()
    with mode, torch.enable_grad():
        given = [_like(value_of(node)) for node in placeholders[: len(tail.made) + len(tail.inputs)]]
        leaves = {
            number: tensor.requires_grad_()
            for number, tensor in zip(tail.made, given, strict=False)
            if number in trained and tensor.is_floating_point()
        }
        made = tail.code(*given, *(_like(constant) for constant in tail.constants.values()))
        loss = made[tail.results[plan.names[0]]]
        if not loss.requires_grad:
            raise UnfusableError("its loss has no gradients")
        found = torch.autograd.grad(loss.sum(), list(leaves.values()), allow_unused=True)
    return {number for number, gradient in zip(leaves, found, strict=True) if gradient is not None}


def _trained(plan: ShardPlan) -> set[int]:
    """Return the operators that depend on parameters."""
    graph = plan.shards[-1].graph
    assert graph.code is not None, "compared before"
    own = zip(placeholders_of(graph.code), arguments_of(graph), strict=True)
    found = {node for node, (kind, _) in own if kind == "state"}
    operators = operators_of(graph.code)
    for node in operators:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return {number for number, node in enumerate(operators) if node in found}


def _like(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
