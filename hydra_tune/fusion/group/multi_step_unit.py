"""`GroupRound`: several steps of a group in a single unit, for models whose step is short beside the overhead of a unit.

`GroupTrial` (`group_trial.py`) asks `may_go_round`, and `GroupExecutor` (`group_executor.py`) makes a `GroupRound` if
all members that want a batch take part. `PlannedRound` (`fusion/runtime/planned_unit.py`) and `PairRoundHalf`
(`fusion/runtime/paired_unit.py`) are rounds of planned steps.

Note: contents of a round. A single lease holds parameters and optimizer state from the first step to the last. When the
stacked batches are used up, the members take their losses and advance to their next batches, inside the lease, on the device's
thread. A round begins no further step after `SECONDS`, after a loss that is not finite, or after a step that has made optimizer
state. A round takes no further batches when a member wants anything other than a batch of the same kind (a report, an
evaluation, its end), is to be stopped or paused, or has changed what the plan has baked in.

Note: out of memory. The random numbers of a step are kept until the step is over, and overwritten buffers are restored.
A unit repeated after a failure before an update therefore resumes with the failed step; a failed update cannot be
repeated.

Note: locks. A step takes the generator's turn first and the capture gate second, as everywhere. The members advance outside
the gate, and on a GPU outside the generator's turn.
"""

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hydra_tune.batched.joint_graph import JointTrace
from hydra_tune.devices.copying import sent
from hydra_tune.devices.device import Device
from hydra_tune.fusion.compile.batched_plan import StackedPlanExecutor
from hydra_tune.fusion.compile.cuda_graph_steps import CapturedPlanExecutor
from hydra_tune.fusion.group.batched_inputs import StackedBatches
from hydra_tune.fusion.group.group_step import GroupGradients, leave_out_bad, member_values
from hydra_tune.memory.block import Block
from hydra_tune.memory.lease import Lease
from hydra_tune.memory.pager import Pager
from hydra_tune.memory.pressure import not_repeatable
from hydra_tune.shard.capture.batch import BatchLeaves
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.shard.execute.compute import ShardGradients, ShardOperands
from hydra_tune.shard.partition.plan import Shard, ShardPlan
from hydra_tune.train.loop.batch_units import PendingUnit, UpcomingUnit
from hydra_tune.train.rng.rng_streams import RandomStreams
from hydra_tune.train.state.model_state import STEP_BEGUN, ModelState
from hydra_tune.train.timing.unit_times import UnitTimes

SECONDS = 0.02  # age beyond which a round begins no further step
_SHARE = 0.5  # limit on a round's share of device memory: a round holds more at once than the units of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundContext:
    """The fixed inputs of a round.

    Args:
        collects: as of `EvaluationBatch`.
    """

    plan: ShardPlan
    times: UnitTimes
    state: ModelState
    streams: RandomStreams
    gradients: GroupGradients
    resting: Collection[int]
    collects: bool = False

    @property
    def shard(self) -> Shard:
        """The plan's only shard."""
        (shard,) = self.plan.shards
        return shard

    @property
    def trace(self) -> JointTrace | None:
        """The trace of the shard's forward and backward, if any."""
        computing = self.plan.computing
        if isinstance(computing, CapturedPlanExecutor):
            computing = computing.stacked
        assert isinstance(computing, StackedPlanExecutor), "not a group's plan"
        return computing.traces.get(self.shard.graph.first)

    def workspace_bytes(self, leaves: BatchLeaves) -> int:
        """Return the bytes of a step beside parameters, buffers and optimizer state."""
        cost = self.shard.cost
        inputs = sum(tensor.nbytes for tensor in (*leaves.tensors, *self.plan.constants.values()))
        update = max(cost.update_workspace, cost.first_update_workspace)
        return inputs + max(cost.forward_workspace, cost.backward_workspace) + cost.trained_bytes + update


def may_go_round(plan: ShardPlan, device: Device, budget_bytes: int) -> bool:
    """Return whether a unit may run several batches of a plan."""
    if len(plan.shards) > 1 or getattr(device, "link", None) is not None:
        return False
    (shard,) = plan.shards
    assert isinstance(plan.computing, StackedPlanExecutor), "not a group's plan"
    # A repeated unit must reuse the random numbers of the failed step. Only traced training steps draw
    # their numbers in advance, so a stochastic evaluation or an untraced step cannot join a round.
    if shard.graph.stochastic if plan.mode != "train" else shard.graph.first not in plan.computing.traces:
        return False
    cost = shard.cost
    held_bytes = cost.state_bytes + cost.optimizer_bytes + cost.value_bytes + cost.trained_bytes
    work_bytes = max(cost.forward_workspace, cost.backward_workspace) + cost.update_workspace
    return held_bytes + work_bytes <= _SHARE * budget_bytes


class GroupRound:
    """Several steps in a unit.

    Args:
        settle: takes a list with the results of each computed batch: the losses, or the values by metric, of all
            members.
        go_on: advances the members; returns their next batches, or None to end the round.
    """

    def __init__(
        self,
        rules: RoundContext,
        batches: StackedBatches,
        leaves: BatchLeaves,
        settle: Callable[[list[Any]], None],
        go_on: Callable[[], StackedBatches | None],
    ) -> None:
        self.steps = 0
        self._rules = rules
        self._batches: StackedBatches | None = batches
        self._made: list[Any] = []
        self._settle = settle
        self._go_on = go_on
        self._noise: list[Tensor] | None = None
        self._lease: Lease | None = None
        self._constants: list[Tensor] = []
        self._workspace_bytes = rules.workspace_bytes(leaves)

    def unit(self) -> PendingUnit:
        """Return the round as a unit; its expected time is that of a step or of a round, whichever is longer."""
        rules = self._rules
        kind = "backward" if rules.plan.mode == "train" else "evaluate"
        seconds = max(rules.times.total, SECONDS)
        # Most rounds are followed by another round on the same blocks.
        expected = UpcomingUnit(
            kind=kind, shard=0, seconds=seconds, blocks=self._blocks, workspace_bytes=self._workspace_bytes
        )
        return PendingUnit(
            kind=kind,
            shard=0,
            seconds=seconds,
            run=self._run,
            times=rules.times,
            key=("round", 0),
            blocks=self._blocks,
            workspace_bytes=self._workspace_bytes,
            following=lambda: [expected],
        )

    def measured(self, seconds: float) -> None:
        """Update the expected time of a step from the measured seconds of the unit."""
        times, step_seconds = self._rules.times, seconds / max(1, self.steps)
        if self._rules.plan.mode == "train":
            # A round includes the updates, which have an expected time of their own.
            times.measured(("backward", 0), max(0.0, step_seconds - times.of(("update", 0))))
        else:
            times.measured(("evaluate", 0), step_seconds)

    def _blocks(self) -> list[Block]:
        rules = self._rules
        blocks: list[Block] = [*rules.state.groups(rules.shard.graph.state)]
        if rules.plan.mode == "train":
            blocks += rules.state.optimizer_groups(rules.shard.trained)
        return blocks

    def _run(self, device: Device, pager: Pager) -> float:
        start = time.perf_counter()
        blocks = self._blocks()
        # Members draw their next batches inside the round, and a hanging loader must not hold a GPU's generator.
        drawing = self._drawing(device) if device.shares_generator else nullcontext()
        with pager.lease(list(blocks), self._workspace_bytes) as lease, drawing:
            waited = time.perf_counter() - start
            self._lease = lease
            constants = [self._rules.plan.constants[name] for name in self._rules.shard.graph.constants]
            self._constants = self._sent(constants, device)
            # Time spent waiting for memory does not shorten the round.
            until = start + waited + SECONDS
            while self._batches is not None:
                goes_on = True
                while goes_on and len(self._made) < len(self._batches):
                    goes_on = self._compute(self._batches, device)
                    # A step that creates optimizer state leaves the state on the host; a new lease must load its blocks.
                    goes_on = goes_on and time.perf_counter() < until and self._blocks() == blocks
                results, self._made = self._made, []
                self._settle(results)
                self._batches = self._go_on() if goes_on else None
        return waited

    def _compute(self, batches: StackedBatches, device: Device) -> bool:
        """Compute the next batch; return whether the round may continue, that is, all active losses are finite."""
        with nullcontext() if device.shares_generator else self._turn(device):
            result = self._step(batches.leaves(len(self._made)), device)
        self._made.append(result)
        self._noise = None  # kept until here, so that a repeated unit reuses the numbers of a failed step
        self.steps += 1
        if self._rules.plan.mode != "train":
            return True
        return all(math.isfinite(loss) for index, loss in enumerate(result) if index not in self._rules.resting)

    def _sent(self, tensors: Sequence[Tensor], device: Device) -> list[Tensor]:
        return [sent(tensor, device.torch_device) for tensor in tensors]

    def _drawing(self, device: Device) -> AbstractContextManager[object]:
        rules = self._rules
        if rules.shard.graph.stochastic:
            return rules.streams.drawing(device, keep=True)
        # An update may need the turn of a GPU's generator, which comes before the gate.
        return rules.state.around_step(device) if rules.plan.mode == "train" else nullcontext()

    def _turn(self, device: Device) -> ExitStack:
        """Return the context of a step on a device whose generator others draw from; the gate is passed inside."""
        stack = ExitStack()
        # No other thread may draw from the generator while a step is recorded.
        if isinstance(self._rules.plan.computing, CapturedPlanExecutor):
            stack.enter_context(device.generator.in_turn())
        stack.enter_context(self._drawing(device))
        return stack

    def _step(self, leaves: BatchLeaves, device: Device) -> Any:
        rules = self._rules
        graph = rules.shard.graph
        operands = ShardOperands(
            state=[rules.state.tensors[name] for name in graph.state],
            constants=self._constants,
            inputs=self._sent([leaves.tensors[index] for index in graph.inputs], device),
            live_in=(),
        )
        # Many threads may compute at once; a capture holds the gate alone.
        with GATE.shared():
            if rules.plan.mode == "train":
                return self._trained(operands, device)
            with self._buffers_kept():
                outputs = rules.plan.computing.forward(graph, operands)
            named = zip(rules.plan.names, rules.plan.outputs, strict=True)
            return {metric: member_values(outputs[name], collects=rules.collects) for metric, name in named}

    def _trained(self, operands: ShardOperands, device: Device) -> list[float]:
        rules, trace = self._rules, self._rules.trace
        assert trace is not None
        if self._noise is None:
            self._noise = trace.draw(device.torch_device, rules.gradients.scales)
        with self._buffers_kept():
            noise = [tensor.clone() for tensor in self._noise]  # a step may overwrite its arguments
            result = self._computed(trace, operands, noise)
            losses: list[float] = result.outputs[trace.loss].tolist()
            gradients = result.parameters
        rules.state.touched(rules.shard.graph.written_state)
        leave_out_bad(rules.state.optimizer, losses)
        names = tuple(gradients)
        # Before this point the step leaves no trace and can be repeated. The update changes parameters in place.
        with not_repeatable(STEP_BEGUN):
            if rules.gradients.has_two_phases:
                rules.gradients.complete(rules.state.optimized(gradients))
                rules.gradients.leave_out_overflowed(rules.state.optimizer)
            with rules.state.around_step(device):
                rules.state.update(rules.shard.trained, gradients, rules.gradients)
            assert self._lease is not None
            rules.state.adopt_optimizer_state(names, device, self._lease)
            rules.state.end_step()
            rules.gradients.next_step()
        return losses

    def _computed(self, trace: JointTrace, operands: ShardOperands, noise: list[Tensor]) -> ShardGradients:
        computing = self._rules.plan.computing
        if not isinstance(computing, CapturedPlanExecutor):
            return trace.run(operands, noise, is_laid_out=True)
        computing.lease = self._lease
        return computing.recorded(trace, self._rules.shard.graph, operands, noise, is_laid_out=True)

    @contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        """Restore overwritten buffers after a step: rows of resting slots always, all rows if the step fails."""
        rules = self._rules
        tensors = [rules.state.tensors[name] for name in rules.shard.graph.written_state]
        buffers_before = [tensor.detach().clone() for tensor in tensors]
        rows: Sequence[int] | slice = slice(None)
        try:
            yield
            rows = list(rules.resting)
        finally:
            with torch.no_grad():
                for tensor, buffer_before in zip(tensors, buffers_before, strict=True) if rows else ():
                    tensor[rows] = buffer_before[rows]
