"""A batch as units that the pool can run one by one on any device: what training and evaluation share, and evaluation."""

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from hydra_tune.devices.device import Device, RandomGenerator
from hydra_tune.memory.block import Block
from hydra_tune.memory.home import bring_home
from hydra_tune.memory.lease import Lease
from hydra_tune.memory.pager import Pager
from hydra_tune.memory.pressure import not_repeatable
from hydra_tune.shard.batch import Leaves
from hydra_tune.shard.chain import Chain
from hydra_tune.shard.gate import GATE
from hydra_tune.shard.library import Prepared
from hydra_tune.shard.pilot import ShardCost
from hydra_tune.shard.plan import Plan, Shard
from hydra_tune.shard.steps import Objective, loss_itself
from hydra_tune.shard.whole import EagerStep
from hydra_tune.train.clock import UnitTimes, update_guess
from hydra_tune.train.room import RoomTracker
from hydra_tune.train.state import ModelState
from hydra_tune.train.store import BlockStore
from hydra_tune.train.streams import RandomStreams
from hydra_tune.train.undo import Undo

# What a unit does with the trial's random numbers: moves the stream on, draws what was drawn before, or draws none.
_KEPT, _REPLAYED, _NONE = "kept", "replayed", "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A unit that will be due: what is known of it beforehand.

    Attributes:
        kind, shard, seconds: as of `PendingUnit`.
        blocks: those of its blocks that there are by now, the ones that it cannot begin without. May be called from any
            thread, at any time: what it says of a unit that is over meanwhile is out of date, and does no harm.
        workspace_bytes: room that it needs beside them.
    """

    kind: str
    shard: int
    seconds: float
    blocks: Callable[[], list[Block]]
    workspace_bytes: int


def nothing_known() -> list[Expected]:
    """What follows a unit of which that is not known."""
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingUnit:
    """A unit that is due.

    Attributes:
        kind: "forward", "backward", "sum", "complete", "update" or "evaluate".
        shard: index of the shard.
        seconds: expected.
        run: runs it on a device's worker; returns seconds spent waiting for bytes, and for other trials' code.
        times: where its measured seconds go, under `key`.
        blocks, workspace_bytes: as of `Expected`.
        following: what comes after it in its trial, in order: an update of its shard, which is run along with it, and the
            next unit; as far as that is known.
    """

    kind: str
    shard: int
    seconds: float
    run: Callable[[Device, Pager], float]
    times: UnitTimes
    key: tuple[str, int]
    blocks: Callable[[], list[Block]] = list
    workspace_bytes: int = 0
    following: Callable[[], list[Expected]] = nothing_known


def unit_times(prepared: Prepared, accumulate: int = 1, name: str | None = None) -> UnitTimes:
    """First estimates of the seconds of a plan's units in a step of so many batches; `name` is for who measures together."""
    plan, seconds = prepared.plan, prepared.seconds
    times: dict[Hashable, float] = {}
    for index, shard in enumerate(plan.shards):
        if plan.mode != "train":
            times["evaluate", index] = 0.0 if seconds is None else seconds.forward[index]
            continue
        if index < len(plan.shards) - 1:
            times["forward", index] = 0.0 if seconds is None else seconds.forward[index]
        if shard.has_backward:
            times["backward", index] = 0.0 if seconds is None else seconds.backward[index]
        if shard.trained:
            cost = shard.cost
            times["update", index] = update_guess(cost.trained_bytes * 2 + cost.optimizer_bytes)
    repeated = ((kind, index) for kind in ("forward", "backward") for index in range(len(plan.shards)))
    return UnitTimes(times, dict.fromkeys(repeated, accumulate), name)


def _workspace(cost: ShardCost, *, backward: bool, recompute: bool) -> int:
    """Room that a unit needs beyond what it is given."""
    if recompute and cost.recompute_workspace:
        return cost.recompute_workspace
    return cost.backward_workspace if backward else cost.forward_workspace


class Step:
    """One batch: running one shard after the other on a device.

    Args:
        plan: how the step is cut for this kind of batch.
        times: of its units.
        state: the trial's long-lived tensors.
        leaves: the batch.
        streams: the trial's random streams.
        device: any device of the pool, for host memory.
        objective: what the backward starts from.
    """

    def __init__(
        self,
        plan: Plan,
        times: UnitTimes,
        state: ModelState,
        leaves: Leaves,
        streams: RandomStreams,
        device: Device,
        objective: Objective = loss_itself,
    ) -> None:
        self._plan = plan
        self._times = times
        self._state = state
        self._streams = streams
        self._leaves = leaves
        self._store = BlockStore(state, plan, leaves.tensors, device)
        self._chain = Chain(plan, self._store, objective, state.recomputed)

    def close(self) -> None:
        """Give up all of the step's values."""
        if self._plan.eager:
            # The user's own code may have changed the batch, and would see that when it draws it again.
            self._store.bring_inputs_home()
            self._leaves.hand_back()
        self.clear()

    def clear(self) -> None:
        """Give up all values, and leave the batch alone."""
        self._chain.close()
        self._store.clear()

    def _unit(
        self,
        kind: str,
        index: int,
        run: Callable[[Device, Pager], float],
        blocks: Callable[[], list[Block]] = list,
        workspace: int = 0,
        following: Callable[[], list[Expected]] | None = None,
    ) -> PendingUnit:
        key = (kind, index)
        return PendingUnit(
            kind=kind,
            shard=index,
            seconds=self._times.of(key),
            run=run,
            times=self._times,
            key=key,
            blocks=blocks,
            workspace_bytes=workspace,
            following=following or partial(self._following, kind, index),
        )

    def _following(self, kind: str, index: int) -> list[Expected]:
        """What comes after a unit."""
        del kind, index
        return []

    def _expected(self, kind: str, index: int) -> Expected:
        """A unit of this batch that runs a shard's graph."""
        return Expected(
            kind=kind,
            shard=index,
            seconds=self._times.of((kind, index)),
            blocks=partial(self._blocks, kind, index),
            workspace_bytes=self._workspace(kind, index),
        )

    def _expected_batch(self, kind: str) -> Expected:
        """The first unit of another batch, which is not drawn yet: it will want the parameters."""
        return Expected(
            kind=kind,
            shard=0,
            seconds=self._times.of((kind, 0)),
            blocks=lambda: list[Block](self._state.groups(self._plan.shards[0].graph.state)),
            workspace_bytes=self._workspace(kind, 0),
        )

    def _workspace(self, kind: str, index: int) -> int:
        return _workspace(self._plan.shards[index].cost, backward=kind == "backward", recompute=False)

    def _blocks(self, kind: str, index: int) -> list[Block]:
        """What a unit that runs a shard's graph needs on its device, the parameters first."""
        graph = self._plan.shards[index].graph
        return [*self._state.groups(graph.state), *self._graph_blocks(kind, index)]

    def _graph_blocks(self, kind: str, index: int) -> list[Block]:
        """The same without parameters and buffers."""
        graph = self._plan.shards[index].graph
        keys = self._chain.keys("backward" if kind == "backward" else "forward", index)
        return self._store.blocks(keys, graph.constants, graph.inputs)

    def _shard_unit(self, kind: str, index: int, compute: Callable[[Device], None]) -> PendingUnit:
        """A unit that runs a shard's graph, forward or backward."""
        run = partial(self._run_shard, kind, index, compute)
        return self._unit(kind, index, run, partial(self._blocks, kind, index), self._workspace(kind, index))

    def _run_shard(
        self, kind: str, index: int, compute: Callable[[Device], None], device: Device, pager: Pager
    ) -> float:
        shard, backward = self._plan.shards[index], kind == "backward"
        graph = shard.graph
        played = backward and self._chain.is_kept(index, device.torch_device)
        if backward and not played:
            self._chain.let_go(index)
        first = not backward or not self._chain.has_forward(index)
        workspace = _workspace(shard.cost, backward=backward, recompute=not (first or played))
        blocks = self._graph_blocks(kind, index)
        draws = _KEPT if first else _NONE if played else _REPLAYED
        start = time.perf_counter()
        with self._lease(pager, graph.state, blocks, workspace) as lease:
            with (
                self._undo(index, is_first=first),
                self._surroundings(shard, device, draws),
                self._room(shard, lease, workspace, device),
            ):
                waited = time.perf_counter() - start
                self._leased(lease, partial(compute, device))
                if self._plan.eager:
                    self._state.check()
            if first:
                self._state.touched(graph.written_state)
                if self._plan.eager:
                    self._state.touched(graph.state)
                    self._store.touched_inputs()
        return waited + (
            0.0
            if backward or shard.activations != "spill" or not self._chain.keeps(index)
            else self._spill(index, device)
        )

    def _generator(self, device: Device) -> RandomGenerator:
        """What a recompute has to start from, while a unit runs."""
        return device.generator

    def _undo(self, index: int, *, is_first: bool) -> Undo:
        graph, eager = self._plan.shards[index].graph, self._plan.eager
        return Undo(graph, index, self._chain, self._store, self._streams, is_first=is_first, is_own_code=eager)

    def _spill(self, index: int, device: Device) -> float:
        """Send what a forward unit has kept to the host; returns the seconds from the end of its computing on."""
        watch = device.stopwatch()
        with watch.running(), not_repeatable("its activations were being spilled"):
            for block in self._store.blocks(self._chain.kept_keys(index), (), ()):
                bring_home(block)
        return watch.seconds

    def _lease(
        self, pager: Pager, names: tuple[str, ...], blocks: list[Block], workspace: int
    ) -> AbstractContextManager[Lease]:
        """Parameters and buffers, other blocks, and room to work."""
        return pager.lease([*self._state.groups(names), *blocks], workspace)

    def _room(self, shard: Shard, lease: Lease, workspace: int, device: Device) -> AbstractContextManager[object]:
        """What the memory of the user's own code needs; a graph needs what its pilot has found."""
        stack = ExitStack()
        module = shard.graph.module
        if isinstance(module, EagerStep) and module.precision == "float32":
            # Under autocast, kernels that call others inside (the fused transformer layer) round differently if followed.
            tracker = RoomTracker(lease, workspace, device.alignment)
            tracker.know(*lease.data)
            stack.enter_context(tracker)
        if self._plan.eager and shard.cost.spilled_bytes:
            stack.enter_context(lease.spilling_activations())
        return stack

    def _leased(self, lease: Lease, compute: Callable[[], None]) -> None:
        self._store.lease = lease
        try:
            compute()
        finally:
            self._store.lease = None

    def _surroundings(self, shard: Shard, device: Device, draws: str) -> AbstractContextManager[object]:
        """What the unit's random numbers need, eager code all of the trial's streams; and no capture beside it."""
        stack = ExitStack()
        if self._plan.eager:
            stack.enter_context(self._streams.everything())
        if draws != _NONE and shard.graph.stochastic and not (self._plan.eager and device.shares_generator):
            stack.enter_context(self._streams.drawing(device, keep=draws == _KEPT))
        stack.enter_context(GATE.shared())
        return stack


class EvaluationStep(Step):
    """One evaluated batch. After its units have run, `metrics` has its values."""

    metrics: dict[str, float]

    def units(self) -> Iterator[PendingUnit]:
        """One forward-only unit a shard."""
        self.metrics = {}
        for index in range(len(self._plan.shards)):
            yield self._shard_unit("evaluate", index, partial(self._forward, index))

    def _following(self, kind: str, index: int) -> list[Expected]:
        if index + 1 < len(self._plan.shards):
            return [self._expected(kind, index + 1)]
        return [self._expected_batch(kind)]

    def _forward(self, index: int, device: Device) -> None:
        self._chain.forward(index, self._generator(device))
        for metric, name in zip(self._plan.names, self._plan.outputs, strict=True):
            if self._plan.birth[name] == index:
                value = self._store.get(name)
                assert value is not None
                self._take_metric(metric, value)
        for name in set(self._plan.outputs):
            # An output that later shards also use goes with its last use.
            if self._plan.birth[name] == index and name not in self._plan.last_use:
                self._store.drop(name)

    def _take_metric(self, metric: str, value: Tensor) -> None:
        self.metrics[metric] = float(value.item())
