"""Different losses, and metrics, of one model: its graph runs for all members, and each loss for those whose it is.

The captured graphs of trials with one model and different losses begin with the same operators, the model's. What comes
after is a trial's tail. A stacked graph with tails runs the beginning once for all members, and each tail on rows of it.

Note: where the beginning ends. As late as the graphs are the same, unless a value that is made by then takes part in the
gradients of one loss and not of another: then before that value. A tail uses no parameters, draws nothing and overwrites
nothing, for what it works on are copies of rows. So whatever differs between such trials is made of what the model makes,
and the parameters that have gradients are the same for all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from hydra_tune.errors import UnfusableError
from hydra_tune.fusion.parts import arguments_of, operators_of, part_of, placeholders_of, value_of
from hydra_tune.shard.plan import Plan
from hydra_tune.shard.stochastic import draws_random_numbers


@dataclass(frozen=True, slots=True, eq=False)
class Tail:
    """What one of several plans computes of what they have in common.

    Attributes:
        code: takes the values `made`, then the batch's `inputs`, then the `constants`.
        made: which of the operators that the plans have in common make what it takes.
        inputs: as of `ShardGraph`.
        constants: names of its own, with their values.
        results: by what a result is called, its place among the code's outputs.
    """

    code: fx.GraphModule
    made: tuple[int, ...]
    inputs: tuple[int, ...]
    constants: dict[str, Tensor]
    results: dict[str, int]


@dataclass(frozen=True, slots=True, eq=False)
class Tails:
    """Plans of one shard that are the same but for its end.

    Attributes:
        plans: which.
        length: operators that they have in common.
        tails: the rest of each plan.
    """

    plans: tuple[Plan, ...]
    length: int
    tails: tuple[Tail, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """Which member has which tail.

    Attributes:
        tails: what there is.
        of: for each member, the number of its own.
    """

    tails: Tails
    of: tuple[int, ...]

    def names(self, index: int) -> frozenset[str]:
        """What the results of a member are called."""
        return frozenset(self.tails.tails[self.of[index]].results)


def tails_of(plans: Sequence[Plan], length: int) -> Tails:
    """The tails of plans of one shard that begin with so many equal operators, and are the same in all else.

    Raises:
        UnfusableError: they have none that could be run for some members only; with the reason.
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
            return Tails(tuple(plans), length, tails)
        length -= 1


def _tail(plan: Plan, length: int, number: int) -> Tail:
    """The operators of a plan from one on."""
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
    return Tail(
        code=part,
        made=tuple(begins[node] for node in made),
        inputs=tuple(int(own[node][1]) for node in taken["input"]),
        constants=constants,
        results={name: graph.live_out.index(output) for name, output in zip(plan.names, plan.outputs, strict=True)},
    )


def _check(node: fx.Node) -> None:
    """Refuse what cannot be run on some rows."""
    if draws_random_numbers(node):
        raise UnfusableError(f"its graph differs from the others' before {node.target}, which draws random numbers")
    if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:  # noqa: SLF001
        raise UnfusableError(f"its graph differs from the others' before {node.target}, which overwrites a tensor")


def _regions(node: fx.Node, code: fx.GraphModule) -> list[fx.GraphModule]:
    """Graphs that an operator runs, and those that these run."""
    found: list[fx.GraphModule] = []
    for given in node.all_input_nodes:
        region = getattr(code, str(given.target), None) if given.op == "get_attr" else None
        if isinstance(region, fx.GraphModule):
            found += [region, *(inner for one in region.graph.nodes for inner in _regions(one, region))]
    return found


def _reached(plan: Plan, tail: Tail) -> set[int]:
    """Which of the operators in common make what the gradients of a loss flow into."""
    placeholders = placeholders_of(tail.code)
    trained = _trained(plan)
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


def _trained(plan: Plan) -> set[int]:
    """Which operators depend on parameters."""
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
