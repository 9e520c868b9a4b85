"""Different losses, and metrics, of one model: its graph runs for all members, and each loss for those whose it is.

The captured graphs of trials with one model and different losses begin with the same operators, the model's. What comes
after is a trial's tail. A stacked graph with tails runs the beginning once for all members, and each tail on rows of it.

Note: where the beginning ends. As late as the graphs are the same, unless a value that is made by then takes part in the
gradients of one loss and not of another: then before that value. A tail uses no parameters, draws nothing and overwrites
nothing, for what it works on are copies of rows. So whatever differs between such trials is made of what the model makes,
and the parameters that have gradients are the same for all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from hydra_tune.errors import UnfusableError
from hydra_tune.fusion.stacking import StackedGraph
from hydra_tune.shard.pilot import ShardCost
from hydra_tune.shard.plan import Plan, Shard
from hydra_tune.shard.split import ShardGraph
from hydra_tune.shard.stochastic import draws_random_numbers

_RESULT = "result:"


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


def with_tails(shard: Shard, rows: Rows, shared: frozenset[int], prefix: "StackedPrefix") -> Shard:
    """The shard of a group whose members have tails of their own.

    Args:
        shard: of the first plan, for one member.
        rows: who has which.
        shared: as of `stacked_plan`.
        prefix: what all members run.
    """
    used = [tail for number, tail in enumerate(rows.tails.tails) if number in rows.of]
    graph = shard.graph
    constants = (*prefix.constants, *(name for tail in used for name in tail.constants))
    inputs = tuple(sorted({*prefix.inputs, *(index for tail in used for index in tail.inputs)}))
    names = results_of(rows)
    places: list[tuple[str, str | int]] = [
        *(("state", name) for name in graph.state),
        *(("constant", name) for name in constants),
        *(("input", index) for index in inputs),
    ]
    module = _Branched(prefix, rows, names, {what: number for number, what in enumerate(places)}, shared)
    live_out = tuple(_RESULT + name for name in names)
    graph = replace(graph, module=module, constants=constants, inputs=inputs, live_out=live_out)
    is_training = rows.tails.plans[0].mode == "train"
    return replace(
        shard,
        graph=graph,
        cost=_cost(rows, prefix.made_bytes),
        losses=live_out,
        gradient_outputs=live_out if is_training else (),
    )


def results_of(rows: Rows) -> list[str]:
    """What all results are called, of whichever member."""
    return list(dict.fromkeys(name for number in sorted(set(rows.of)) for name in rows.tails.tails[number].results))


def with_results(plan: Plan, rows: Rows) -> Plan:
    """A plan whose shard is one of `with_tails`."""
    names = tuple(results_of(rows))
    outputs = tuple(_RESULT + name for name in names)
    own = {name: value for number in set(rows.of) for name, value in rows.tails.tails[number].constants.items()}
    kept = {name for shard in plan.shards for name in shard.graph.constants}
    constants = {name: value for name, value in (plan.constants | own).items() if name in kept}
    birth = {name: index for name, index in plan.birth.items() if name not in plan.outputs}
    return replace(
        plan,
        names=names,
        outputs=outputs,
        constants=constants,
        birth=birth | dict.fromkeys(outputs, 0),
    )


class StackedPrefix:
    """What plans with tails have in common, on stacked members.

    Args:
        graph: the first plan's shard.
        code: its code, or one like it.
        rows: who has which tail.
        shared: as of `stacked_plan`.
        slots: as of `stacked_plan`.

    Attributes:
        constants: names of those that it takes.
        inputs: which of the batch's tensors it takes.
        made: the numbers of the operators whose values it gives.
        made_bytes: what these take for one member.
    """

    def __init__(
        self, graph: ShardGraph, code: fx.GraphModule, rows: Rows, shared: frozenset[int], slots: frozenset[str]
    ) -> None:
        tails = rows.tails
        used = [tail for number, tail in enumerate(tails.tails) if number in rows.of]
        self.made = tuple(sorted({number for tail in used for number in tail.made}))
        operators = operators_of(code)
        wanted = [operators[number] for number in self.made]
        own = dict(zip(placeholders_of(code), arguments_of(graph), strict=True))
        taken = {given for node in operators[: tails.length] for given in node.all_input_nodes}
        self.takes = [what for node, what in own.items() if node in taken or what[0] == "state"]
        self.constants = tuple(str(name) for kind, name in self.takes if kind == "constant")
        self.inputs = tuple(int(index) for kind, index in self.takes if kind == "input")
        self.made_bytes = sum(_value(node).nbytes for node in wanted)
        begins = [node for node, what in own.items() if what in self.takes]
        part = _part(code, begins, operators[: tails.length], wanted)
        is_stacked = [kind != "constant" and not (kind == "input" and index in shared) for kind, index in self.takes]
        if not any(is_stacked):
            raise UnfusableError("one of its shards depends on nothing of the trial")
        self.run = StackedGraph(part, is_stacked, slots)


class _Branched:
    """Runs the beginning for all members and each tail for those whose it is."""

    def __init__(
        self,
        prefix: StackedPrefix,
        rows: Rows,
        names: Sequence[str],
        places: dict[tuple[str, str | int], int],
        shared: frozenset[int],
    ) -> None:
        self._prefix = prefix
        self._takes = [places[what] for what in prefix.takes]
        self._names = names
        self._branches = [
            _Branch(tail, [index for index, own in enumerate(rows.of) if own == number], prefix.made, places, shared)
            for number, tail in enumerate(rows.tails.tails)
            if number in rows.of
        ]
        order = [index for branch in self._branches for index in branch.rows]
        self._inverse = [order.index(index) for index in range(len(order))]

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        """The results, all with the members in front; those that a member has not are NaN."""
        made = self._prefix.run(*(arguments[place] for place in self._takes))
        parts = [branch(made, arguments) for branch in self._branches]
        return tuple(self._together([part.get(name) for part in parts]) for name in self._names)

    def _together(self, parts: Sequence[Tensor | None]) -> Tensor:
        found = [part for part in parts if part is not None]
        if len(found) < len(parts) or len({part.dtype for part in found}) > 1:
            wide = [None if part is None else part.to(torch.float64) for part in parts]
            like = next(part for part in wide if part is not None)
            found = [
                like.new_full((len(branch.rows),), torch.nan) if part is None else part
                for branch, part in zip(self._branches, wide, strict=True)
            ]
        return _picked(torch.cat(found), self._inverse)


class _Branch:
    """One tail, with its rows."""

    def __init__(
        self,
        tail: Tail,
        rows: list[int],
        made: Sequence[int],
        places: dict[tuple[str, str | int], int],
        shared: frozenset[int],
    ) -> None:
        self.rows = rows
        self._results = tail.results
        self._made = [made.index(number) for number in tail.made]
        given: list[tuple[tuple[str, str | int], bool]] = [
            *((("input", index), index not in shared) for index in tail.inputs),
            *((("constant", name), False) for name in tail.constants),
        ]
        self._given = [(places[what], is_stacked) for what, is_stacked in given]
        self._run = StackedGraph(tail.code, [*[True] * len(tail.made), *(is_stacked for _, is_stacked in given)])

    def __call__(self, made: Sequence[Tensor], arguments: Sequence[Tensor]) -> dict[str, Tensor]:
        """Its results by name, a vector each."""
        own = [_picked(made[place], self.rows) for place in self._made]
        given = [
            _picked(arguments[place], self.rows) if is_stacked else arguments[place]
            for place, is_stacked in self._given
        ]
        outputs = self._run(*own, *given)
        return {name: outputs[place].reshape(len(self.rows)) for name, place in self._results.items()}


def _picked(value: Tensor, rows: list[int]) -> Tensor:
    """These rows."""
    if rows == list(range(value.size(0))):
        return value
    return value.index_select(0, torch.tensor(rows, device=value.device))


def arguments_of(graph: ShardGraph) -> list[tuple[str, str | int]]:
    """What a shard's code takes, in order."""
    return [
        *(("state", name) for name in graph.state),
        *(("constant", name) for name in graph.constants),
        *(("input", index) for index in graph.inputs),
    ]


def placeholders_of(code: fx.GraphModule) -> list[fx.Node]:
    """The arguments of a shard's code."""
    return [node for node in code.graph.nodes if node.op == "placeholder"]


def operators_of(code: fx.GraphModule) -> list[fx.Node]:
    """What a shard's code runs, in order."""
    return [node for node in code.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]


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
        _value(node)
    part = _part(code, [*made, *taken["input"], *taken["constant"]], rest, wanted)
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


def _value(node: fx.Node) -> Tensor:
    made = node.meta.get("val")
    if not isinstance(made, Tensor):
        raise UnfusableError(
            f"its graph differs from the others' right after {node.target}, which makes several tensors"
        )
    return made


def _part(
    code: fx.GraphModule, begins: Sequence[fx.Node], nodes: Sequence[fx.Node], ends: Sequence[fx.Node]
) -> fx.GraphModule:
    """Some operators of a graph as a graph.

    Args:
        code: the graph.
        begins: what it takes.
        nodes: its operators.
        ends: what it gives.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in begins:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    used = {given for node in nodes for given in node.all_input_nodes}
    for node in code.graph.nodes:
        if node.op == "get_attr" and node in used:
            copies[node] = graph.node_copy(node)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in ends))
    return fx.GraphModule(code, graph)


def _reached(plan: Plan, tail: Tail) -> set[int]:
    """Which of the operators in common make what the gradients of a loss flow into."""
    placeholders = placeholders_of(tail.code)
    trained = _trained(plan)
    mode = FakeTensorMode()
    with mode, torch.enable_grad():
        given = [_like(_value(node)) for node in placeholders[: len(tail.made) + len(tail.inputs)]]
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


def _cost(rows: Rows, made_bytes: int) -> ShardCost:
    """Of one member: the most that any has, and room for the rows and their gradients."""
    costs = [rows.tails.plans[number].shards[-1].cost for number in sorted(set(rows.of))]
    most = {
        name: max(getattr(cost, name) for cost in costs)
        for name in ShardCost.__dataclass_fields__
        if name.endswith(("_bytes", "_workspace"))
    }
    for name in ("forward_workspace", "backward_workspace", "recompute_workspace"):
        if most[name]:
            most[name] += (len(costs) + 2) * made_bytes
    return replace(costs[0], **most)
