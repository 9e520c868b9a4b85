"""A batch as units for the pool to run in turn on any device: the part common to training and evaluation.

`SingleTrial` (`train/single_trial.py`) and `GroupTrial` (`fusion/group/group_trial.py`) yield the units, and a device's worker
(`pool/runtime/worker.py`) runs each unit with the worker's device and pager, by `run_unit`. `train/timing/step_timing.py` and
`fusion/matching/group_timing.py` call `run_unit` to time steps. `train/timing/fake_trial.py` yields the units of a forecast.
`NextUnitPredictor` (`pool/devices/next_units.py`) asks for `following`, `OutOfMemoryHandler` (`pool/devices/oom_retry.py`) runs
units again, and `SharedUnitTimes` (`train/timing/shared_times.py`) calls `unit_times`. The module must not choose units or
devices; a unit only names the blocks and the workspace needed by the unit's computation, and the units that are expected next.

`EvaluationBatch`, the evaluation of a batch, is here as well; training is in `training_batch.py`, batches of a fused
group are in `fusion/group/group_step.py`. Bursts (`burst.py`) and the units of fused groups are `PendingUnit`s, too.

Note: order on entering a unit. First the lease, then the undo, then the random streams, with a GPU's generator before the
capture gate, which a unit shares. The undo must enclose the streams: leaving the streams' context stores the moved
position, and the undo then resets the position.
"""

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from hydra_tune.devices.device import Device, DeviceStopwatch, RandomGenerator
from hydra_tune.memory.block import Block
from hydra_tune.memory.block_release import bring_home
from hydra_tune.memory.lease import Lease
from hydra_tune.memory.pager import Pager
from hydra_tune.memory.pressure import not_repeatable
from hydra_tune.shard.capture.batch import BatchLeaves
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.shard.capture.step_module import Objective, loss_itself, on_host
from hydra_tune.shard.cost.pilot import ShardCost
from hydra_tune.shard.execute.chain import ShardChain
from hydra_tune.shard.execute.eager_plan import EagerStep
from hydra_tune.shard.partition.plan import Shard, ShardPlan
from hydra_tune.shard.partition.plan_cache import PreparedPlan
from hydra_tune.train.loop.unit_rollback import UnitRollback
from hydra_tune.train.loop.workspace_tracker import WorkspaceTracker
from hydra_tune.train.rng.rng_streams import RandomStreams
from hydra_tune.train.state.block_store import BlockStore
from hydra_tune.train.state.model_state import ModelState
from hydra_tune.train.state.shared_state import SharedPlace
from hydra_tune.train.timing.unit_times import UnitTimes, update_guess

# Use of the trial's random stream by a unit: moves the stream on, draws the same numbers again, or draws none.
_KEPT, _REPLAYED, _NONE = "kept", "replayed", "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpcomingUnit:
    """An expected unit, as far as known beforehand.

    Attributes:
        kind, shard, seconds: as of `PendingUnit`.
        blocks: returns the present blocks without which the unit cannot begin. May be called from any thread at any
            time: for a unit that is over meanwhile, the answer is out of date and harmless.
        workspace_bytes: room needed beside the blocks.
        base: where the unit reads frozen parameters that trials share; None if it shares none, or if the model is not cut.
    """

    kind: str
    shard: int
    seconds: float
    blocks: Callable[[], list[Block]]
    workspace_bytes: int
    base: SharedPlace | None = None


def nothing_known() -> list[UpcomingUnit]:
    """Return no units, for a unit with unknown successors."""
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingUnit:
    """A due unit.

    Attributes:
        kind: "forward", "backward", "sum", "complete", "update", "evaluate" or "burst".
        shard: index of the shard.
        seconds: expected seconds.
        run: runs the unit on a device's worker; returns seconds spent waiting for bytes and for other trials' code.
        times: record of the measured seconds, under `key`.
        blocks, workspace_bytes, base: as of `UpcomingUnit`.
        following: returns the next units of the trial, in order and as far as known: an update of the shard, run along
            with the unit, and the next unit.
    """

    kind: str
    shard: int
    seconds: float
    run: Callable[[Device, Pager], float]
    times: UnitTimes
    key: tuple[str, int]
    blocks: Callable[[], list[Block]] = list
    workspace_bytes: int = 0
    following: Callable[[], list[UpcomingUnit]] = nothing_known
    base: SharedPlace | None = None


def unit_times(prepared: PreparedPlan, accumulate: int = 1, name: str | None = None) -> UnitTimes:
    """Return first estimates of the seconds of a plan's units.

    Args:
        prepared: the plan, and its seconds, if known.
        accumulate: batches of a step, or parts of a group's evaluation.
        name: name under which trials share measured times; None: the trial measures alone.
    """
    plan, seconds = prepared.plan, prepared.seconds
    times: dict[Hashable, float] = {}
    for index, shard in enumerate(plan.shards):
        if plan.mode != "train":
            times["evaluate", index] = 0.0 if seconds is None else seconds.forward[index]
            continue
        # The last shard's backward unit runs its forward as well.
        if index < len(plan.shards) - 1:
            times["forward", index] = 0.0 if seconds is None else seconds.forward[index]
        if shard.has_backward:
            times["backward", index] = 0.0 if seconds is None else seconds.backward[index]
        if shard.trained:
            cost = shard.cost
            times["update", index] = update_guess(cost.trained_bytes * 2 + cost.optimizer_bytes)
    kinds = ("forward", "backward", "evaluate")
    repeated = ((kind, index) for kind in kinds for index in range(len(plan.shards)))
    return UnitTimes(times, dict.fromkeys(repeated, accumulate), name)


def _workspace(cost: ShardCost, *, backward: bool, recompute: bool) -> int:
    """Return the room needed by a unit beyond the given blocks, in bytes."""
    if recompute and cost.recompute_workspace:
        return cost.recompute_workspace
    return cost.backward_workspace if backward else cost.forward_workspace


class BatchUnits:
    """A batch, run shard by shard.

    Args:
        plan: cut of the step for this kind of batch.
        state: the trial's long-lived tensors.
        leaves: the batch.
        device: any device of the pool, for host memory.
        objective: derives the root of the backward from the loss.
    """

    def __init__(
        self,
        plan: ShardPlan,
        times: UnitTimes,
        state: ModelState,
        leaves: BatchLeaves,
        streams: RandomStreams,
        device: Device,
        objective: Objective = loss_itself,
    ) -> None:
        self._plan = plan
        self._times = times
        self._state = state
        self._streams = streams
        self._leaves = leaves
        # On a GPU, a plain loop's step changes the copy that it computes with.
        self._changes_batch = plan.eager and device.torch_device.type == "cpu"
        self._store = BlockStore(state, plan, leaves.tensors, device)
        self._chain = ShardChain(plan, self._store, objective, state.recomputed)

    def close(self) -> None:
        """Give up all values of the step."""
        if self._changes_batch:
            # The user's own code may have changed the batch in place, and must see the change when the same batch is
            # drawn again.
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
        following: Callable[[], list[UpcomingUnit]] | None = None,
        shard: Shard | None = None,  # of an earlier batch's plan, where batches of a step have several plans
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
            base=self._base(shard or self._plan.shards[index]),
        )

    def _following(self, kind: str, index: int) -> list[UpcomingUnit]:
        """Return the next units, as of `PendingUnit`; subclasses know them."""
        del kind, index
        return []

    def _expected(self, kind: str, index: int) -> UpcomingUnit:
        """Return a unit of this batch that runs a shard's graph, as expected."""
        return UpcomingUnit(
            kind=kind,
            shard=index,
            seconds=self._times.of((kind, index)),
            blocks=partial(self._blocks, kind, index),
            workspace_bytes=self._workspace(kind, index),
            base=self._base(self._plan.shards[index]),
        )

    def _expected_batch(self, kind: str) -> UpcomingUnit:
        """Return the next batch's first unit, as expected: the batch is not drawn yet, but its parameters are known."""
        return UpcomingUnit(
            kind=kind,
            shard=0,
            seconds=self._times.of((kind, 0)),
            blocks=lambda: self._state.blocks(self._plan.shards[0].graph.state),
            workspace_bytes=self._workspace(kind, 0),
            base=self._base(self._plan.shards[0]),
        )

    def _base(self, shard: Shard) -> SharedPlace | None:
        # The bases of whole models are on the device or not, whichever trial is next.
        return self._state.shared.place(shard.graph.state) if len(self._plan.shards) > 1 else None

    def _workspace(self, kind: str, index: int) -> int:
        return _workspace(self._plan.shards[index].cost, backward=kind == "backward", recompute=False)

    def _blocks(self, kind: str, index: int) -> list[Block]:
        """Return the blocks needed on the device by a unit with a shard's graph, the parameters first."""
        graph = self._plan.shards[index].graph
        return [*self._state.blocks(graph.state), *self._graph_blocks(kind, index)]

    def _graph_blocks(self, kind: str, index: int) -> list[Block]:
        """Return the same blocks without parameters and buffers."""
        graph = self._plan.shards[index].graph
        keys = self._chain.keys("backward" if kind == "backward" else "forward", index)
        return self._store.blocks(keys, graph.constants, graph.inputs)

    def _shard_unit(self, kind: str, index: int, compute: Callable[[Device], None]) -> PendingUnit:
        """Return a unit that runs a shard's graph, forward or backward."""
        run = partial(self._run_shard, kind, index, compute)
        return self._unit(kind, index, run, partial(self._blocks, kind, index), self._workspace(kind, index))

    def _run_shard(
        self, kind: str, index: int, compute: Callable[[Device], None], device: Device, pager: Pager
    ) -> float:
        shard, backward = self._plan.shards[index], kind == "backward"
        graph = shard.graph
        # A graph that was kept on another device cannot be used on this one: then the backward recomputes its shard.
        uses_kept_graph = backward and self._chain.is_kept(index, device.torch_device)
        if backward and not uses_kept_graph:
            self._chain.let_go(index)
        is_first = not backward or not self._chain.has_forward(index)
        workspace = _workspace(shard.cost, backward=backward, recompute=not (is_first or uses_kept_graph))
        blocks = self._graph_blocks(kind, index)
        draws = _KEPT if is_first else _NONE if uses_kept_graph else _REPLAYED
        start = time.perf_counter()
        with self._lease(pager, graph.state, blocks, workspace) as lease:
            # The undo is outermost: leaving the streams' context stores the moved position, and the undo then resets it.
            with (
                self._undo(index, is_first=is_first),
                self._surroundings(shard, device, draws),
                self._room(shard, lease, workspace, device),
            ):
                waited_seconds = time.perf_counter() - start
                self._leased(lease, partial(compute, device))
                if self._plan.eager:
                    self._state.check()
            # A recompute overwrites copies of the buffers only.
            if is_first:
                self._state.touched(graph.written_state)
                if self._plan.eager:
                    # The user's own code may have written any tensor that it can reach.
                    self._state.touched(graph.state)
                    self._store.touched_inputs()
        return waited_seconds + (
            0.0
            if backward or shard.activations != "spill" or not self._chain.keeps(index)
            else self._spill(index, device)
        )

    def _generator(self, device: Device) -> RandomGenerator:
        """Return the generator whose state a recompute starts from; valid while a unit runs."""
        return device.generator

    def _undo(self, index: int, *, is_first: bool) -> UnitRollback:
        graph, eager = self._plan.shards[index].graph, self._plan.eager
        return UnitRollback(graph, index, self._chain, self._store, self._streams, is_first=is_first, is_own_code=eager)

    def _spill(self, index: int, device: Device) -> float:
        """Spill the values kept by a forward unit; return the seconds after the end of the unit's compute."""
        watch = device.stopwatch()
        with watch.running(), not_repeatable("its activations were being spilled"):
            for block in self._store.blocks(self._chain.kept_keys(index), (), ()):
                bring_home(block)
        return watch.seconds

    @contextmanager
    def _lease(self, pager: Pager, names: tuple[str, ...], blocks: list[Block], workspace: int) -> Iterator[Lease]:
        shared = self._state.shared
        # The user's own code reads the module's own parameters.
        with (
            pager.lease([*self._state.blocks(names), *blocks], workspace) as lease,
            shared.pointed(pager) if self._plan.eager else nullcontext(),
        ):
            self._store.stand_ins = {} if self._plan.eager else shared.views(names, pager)
            try:
                yield lease
            finally:
                self._store.stand_ins = {}

    def _room(self, shard: Shard, lease: Lease, workspace: int, device: Device) -> AbstractContextManager[object]:
        """Return the context that accounts for memory of the user's own code; for a graph, the pilot already has."""
        stack = ExitStack()
        module = shard.graph.module
        if isinstance(module, EagerStep) and module.precision == "float32":
            # Under autocast, kernels that call others inside (the fused transformer layer) round differently if followed.
            tracker = WorkspaceTracker(lease, workspace, device.alignment)
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
        """Return the context of a unit: random streams for the code, and no concurrent capture.

        Eager code gets all of the trial's streams, and a captured graph that draws only the stream of the device.
        """
        stack = ExitStack()
        if self._plan.eager:
            stack.enter_context(self._streams.everything())
        if draws != _NONE and shard.graph.stochastic and not (self._plan.eager and device.shares_generator):
            stack.enter_context(self._streams.drawing(device, keep=draws == _KEPT))
        # Lock order: a GPU's generator before the gate.
        stack.enter_context(GATE.shared())
        return stack


class EvaluationBatch(BatchUnits):
    """An evaluated batch; after the units have run, `metrics` holds the values.

    Attributes:
        metrics: the values by name: numbers, or tensors on the host.
        collects: whether the values are tensors, for `finish=`.
    """

    metrics: dict[str, Any]
    collects = False

    def units(self) -> Iterator[PendingUnit]:
        """Yield a forward-only unit for each shard."""
        self.metrics = {}
        for index in range(len(self._plan.shards)):
            yield self._shard_unit("evaluate", index, partial(self._forward, index))

    def _following(self, kind: str, index: int) -> list[UpcomingUnit]:
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
        self.metrics[metric] = on_host(value) if self.collects else float(value.item())


def run_unit(
    unit: PendingUnit,
    device: Device,
    pager: Pager,
    instrument: Callable[[], AbstractContextManager[Any]] | None,
    watch: DeviceStopwatch | None = None,
) -> float:
    """Run a unit on the calling thread: the device's worker, or a thread that times steps on a device of its own.

    Args:
        unit: the due unit.
        device: device to run on.
        pager: pager of the device.
        instrument: returns a context manager entered around the unit.
        watch: stopwatch of the device, for callers that ask when the unit ended on the device.

    Returns:
        Device seconds of the unit, without waits for bytes and for other trials' streams: the estimate for the trial's
        next units must not depend on the choice of device.
    """
    with nullcontext() if instrument is None else instrument():
        watch = watch or device.stopwatch()
        with watch.running():
            waited_seconds = unit.run(device, pager)
        # Still inside the instrument: on a GPU, the unit's kernels may be running.
        device.synchronize()
        # On a GPU the stopwatch runs on the device and the wait on the host, so the difference can be negative.
        return max(0.0, watch.seconds - waited_seconds)
