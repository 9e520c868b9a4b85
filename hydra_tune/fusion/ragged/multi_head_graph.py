"""Run a stacked graph with heads: the beginning for all members, every head on the rows of its members.

`stacked_plan` (`fusion/compile/batched_plan.py`) makes such a graph when the members of a group have different losses
or metrics. Results keep the order of the members, and a result that a member does not have is NaN. The module must not know
groups, and a member's rows must not change another member's results.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx

from hydra_tune.errors import UnfusableError
from hydra_tune.fusion.batching.batched_graph import StackedGraph
from hydra_tune.fusion.batching.subgraph import arguments_of, operators_of, part_of, placeholders_of, value_of
from hydra_tune.fusion.ragged.loss_heads import HeadAssignment, LossHead
from hydra_tune.shard.cost.pilot import ShardCost
from hydra_tune.shard.partition.plan import Shard, ShardPlan
from hydra_tune.shard.partition.subgraph import ShardGraph

_RESULT = "result:"


def with_tails(shard: Shard, rows: HeadAssignment, prefix: "StackedPrefix") -> Shard:
    """Return the shard of a group whose members have different heads."""
    used_tails = [tail for number, tail in enumerate(rows.tails.tails) if number in rows.of]
    graph = shard.graph
    constants = (*prefix.constants, *(name for tail in used_tails for name in tail.constants))
    inputs = tuple(sorted({*prefix.inputs, *(index for tail in used_tails for index in tail.inputs)}))
    names = results_of(rows)
    places: list[tuple[str, str | int]] = [
        *(("state", name) for name in graph.state),
        *(("constant", name) for name in constants),
        *(("input", index) for index in inputs),
    ]
    module = _MultiHeadGraph(prefix, rows, names, {argument: number for number, argument in enumerate(places)})
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


def results_of(rows: HeadAssignment) -> list[str]:
    """Return the names of all results of any member."""
    return list(dict.fromkeys(name for number in sorted(set(rows.of)) for name in rows.tails.tails[number].results))


def with_results(plan: ShardPlan, rows: HeadAssignment) -> ShardPlan:
    """Return the plan, of a single shard, adapted to a shard made by `with_tails`."""
    names = tuple(results_of(rows))
    outputs = tuple(_RESULT + name for name in names)
    tail_constants = {
        name: value for number in set(rows.of) for name, value in rows.tails.tails[number].constants.items()
    }
    used_names = {name for shard in plan.shards for name in shard.graph.constants}
    constants = {name: value for name, value in (plan.constants | tail_constants).items() if name in used_names}
    # The only shard, 0, makes all results of the group.
    birth = {name: index for name, index in plan.birth.items() if name not in plan.outputs}
    return replace(
        plan,
        names=names,
        outputs=outputs,
        constants=constants,
        birth=birth | dict.fromkeys(outputs, 0),
    )


class StackedPrefix:
    """The common beginning of plans with heads, on stacked members; `run` computes the beginning.

    Attributes:
        takes: the arguments of the beginning: state, constants and batch tensors, by kind and name.
        made_bytes: bytes of the returned values, for a single member.

    Raises:
        UnfusableError: the beginning reads nothing but constants.
    """

    def __init__(self, graph: ShardGraph, code: fx.GraphModule, rows: HeadAssignment, slots: frozenset[str]) -> None:
        self.precision = graph.precision
        tails = rows.tails
        used_tails = [tail for number, tail in enumerate(tails.tails) if number in rows.of]
        self.made = tuple(sorted({number for tail in used_tails for number in tail.made}))
        operators = operators_of(code)
        output_nodes = [operators[number] for number in self.made]
        arguments = dict(zip(placeholders_of(code), arguments_of(graph), strict=True))
        read_nodes = {argument for node in operators[: tails.length] for argument in node.all_input_nodes}
        self.takes = [
            kind_and_name
            for node, kind_and_name in arguments.items()
            if node in read_nodes or kind_and_name[0] == "state"
        ]
        self.constants = tuple(str(name) for kind, name in self.takes if kind == "constant")
        self.inputs = tuple(int(index) for kind, index in self.takes if kind == "input")
        self.made_bytes = sum(value_of(node).nbytes for node in output_nodes)
        begins = [node for node, kind_and_name in arguments.items() if kind_and_name in self.takes]
        part = part_of(code, begins, operators[: tails.length], output_nodes)
        is_stacked = [kind != "constant" for kind, _ in self.takes]
        if not any(is_stacked):
            raise UnfusableError("one of its shards depends on nothing of the trial")
        self.run = StackedGraph(part, is_stacked, slots, graph.precision)


class _MultiHeadGraph:
    def __init__(
        self,
        prefix: StackedPrefix,
        rows: HeadAssignment,
        names: Sequence[str],
        places: dict[tuple[str, str | int], int],
    ) -> None:
        self._prefix = prefix
        self._takes = [places[argument] for argument in prefix.takes]
        self._names = names
        self._branches = [
            _StackedHead(
                tail,
                [index for index, tail_number in enumerate(rows.of) if tail_number == number],
                prefix,
                places,
            )
            for number, tail in enumerate(rows.tails.tails)
            if number in rows.of
        ]
        # Concatenated results are ordered by head; the inverse permutation restores the order of the members.
        order = [index for branch in self._branches for index in branch.rows]
        self._inverse = [order.index(index) for index in range(len(order))]

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        """Return the results, with the members in front; results that a member does not have are NaN."""
        common_values = self._prefix.run(*(arguments[place] for place in self._takes))
        parts = [branch(common_values, arguments) for branch in self._branches]
        return tuple(self._together([part.get(name) for part in parts]) for name in self._names)

    def _together(self, parts: Sequence[Tensor | None]) -> Tensor:
        present_parts = [part for part in parts if part is not None]
        if len(present_parts) < len(parts) or len({part.dtype for part in present_parts}) > 1:
            # Heads may return different dtypes; float64 holds float32 losses and ordinary counts exactly.
            float64_parts = [None if part is None else part.to(torch.float64) for part in parts]
            like = next(part for part in float64_parts if part is not None)
            present_parts = [
                like.new_full((len(branch.rows),), torch.nan) if part is None else part
                for branch, part in zip(self._branches, float64_parts, strict=True)
            ]
        return _picked(torch.cat(present_parts), self._inverse)


class _StackedHead:
    def __init__(
        self,
        tail: LossHead,
        rows: list[int],
        prefix: StackedPrefix,
        places: dict[tuple[str, str | int], int],
    ) -> None:
        self.rows = rows
        self._results = tail.results
        self._made = [prefix.made.index(number) for number in tail.made]
        own_arguments: list[tuple[tuple[str, str | int], bool]] = [
            *((("input", index), True) for index in tail.inputs),
            *((("constant", name), False) for name in tail.constants),
        ]
        self._given = [(places[argument], is_stacked) for argument, is_stacked in own_arguments]
        are_stacked = [*[True] * len(tail.made), *(is_stacked for _, is_stacked in own_arguments)]
        self._run = StackedGraph(tail.code, are_stacked, precision=prefix.precision)

    def __call__(self, made: Sequence[Tensor], arguments: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the head's results by name, each a vector with an element per row."""
        common_values = [_picked(made[place], self.rows) for place in self._made]
        own_values = [
            _picked(arguments[place], self.rows) if is_stacked else arguments[place]
            for place, is_stacked in self._given
        ]
        outputs = self._run(*common_values, *own_values)
        return {name: outputs[place].reshape(len(self.rows)) for name, place in self._results.items()}


def _picked(value: Tensor, rows: list[int]) -> Tensor:
    # Selecting all rows in order would only copy.
    if rows == list(range(value.size(0))):
        return value
    return value.index_select(0, torch.tensor(rows, device=value.device))


def _cost(rows: HeadAssignment, made_bytes: int) -> ShardCost:
    """Return the cost for a single member: the maximum over the heads, plus room for the rows and their gradients."""
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
