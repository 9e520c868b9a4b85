"""A plan: a captured step cut into shards, with what each unit needs and when each value may go.

Plans hold no tensor of any trial and are shared by all trials of an architecture. Names of values are the graph's node names.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from torch import Tensor

from hydra_tune.shard import compute
from hydra_tune.shard.analysis import Analysis
from hydra_tune.shard.capture import Captured
from hydra_tune.shard.compute import Computing
from hydra_tune.shard.pilot import Pilot, ShardCost
from hydra_tune.shard.split import ShardGraph, cut_shard

ShardActivations = Literal["recompute", "keep", "spill"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One shard of a plan.

    Attributes:
        graph: what it computes.
        cost: bytes its units need.
        needs_gradient: live-ins a gradient is wanted for.
        gradient_outputs: live-outs that hand a gradient back; a loss among them starts the backward.
        losses: those live-outs that are the step's result.
        trained: parameters whose gradient is complete, and which are updated, after this shard's backward.
        shared_gradients: parameters also used by an earlier shard, whose gradient is handed on to it.
        has_backward: whether any gradient flows through it.
        activations: what its forward unit does with the activations that its backward needs: "recompute" drops them, "keep"
            leaves them on the device as long as nothing else needs the room, "spill" sends them to the host at once. A shard
            that has no forward unit of its own has them anyway.
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
        """Whether its backward unit goes on from the graph of its forward unit."""
        return self.activations != "recompute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A step cut into shards.

    Attributes:
        mode: "train" or "evaluate".
        shards: in forward order.
        names: what the step's results are called, in the order of `outputs`.
        outputs: the values that are the step's results.
        constants: tensors the graph uses that belong to no trial, by placeholder name.
        birth: value -> index of the shard that makes it.
        first_use, last_use: value -> first and last shard that uses it.
        operators: the graph's operators in order; equal ones make the same cuts possible for another batch size.
        eager: whether the one shard runs the user's own code instead of a graph.
        computing: runs its shards.
        why_eager: why there is no graph of it, in a line; "" where there is.
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
    computing: Computing = compute
    why_eager: str = ""

    @property
    def cuts(self) -> tuple[int, ...]:
        """Node positions at which the graph is cut."""
        return tuple(shard.graph.first for shard in self.shards[1:])

    @property
    def peak_bytes(self) -> int:
        """The most any unit needs on a device at once."""
        return max(shard.cost.peak_bytes for shard in self.shards)

    @property
    def updates_on_host(self) -> bool:
        """Whether optimizer state stays on the host, and updates are made there."""
        return any(shard.cost.updates_on_host for shard in self.shards)

    @property
    def optimizer_placement(self) -> Literal["device", "host"]:
        """The same as a word."""
        return "host" if self.updates_on_host else "device"

    @property
    def is_stochastic(self) -> bool:
        """Whether it draws random numbers."""
        return any(shard.graph.stochastic for shard in self.shards)

    @property
    def may_run_beside(self) -> bool:
        """Whether steps of several batches may be under way at once with the results they have one after the other.

        Not where a forward overwrites buffers that the next one reads (BatchNorm), where it is the user's own code, or where
        how many random numbers it draws is not known before.
        """
        return self._draws_are_counted and not any(shard.graph.written_state for shard in self.shards)

    @property
    def may_be_pipelined(self) -> bool:
        """Whether several batches of a step may be under way at once if each shard's units run in the order of the batches.

        So it is in a pipeline, and where all batches go through a shard before the next is loaded. Then a forward may overwrite
        buffers (BatchNorm), if no other shard uses them.
        """
        if not self._draws_are_counted or len(self.shards) == 1:
            return False
        used = self.used_state()
        return all(len(used[name]) == 1 for shard in self.shards for name in shard.graph.written_state)

    @property
    def may_be_split(self) -> bool:
        """Whether steps of several batches may be under way at once, one way or the other."""
        return self.may_run_beside or self.may_be_pipelined

    @property
    def _draws_are_counted(self) -> bool:
        return not self.eager and all(shard.graph.counted_draws or not shard.graph.stochastic for shard in self.shards)

    def used_state(self) -> dict[str, list[int]]:
        """Name of each parameter or buffer used -> the shards that use it."""
        used: dict[str, list[int]] = {}
        for index, shard in enumerate(self.shards):
            for name in shard.graph.state:
                used.setdefault(name, []).append(index)
        return used


def build_plan(
    captured: Captured, analysis: Analysis, pilot: Pilot, edges: list[int], backend: str | None = None
) -> Plan:
    """Cut a captured step at `edges` (from 0 to the number of nodes); see `cut_shard` for `backend`."""
    graphs = [cut_shard(captured, analysis, a, b, backend) for a, b in pairwise(edges)]
    shards = [_shard(captured, analysis, pilot, graph) for graph in graphs]
    uses: dict[str, list[int]] = {}
    for index, graph in enumerate(graphs):
        for name in graph.live_in:
            uses.setdefault(name, []).append(index)
    return Plan(
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


def operators(captured: Captured) -> tuple[str, ...]:
    """The operators of a graph in order."""
    return tuple(str(node.target) for node in captured.nodes)


def _constants(graphs: Iterable[ShardGraph]) -> list[str]:
    return list(dict.fromkeys(name for graph in graphs for name in graph.constants))


def _shard(captured: Captured, analysis: Analysis, pilot: Pilot, graph: ShardGraph) -> Shard:
    training = captured.mode == "train"
    values = analysis.values
    outputs = set(captured.outputs)
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
