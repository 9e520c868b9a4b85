"""Turn the plan of a single member into the plan of a group: every shard runs on stacked members.

`GroupPlanFactory` (`batched_plan_cache.py`) stacks a member's plan, and traces the stacked plan with the capture gate held
alone, before a group's first unit on each kind of batch. Units of the group (`fusion/group/group_step.py`,
`fusion/group/multi_step_unit.py`) run the `StackedPlanExecutor` of the plan, or the `CapturedPlanExecutor`
(`cuda_graph_steps.py`) of its recorded step. The module must not decide which trials are in a group.

Note: groups of the same size share a stacked plan and its traces, so a plan must hold no tensor of a group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hydra_tune.batched.joint_graph import ForwardTrace, JointTrace, traced, traced_forward
from hydra_tune.errors import UnfusableError
from hydra_tune.fusion.batching.batched_graph import StackedGraph
from hydra_tune.fusion.compile.torch_compile import compiled_trace
from hydra_tune.fusion.matching.plan_diff import refuse_whole, with_stand_ins
from hydra_tune.fusion.ragged.loss_heads import HeadAssignment
from hydra_tune.fusion.ragged.masked_loss import MaskedReduction, with_counts
from hydra_tune.fusion.ragged.multi_head_graph import StackedPrefix, with_results, with_tails
from hydra_tune.shard.capture.step_module import Objective, loss_itself
from hydra_tune.shard.capture.step_module import objective as step_objective
from hydra_tune.shard.cost.pilot import ShardCost
from hydra_tune.shard.execute import compute
from hydra_tune.shard.execute.compute import IncomingGradients, ShardGradients, ShardOperands, ShardTape
from hydra_tune.shard.partition.plan import Shard, ShardPlan
from hydra_tune.shard.partition.subgraph import ShardGraph

_MULTIPLIED = tuple(name for name in ShardCost.__dataclass_fields__ if name.endswith(("_bytes", "_workspace")))


@dataclass(frozen=True, slots=True)
class SummedLosses:
    """Objective of a group: the sum of the members' losses, each divided and scaled as in a single trial.

    No operator mixes members, so the sum has each member's own gradients.

    Attributes:
        scales: the members' loss scales, (members,); None if losses are not scaled.
    """

    divisor: int
    scales: Tensor | None = None

    def __call__(self, losses: Tensor) -> Tensor:
        """Return the sum."""
        return step_objective(self.divisor, self.scales)(losses).sum()


def scales_of(objective: Objective) -> Tensor | None:
    """Return the loss scales of a group's objective; None if losses are not scaled."""
    return objective.scales if isinstance(objective, SummedLosses) else None


@dataclass(slots=True)
class StackedPlanExecutor:
    """Runs the shards of a group's plan: by the trace of a traced shard, otherwise as `shard/execute/compute.py` does.

    Attributes:
        traces: traces of combined forward and backward, by the first node of the shard.
        forwards: traces of forwards without gradients, likewise.
        untraceable: types of devices for which no trace is tried again, because an attempt has failed.
    """

    traces: dict[int, JointTrace] = field(default_factory=dict)
    forwards: dict[int, ForwardTrace] = field(default_factory=dict)
    untraceable: set[str] = field(default_factory=set)

    def forward(
        self, shard: ShardGraph, operands: ShardOperands, needs_gradient: frozenset[str] | None = None
    ) -> dict[str, Tensor]:
        """As `compute.forward`."""
        trace = self.forwards.get(shard.first) if needs_gradient is None else None
        if trace is not None and trace.place.type == operands.state[0].device.type:
            with torch.no_grad():
                return dict(zip(shard.live_out, trace.run(*operands.all), strict=True))
        return compute.forward(shard, operands, needs_gradient)

    def trace_on(self, shard: ShardGraph, operands: ShardOperands) -> JointTrace | None:
        """Return the trace of a shard for the device of its operands, if there is any."""
        trace = self.traces.get(shard.first)
        return None if trace is None or trace.place.type != operands.state[0].device.type else trace

    def taped_forward(
        self, shard: ShardGraph, operands: ShardOperands, needs_gradient: frozenset[str]
    ) -> tuple[dict[str, Tensor], ShardTape]:
        """As `compute.taped_forward`."""
        return compute.taped_forward(shard, operands, needs_gradient)

    def backward(
        self,
        shard: ShardGraph,
        operands: ShardOperands,
        *,
        needs_gradient: frozenset[str],
        incoming: IncomingGradients,
        objective: Objective = loss_itself,
    ) -> ShardGradients:
        """As of `compute.backward`; the objective is the sum of the members' losses."""
        trace = self.trace_on(shard, operands)
        if trace is not None:
            noise = trace.draw(operands.state[0].device, scales_of(objective))
            return _with_memory_of_their_own(trace.run(operands, noise))
        return compute.backward(shard, operands, needs_gradient=needs_gradient, incoming=incoming, objective=objective)


def _with_memory_of_their_own(made: ShardGradients) -> ShardGradients:
    """Return gradients with separate memory for every element, as autograd's: later code updates gradients in place.

    A trace may return expanded tensors, whose elements share memory.
    """
    dense = {
        name: gradient.contiguous() if _repeats(gradient) else gradient for name, gradient in made.parameters.items()
    }
    return replace(made, parameters=dense)


def _repeats(tensor: Tensor) -> bool:
    return any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


def stacked_plan(
    plan: ShardPlan,
    count: int,
    slots: frozenset[str] = frozenset(),
    rows: HeadAssignment | None = None,
    counted: Mapping[str, MaskedReduction] | None = None,
) -> ShardPlan:
    """Return the plan of a group.

    Args:
        plan: the plan of a single member.
        count: number of members.
        slots: names of dropout nodes with a separate probability for each member.
        rows: assignment of losses or metrics to members, if they differ; `plan` is the first of its plans.
        counted: reductions over samples, by node name, for padded batches; the batch then has an additional tensor
            `(N,)` with the number of samples that count. None: all samples count.

    Raises:
        UnfusableError: a shard cannot run on stacked members.
    """
    refuse_whole(plan)
    if rows is None:
        shards = tuple(_stacked_shard(shard, count, slots, counted) for shard in plan.shards)
        return replace(plan, shards=shards, computing=StackedPlanExecutor())
    # `GroupPlanCache.of` never pads batches of members whose architectures, and so losses, differ.
    assert counted is None, "members with other losses have batches of one size"
    (shard,) = plan.shards
    shards = (_tailed_shard(shard, count, slots, rows),)
    return with_results(replace(plan, shards=shards, computing=StackedPlanExecutor()), rows)


def is_traced(plan: ShardPlan) -> bool:
    """Return whether a group's plan has a trace."""
    return isinstance(plan.computing, StackedPlanExecutor) and bool(plan.computing.traces or plan.computing.forwards)


def trace_step(
    plan: ShardPlan,
    state: Sequence[Tensor],
    inputs: Sequence[Tensor],
    count: int,
    backend: str | None = None,
    divisor: int = 1,
    place: torch.device | None = None,
) -> bool:
    """Trace the step or the evaluation of a group's plan; return whether there is a trace now, False for several shards.

    Args:
        plan: the group's plan.
        state: stacked parameters and buffers of the shard, in the shard's order.
        inputs: all tensors of the stacked batch.
        count: number of members.
        backend: backend of `torch.compile` for training steps; None: no compilation.
        divisor: divisor of every loss.
        place: as of `traced`.
    """
    computing = plan.computing
    assert isinstance(computing, StackedPlanExecutor), "not a group's plan"
    if len(plan.shards) > 1:
        return False
    (shard,) = plan.shards
    graph = shard.graph
    # A traced forward is a pure function: the trace would freeze random numbers and lose writes to buffers.
    if plan.mode != "train" and (graph.stochastic or graph.written_state):
        return False
    operands = ShardOperands(
        state=state,
        constants=[plan.constants[name] for name in graph.constants],
        inputs=[inputs[index] for index in graph.inputs],
        live_in=(),
    )
    if plan.mode != "train":
        computing.forwards[graph.first] = traced_forward(graph.module, operands, place)
        return True
    trained = [tensor.requires_grad for tensor in state]
    draws = graph.stochastic
    trace = traced(
        graph.module,
        graph.state,
        operands,
        trained,
        plan.outputs[0],
        count,
        draws=draws,
        divisor=divisor,
        place=place,
        is_scaled=graph.precision == "float16",
    )
    if trace is not None:
        if backend is not None:
            written_places = [graph.state.index(name) for name in graph.written_state]
            trace = compiled_trace(trace, backend, operands, written_places, count)
        computing.traces[graph.first] = trace
    return trace is not None


def _stacked_shard(
    shard: Shard, count: int, slots: frozenset[str], counted: Mapping[str, MaskedReduction] | None
) -> Shard:
    graph = shard.graph
    if graph.code is None:
        raise UnfusableError("its shards are compiled (compile=), and a compiler's code is for one trial")
    code = graph.code
    if counted is not None:
        code = with_counts(code, counted, len(graph.state) + len(graph.constants) + len(graph.inputs))
        # `counted_losses` requires a graph that uses every tensor of the batch, and
        # `StackedBatches` appends the counts, so the counts have the next index.
        graph = replace(graph, code=code, inputs=(*graph.inputs, max(graph.inputs) + 1))
    is_stacked = [
        *[True] * len(graph.state),
        *[False] * len(graph.constants),
        *[True] * len(graph.inputs),
        *[True] * len(graph.live_in),
    ]
    if not any(is_stacked):
        raise UnfusableError("one of its shards depends on nothing of the trial")
    # `slots` covers the whole plan; keep the names in this shard.
    shard_slots = slots & {node.name for node in code.graph.nodes}
    code = with_stand_ins(code, shard_slots) if shard_slots else code
    graph = replace(
        graph,
        module=StackedGraph(code, is_stacked, shard_slots, graph.precision),
        stochastic=graph.stochastic or bool(shard_slots),
    )
    return replace(shard, graph=graph, cost=_multiplied(shard.cost, count))


def _tailed_shard(shard: Shard, count: int, slots: frozenset[str], rows: HeadAssignment) -> Shard:
    graph = shard.graph
    assert graph.code is not None, "compared before"
    shard_slots = slots & {node.name for node in graph.code.graph.nodes}
    code = with_stand_ins(graph.code, shard_slots) if shard_slots else graph.code
    prefix = StackedPrefix(graph, code, rows, shard_slots)
    group_shard = with_tails(
        replace(shard, graph=replace(graph, stochastic=graph.stochastic or bool(shard_slots))), rows, prefix
    )
    return replace(group_shard, cost=_multiplied(group_shard.cost, count))


def _multiplied(cost: ShardCost, count: int) -> ShardCost:
    return replace(cost, **{name: getattr(cost, name) * count for name in _MULTIPLIED})
