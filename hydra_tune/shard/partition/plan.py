"""A plan: a captured step cut into shards, with the needs of each unit and the lifetime of each value.

A plan of a graph holds no tensor of any trial, so trials with equal keys (`key_of` in `plan_request.py`) share the plan;
nobody may change a plan. An eager plan (`shard/execute/eager_plan.py`) is of one trial alone. Names of values are the
graph's node names. `PlanLibrary` (`plan_cache.py`) has a plan built when a trial meets a new kind of batch. `BatchUnits`
(`train/loop/batch_units.py`) makes the units of each batch by the plan, `ShardChain` (`shard/execute/chain.py`) computes
the units, and `pool/dry_run/report.py` reports the plan for `HydraExecutor.plan`. Modules of `train/` and `fusion/` read
plans. `partition_planner.py`, `shard/cost/step_estimate.py` and `shard/verify/sample_check.py` call `build_plan` for
plans that no trial runs; the first chooses the edges. `shard/verify/` compares each new plan with the uncut step. The
module must not run units, or know trials over time, the pager or the schedule.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from torch import Tensor

from hydra_tune.shard.analysis.graph_analysis import GraphAnalysis
from hydra_tune.shard.capture.step_capture import CapturedStepGraph
from hydra_tune.shard.cost.pilot import ShardCost, ShardPilot
from hydra_tune.shard.execute import compute
from hydra_tune.shard.execute.compute import ShardExecutor
from hydra_tune.shard.partition.subgraph import ShardGraph, cut_shard

ShardActivations = Literal["recompute", "keep", "spill"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A shard of a plan.

    Attributes:
        cost: bytes needed by the shard's units.
        needs_gradient: live-ins with a gradient.
        gradient_outputs: live-outs that hand a gradient back; a loss among the live-outs starts the backward.
        losses: live-outs that are results of the step.
        trained: parameters with a complete gradient after this shard's backward; the shard's update steps these parameters.
        shared_gradients: parameters also used by an earlier shard, which receives their gradient.
        has_backward: whether any gradient flows through the shard.
        activations: treatment of the activations needed by the backward: "recompute" drops the activations after the
            forward unit, "keep" leaves the activations on the device as long as nothing else needs the room, "spill"
            sends the activations to the host at once. A shard without a separate forward unit has its activations
            anyway.
    """

    graph: ShardGraph
    cost: ShardCost
    needs_gradient: frozenset[str]
    gradient_outputs: tuple[str, ...]
    losses: tuple[str, ...]
    trained: tuple[str, ...]
    shared_gradients: tuple[str, ...]
    has_backward: bool
    activations: ShardActivations = "recompute"

    @property
    def keeps_activations(self) -> bool:
        """Whether the backward unit continues from the graph of the forward unit."""
        return self.activations != "recompute"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """A step cut into shards.

    Attributes:
        mode: "train" or "evaluate".
        names: names of the step's results, in the order of `outputs`.
        outputs: values that are the step's results.
        constants: tensors used by the graph that belong to no trial, by placeholder name.
        birth: value -> index of the shard that makes the value.
        first_use, last_use: value -> first and last shard that uses the value.
        operators: the graph's operators in order; equal operators allow the same cuts for another batch size.
        eager: whether the only shard runs the user's own code instead of a graph.
        why_eager: reason for running without a graph, in a line; "" with a graph.
        one_shard_bytes: most bytes that the step needs on a device as a single shard; 0: not counted, as for own code, for
            evaluations and for further kinds of batches.
    """

    mode: str
    shards: tuple[Shard, ...]
    names: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: dict[str, Tensor]
    birth: dict[str, int]
    first_use: dict[str, int]
    last_use: dict[str, int]
    operators: tuple[str, ...] = ()
    eager: bool = False
    computing: ShardExecutor = compute
    why_eager: str = ""
    one_shard_bytes: int = 0

    @property
    def cuts(self) -> tuple[int, ...]:
        """Node positions of the cuts."""
        return tuple(shard.graph.first for shard in self.shards[1:])

    @property
    def peak_bytes(self) -> int:
        """Most bytes that any unit needs on a device at once."""
        return max(shard.cost.peak_bytes for shard in self.shards)

    @property
    def updates_on_host(self) -> bool:
        """Whether optimizer state stays on the host and updates run there."""
        return any(shard.cost.updates_on_host for shard in self.shards)

    @property
    def optimizer_placement(self) -> Literal["device", "host"]:
        """Place of the updates as a word."""
        return "host" if self.updates_on_host else "device"

    @property
    def is_stochastic(self) -> bool:
        """Whether the step draws random numbers."""
        return any(shard.graph.stochastic for shard in self.shards)

    @property
    def may_run_beside(self) -> bool:
        """Whether steps of several batches may run at once with the same results as one after the other.

        False if a forward overwrites buffers (BatchNorm), if the step is the user's own code, if the number of random draws
        is not known beforehand, or if an operator reads Python state as it runs.
        """
        return self._may_wait and not any(shard.graph.written_state for shard in self.shards)

    @property
    def may_be_pipelined(self) -> bool:
        """Whether several batches of a step may run at once if each shard's units run in the order of the batches.

        False for a single shard, and in the last three cases of `may_run_beside`. The order holds in a pipeline, and
        also if all batches go through a shard before the next shard is loaded. A forward may then overwrite buffers
        (BatchNorm), unless another shard uses the buffers.
        """
        if not self._may_wait or len(self.shards) == 1:
            return False
        # The order holds within a shard: units of two shards on the same buffer would meet in no fixed order.
        used = self.used_state()
        return all(len(used[name]) == 1 for shard in self.shards for name in shard.graph.written_state)

    @property
    def may_be_split(self) -> bool:
        """Whether steps of several batches may run at once, either freely or in the order of the batches."""
        return self.may_run_beside or self.may_be_pipelined

    @property
    def _may_wait(self) -> bool:
        # The user's own code may draw from any generator, any number of times, and reads the Python state that the data
        # of later batches have left.
        graphs = [shard.graph for shard in self.shards]
        are_counted = all(graph.counted_draws or not graph.stochastic for graph in graphs)
        return not self.eager and are_counted and not any(graph.reads_state for graph in graphs)

    def used_state(self) -> dict[str, list[int]]:
        """Name of each used parameter or buffer -> indices of the shards that use the tensor."""
        used: dict[str, list[int]] = {}
        for index, shard in enumerate(self.shards):
            for name in shard.graph.state:
                used.setdefault(name, []).append(index)
        return used


def build_plan(
    captured: CapturedStepGraph,
    analysis: GraphAnalysis,
    pilot: ShardPilot,
    edges: list[int],
    backend: str | None = None,
) -> ShardPlan:
    """Cut a captured step at `edges` (from 0 to the number of nodes); see `cut_shard` for `backend`."""
    graphs = [cut_shard(captured, analysis, a, b, backend) for a, b in pairwise(edges)]
    shards = [_shard(captured, analysis, pilot, graph) for graph in graphs]
    # Only values that cross a cut live longer than a unit, so only these need a first and a last use.
    uses: dict[str, list[int]] = {}
    for index, graph in enumerate(graphs):
        for name in graph.live_in:
            uses.setdefault(name, []).append(index)
    return ShardPlan(
        mode=captured.mode,
        shards=tuple(shards),
        names=captured.names,
        outputs=captured.outputs,
        constants={name: captured.constants[name] for name in _constants(graphs)},
        birth={name: index for index, graph in enumerate(graphs) for name in graph.live_out},
        first_use={name: indices[0] for name, indices in uses.items()},
        last_use={name: indices[-1] for name, indices in uses.items()},
        operators=operators(captured),
    )


def operators(captured: CapturedStepGraph) -> tuple[str, ...]:
    """Operators of a graph in order."""
    return tuple(str(node.target) for node in captured.nodes)


def _constants(graphs: Iterable[ShardGraph]) -> list[str]:
    return list(dict.fromkeys(name for graph in graphs for name in graph.constants))


def _shard(captured: CapturedStepGraph, analysis: GraphAnalysis, pilot: ShardPilot, graph: ShardGraph) -> Shard:
    training = captured.mode == "train"
    values = analysis.values
    outputs = set(captured.outputs)
    # A parameter used by several shards is trained where its gradient is complete: at its first shard, the last to run.
    trained = tuple(pilot.trained_here(graph)) if training else ()
    trainable = {name for name in graph.state if pilot.requires_grad(name)} if training else set()
    needs = frozenset(name for name in graph.live_in if values[name].requires_grad) if training else frozenset()
    gradient_outputs = tuple(n for n in graph.live_out if training and values[n].requires_grad)
    return Shard(
        graph=graph,
        cost=pilot.cost(graph.first, graph.last),
        needs_gradient=needs,
        gradient_outputs=gradient_outputs,
        losses=tuple(n for n in graph.live_out if n in outputs),
        trained=trained,
        shared_gradients=tuple(name for name in graph.state if name in trainable and name not in trained),
        has_backward=bool(needs or trainable),
    )
