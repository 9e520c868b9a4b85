"""Graph rewriter (§3.2, step 6): merged graphs of the halves of two steps, with every decision as a node.

Draws, copies to the host, copies back, waits and deletions are nodes of their own (`planner/ir/planner_ops.py`). An
operator appears once more for each map that is recomputed with the operator, before the map's first use in the
backward. So a merged graph says everything that happens, and in which order. `DeviceStepRunner`
(`fusion/runtime/planned_executor.py`) has the graphs written before a planned step first runs, once for all devices, and
`planner/run/runner.py` and `planner/run/interpreter.py` run the graphs. The rewriter must not decide anything: the schedule
holds all decisions.

Note: names. `a0_` marks the first sub-array, and `a1_` the second. Values that a forward leaves for its backward are
outputs of one merged graph and arguments of the other, under the same names: `a0_relu` is a kept value, and
`a0_relu_on_host` is a copy. `planner/run/interpreter.py` reads the side of a draw off the prefix, and
`planner/run/runner.py` makes host memory under the names in the nodes of copies to the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from hydra_tune.planner.ir import planner_ops
from hydra_tune.planner.ir.aliasing import overwritten, without_statistics
from hydra_tune.planner.ir.instructions import Instruction, InstructionKind
from hydra_tune.planner.ir.lowering import lowered
from hydra_tune.planner.ir.plan_state import ScheduleSegment, SubArraySchedule
from hydra_tune.planner.ir.verify import verify_graph
from hydra_tune.planner.trace.step_graph import StepGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedGraph:
    """Graph of a segment.

    Attributes:
        graph: takes the arguments of the sub-arrays' steps, as far as it uses them, and the values that the forwards
            left.
        outputs: names of the outputs, in order.
        owner: module that holds the constants.
    """

    segment: ScheduleSegment
    graph: fx.Graph
    outputs: tuple[str, ...]
    owner: nn.Module

    def text(self) -> str:
        """Return the graph as text, with a node on each line."""
        return "\n".join(_told(node) for node in self.graph.nodes) + "\n"


def losses_of(side: int) -> str:
    """Return the name under which a merged graph gives a sub-array's losses."""
    return f"a{side}_losses"


def rewritten(schedule: SubArraySchedule, steps: Sequence[StepGraph]) -> dict[ScheduleSegment, MergedGraph]:
    """Return the merged graphs of a schedule's segments and ends, with `steps` in the order of the schedule's sub-arrays."""
    kept_nodes: dict[int, list[fx.Node]] = {}
    for side in range(len(steps)):
        # A backward alone shows the kept values that it needs; these become outputs of the forwards below.
        backward = _MergedGraphRewriter(schedule, steps, ScheduleSegment(side, None), {})
        backward.merged()
        kept_nodes[side] = backward.needed
    graphs = {}
    # The segments of a single sub-array are also its ends.
    for segment in dict.fromkeys((*schedule.segments, *schedule.ends)):
        graphs[segment] = _MergedGraphRewriter(schedule, steps, segment, kept_nodes).merged()
        verify_graph(graphs[segment].graph)
    return graphs


class _MergedGraphRewriter:
    def __init__(
        self,
        schedule: SubArraySchedule,
        steps: Sequence[StepGraph],
        segment: ScheduleSegment,
        left: dict[int, list[fx.Node]],
    ) -> None:
        self._schedule, self._steps, self._segment, self._left = schedule, steps, segment, left
        self._owner = nn.Module()
        self._graph = fx.Graph()
        self._arguments: dict[str, fx.Node] = {}
        self._last_argument: fx.Node | None = None
        self._new: dict[int, dict[fx.Node, fx.Node]] = {side: {} for side in range(len(steps))}
        self._again: dict[tuple[int, str], dict[fx.Node, fx.Node]] = {}
        self._moving: dict[tuple[int, str], fx.Node] = {}  # node of a storage under way or back
        self._on_host: dict[str, fx.Node] = {}
        self.needed: list[fx.Node] = []

    def merged(self) -> MergedGraph:
        """Write the segment's instructions as one graph, whose outputs are losses, maps left on the device, and host copies."""
        for instruction in lowered(self._schedule, self._segment):
            self._emit(instruction)
        outputs: dict[str, fx.Node] = {}
        side = self._segment.forward
        if side is not None:
            step = self._steps[side]
            (end,) = (node for node in step.graph.nodes if node.op == "output")
            outputs[losses_of(side)] = self._new[side][end.args[0][0]]
            outputs |= {f"a{side}_{node.name}": self._new[side][node] for node in self._left.get(side, ())}
            outputs |= self._on_host
        self._graph.output(tuple(outputs.values()))
        return MergedGraph(segment=self._segment, graph=self._graph, outputs=tuple(outputs), owner=self._owner)

    def _emit(self, one: Instruction) -> None:
        key = one.side, one.storage
        if one.kind is InstructionKind.RUN:
            step = self._steps[one.side]
            node = step.ops[step.num_forward + one.rank if one.is_backward else one.rank]
            self._new[one.side][node] = self._copy(node, one.side, "", lambda n: self._value(one.side, n))
        elif one.kind is InstructionKind.RERUN:
            self._emit_again(one)
        elif one.kind is InstructionKind.OFFLOAD:
            target = planner_ops.offload_at_once if one.is_at_once else planner_ops.offload
            self._moving[key] = self._graph.call_function(target, (self._latest(one), f"a{one.side}_{one.storage}"))
        elif one.kind is InstructionKind.RELEASE:
            host_copy = self._graph.call_function(planner_ops.release, (self._moving.pop(key),))
            self._on_host[self._host_name(one)] = host_copy
        elif one.kind is InstructionKind.PREFETCH:
            # A map with several absences has views on the bytes of its last return.
            self._forget(one)
            back = planner_ops.prefetch_at_once if one.is_at_once else planner_ops.prefetch
            self._moving[key] = self._graph.call_function(back, (self._argument(self._host_name(one)),))
        elif one.kind is InstructionKind.ARRIVE:
            self._moving[key] = self._graph.call_function(planner_ops.arrived, (self._moving[key],))
        else:
            self._graph.call_function(planner_ops.delete, (self._latest(one),))

    def _emit_again(self, one: Instruction) -> None:
        copies = self._again.setdefault((one.side, one.storage), {})
        step = self._steps[one.side]
        node = step.ops[one.rank]
        copies[node] = self._copy(
            node, one.side, f"_for_{one.storage}", lambda n: self._value_again(one.side, one.storage, n)
        )
        # A node can have several tensors. Take the needed tensors right away, so that the others can be freed.
        recomputed_ranks = self._schedule.decisions[one.side].recomputes[one.storage].ops
        for part in node.users:
            if node.name not in step.seen.places and part in step.ops[: step.num_forward]:
                readers = {step.ops.index(user) for user in _through_views(step, part)}
                if one.storage in step.seen.storages[part.name] or readers & recomputed_ranks:
                    self._value_again(one.side, one.storage, part)

    def _copy(self, node: fx.Node, side: int, suffix: str, value: Any) -> fx.Node:
        args = without_statistics(node, node.args) if suffix else node.args
        # The suffix holds the name of a storage. Storages of a node with several tensors have a dot in their names, and
        # fx accepts no dots.
        new_node = self._graph.create_node(
            node.op,
            node.target,
            fx.node.map_arg(args, value),
            fx.node.map_arg(node.kwargs, value),
            name=f"a{side}_{node.name}{suffix}".replace(".", "_"),
        )
        new_node.meta = {}
        return new_node

    def _value(self, side: int, node: fx.Node) -> fx.Node:
        """Return the node that stands for a value: an operator run here, an argument, or a forward value."""
        new_nodes = self._new[side]
        if node in new_nodes:
            return new_nodes[node]
        step, decisions = self._steps[side], self._schedule.decisions[side]
        if node.op == "placeholder":
            new_nodes[node] = self._argument(f"a{side}_{node.name}")
            return new_nodes[node]
        if node.op == "get_attr":
            name = f"a{side}_{node.target}".replace(".", "_")
            # Both sub-arrays' constants live in a single module, and the prefix keeps them apart.
            setattr(self._owner, name, getattr(step.owner, str(node.target)))
            new_nodes[node] = self._graph.get_attr(name)
            return new_nodes[node]
        (storage,) = step.seen.storages[node.name]
        has_run = step.ops.index(node) < step.num_forward or storage in decisions.returns  # its views are made anew
        assert has_run, f"{node} is used before it has run"
        if storage not in self._schedule.arrays[side].maps:
            new_nodes[node] = self._of_static(side, node)
        elif storage in decisions.recomputes:
            return self._value_again(side, storage, node)
        elif storage in decisions.swaps:
            # The bytes come back as one flat tensor, so every view of the storage is made anew.
            place = step.seen.places[node.name]
            view_arguments = (
                self._moving[side, storage],
                place.dtype,
                list(place.size),
                list(place.stride),
                place.offset,
            )
            new_nodes[node] = self._graph.call_function(planner_ops.view_of, view_arguments)
        else:
            self.needed.append(node)
            new_nodes[node] = self._argument(f"a{side}_{node.name}")
        return new_nodes[node]

    def _of_static(self, side: int, node: fx.Node) -> fx.Node:
        """Return the node of a forward value that lies in a parameter, buffer or batch.

        A view is made anew. An overwritten tensor is passed as it is, because the write must not happen twice.
        """
        step = self._steps[side]
        if step.seen.writes[node.name]:
            assert not step.seen.makes[node.name], f"{node} would run a second time"
            storages = step.seen.storages[node.name]
            return self._value(
                side,
                next(argument for argument in overwritten(node)[0] if step.seen.storages[argument.name] == storages),
            )
        return self._copy(node, side, "", lambda n: self._value(side, n))

    def _value_again(self, side: int, storage: str, node: fx.Node) -> fx.Node:
        """Return the node that stands for a value in the recomputation of a storage."""
        copies = self._again[side, storage]
        if node in copies:
            return copies[node]
        if node.op != "call_function":
            return self._value(side, node)
        step = self._steps[side]
        storages = step.seen.storages[node.name]
        sources = self._schedule.decisions[side].recomputes[storage].sources
        # A source or a static tensor is on the device: read it as the backward does.
        if all(
            storage_name in sources or storage_name not in self._schedule.arrays[side].sizes
            for storage_name in storages
        ):
            return self._value(side, node)
        assert not step.seen.makes[node.name], f"{node} is needed to recompute {storage} and is not run again"
        copies[node] = self._copy(node, side, f"_for_{storage}", lambda n: self._value_again(side, storage, n))
        return copies[node]

    def _forget(self, one: Instruction) -> None:
        """Drop the nodes of a storage's values, because the storage comes back once more and needs new views."""
        places, new_nodes = self._steps[one.side].seen.places, self._new[one.side]
        for node in [node for node in new_nodes if node.name in places and places[node.name].storage == one.storage]:
            del new_nodes[node]

    def _latest(self, one: Instruction) -> fx.Node:
        """Return a node of a tensor in a storage: the last that has been made."""
        step = self._steps[one.side]
        holders = [
            new_node
            for node, new_node in self._new[one.side].items()
            if node.name in step.seen.places and step.seen.places[node.name].storage == one.storage
        ]
        return holders[-1]

    def _host_name(self, one: Instruction) -> str:
        return f"a{one.side}_{one.storage}_on_host".replace(".", "_")

    def _argument(self, name: str) -> fx.Node:
        if name not in self._arguments:
            first_node = next(iter(self._graph.nodes), None)
            # An argument can turn up late, but fx wants placeholders before all other nodes.
            if self._last_argument is not None:
                place = self._graph.inserting_after(self._last_argument)
            elif first_node is not None:
                place = self._graph.inserting_before(first_node)
            else:
                place = self._graph.inserting_before()
            with place:
                self._arguments[name] = self._last_argument = self._graph.placeholder(name.replace(".", "_"))
        return self._arguments[name]


def _through_views(step: StepGraph, node: fx.Node) -> list[fx.Node]:
    """Operators of the forward that use a value, directly or through a view."""
    users: list[fx.Node] = []
    ops = set(step.ops[: step.num_forward])
    for user in (user for user in node.users if user in ops):
        users.append(user)
        if not step.seen.makes[user.name]:
            users += _through_views(step, user)
    return users


def _told(node: fx.Node) -> str:
    if node.op == "placeholder":
        return f"{node.name} = argument"
    if node.op == "output":
        return "return " + ", ".join(str(argument) for argument in node.all_input_nodes)
    target = node.target
    name = target.__name__ if callable(target) and not isinstance(target, torch._ops.OpOverload) else str(target)  # noqa: SLF001
    arguments = [_plain(argument) for argument in node.args] + [
        f"{key}={_plain(value)}" for key, value in node.kwargs.items()
    ]
    return f"{node.name} = {name}({', '.join(arguments)})"


def _plain(value: Any) -> str:
    return repr(value) if isinstance(value, str) else str(value)
