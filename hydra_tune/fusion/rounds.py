"""`Round`: several steps of a group as one unit, for models whose step is short beside what stands around a unit.

Note: what a round is. One lease holds parameters and optimizer state from its first step to its last; in between the members
take their losses and go on to their next batches. It ends where a member wants anything else than the next batch of the same
kind (a report, an evaluation, its end), where one is to end, and after some milliseconds: so nobody waits longer for a device,
or for a member to go, than for a unit of a larger model.

Note: when memory runs out. What a step has drawn is kept until the step is over, and buffers that it overwrites are put back;
so the unit, when it is run once more, goes on with the step that had failed.
"""

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hydra_tune.devices.device import Device
from hydra_tune.fusion.batches import StackedBatches
from hydra_tune.fusion.plan import StackedComputing
from hydra_tune.fusion.steps import leave_out_bad
from hydra_tune.fusion.tracing import Traced
from hydra_tune.memory.block import Block
from hydra_tune.memory.pager import Pager
from hydra_tune.memory.pressure import not_repeatable
from hydra_tune.shard.batch import Leaves
from hydra_tune.shard.compute import Operands
from hydra_tune.shard.gate import GATE
from hydra_tune.shard.plan import Plan, Shard
from hydra_tune.train.clock import UnitTimes
from hydra_tune.train.gradients import Gradients
from hydra_tune.train.state import STEP_BEGUN, ModelState
from hydra_tune.train.step import Expected, PendingUnit
from hydra_tune.train.streams import RandomStreams

SECONDS = 0.02  # that a round goes on for, beyond which it begins no further step
_SHARE = 0.5  # of a device's memory that a round may need at most: it holds more at once than the units of one step


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a round computes by.

    Args:
        plan: the group's; of one shard.
        times: of its units.
        state: the group's long-lived tensors.
        streams: what its members draw from.
        gradients: the group's rules for gradients.
        resting: members that take no part.
    """

    plan: Plan
    times: UnitTimes
    state: ModelState
    streams: RandomStreams
    gradients: Gradients
    resting: Collection[int]

    @property
    def shard(self) -> Shard:
        """The only one."""
        (shard,) = self.plan.shards
        return shard

    @property
    def trace(self) -> Traced | None:
        """Of the shard's forward and backward."""
        computing = self.plan.computing
        assert isinstance(computing, StackedComputing), "not a group's plan"
        return computing.traces.get(self.shard.graph.first)

    def workspace_bytes(self, leaves: Leaves) -> int:
        """Room for a step beside parameters, buffers and optimizer state: the batch, gradients, and what is computed with."""
        cost = self.shard.cost
        inputs = sum(tensor.nbytes for tensor in (*leaves.tensors, *self.plan.constants.values()))
        update = max(cost.update_workspace, cost.first_update_workspace)
        return inputs + max(cost.forward_workspace, cost.backward_workspace) + cost.trained_bytes + update


def may_go_round(plan: Plan, device: Device, budget_bytes: int) -> bool:
    """Whether batches of a plan may run several in a unit.

    Args:
        plan: a group's.
        device: any of the pool.
        budget_bytes: of the smallest.
    """
    if len(plan.shards) > 1 or device.torch_device.type != "cpu" or getattr(device, "link", None) is not None:
        return False
    (shard,) = plan.shards
    assert isinstance(plan.computing, StackedComputing), "not a group's plan"
    if shard.graph.stochastic if plan.mode != "train" else shard.graph.first not in plan.computing.traces:
        return False
    cost = shard.cost
    held = cost.state_bytes + cost.optimizer_bytes + cost.value_bytes + cost.trained_bytes
    work = max(cost.forward_workspace, cost.backward_workspace) + cost.update_workspace
    return held + work <= _SHARE * budget_bytes


class Round:
    """One round.

    Args:
        rules: what it computes by.
        batches: the members' first.
        leaves: the very first, stacked.
        settle: given what has come of each of the first of them, a list: losses, or values by metric, of all members.
        go_on: has the members go on; returns their next batches, or None where the round is over.

    Attributes:
        steps: how many have run.
    """

    def __init__(
        self,
        rules: Rules,
        batches: StackedBatches,
        leaves: Leaves,
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
        self._workspace_bytes = rules.workspace_bytes(leaves)

    def unit(self) -> PendingUnit:
        """The round as a unit, which is as long as a step where that is longer than a round."""
        rules = self._rules
        kind = "backward" if rules.plan.mode == "train" else "evaluate"
        seconds = max(rules.times.total, SECONDS)
        expected = Expected(
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
        """The unit took so long: what that says of a step."""
        times, each = self._rules.times, seconds / max(1, self.steps)
        if self._rules.plan.mode == "train":
            times.measured(("backward", 0), max(0.0, each - times.of(("update", 0))))
        else:
            times.measured(("evaluate", 0), each)

    def _blocks(self) -> list[Block]:
        rules = self._rules
        found: list[Block] = [*rules.state.groups(rules.shard.graph.state)]
        if rules.plan.mode == "train":
            found += rules.state.optimizer_groups(rules.shard.trained)
        return found

    def _run(self, device: Device, pager: Pager) -> float:
        start = time.perf_counter()
        blocks = self._blocks()
        # Members go on to their next batches within; one whose loader hangs must not have a GPU's generator meanwhile.
        drawing = self._drawing(device) if device.shares_generator else nullcontext()
        with pager.lease(list(blocks), self._workspace_bytes), drawing:
            waited = time.perf_counter() - start
            until = start + waited + SECONDS
            while self._batches is not None:
                goes_on = True
                while goes_on and len(self._made) < len(self._batches):
                    goes_on = self._compute(self._batches, device)
                    # Optimizer state that there was none of before is on the host, and comes with the next round.
                    goes_on = goes_on and time.perf_counter() < until and len(self._blocks()) == len(blocks)
                made, self._made = self._made, []
                self._settle(made)
                self._batches = self._go_on() if goes_on else None
        return waited

    def _compute(self, batches: StackedBatches, device: Device) -> bool:
        """The next of the batches; returns whether there is nothing in it that a member has to see at once."""
        with nullcontext() if device.shares_generator else self._drawing(device):
            made = self._step(batches.leaves(len(self._made)), device)
        self._made.append(made)
        self._noise = None
        self.steps += 1
        if self._rules.plan.mode != "train":
            return True
        return all(math.isfinite(loss) for index, loss in enumerate(made) if index not in self._rules.resting)

    def _drawing(self, device: Device) -> AbstractContextManager[object]:
        rules = self._rules
        return rules.streams.drawing(device, keep=True) if rules.shard.graph.stochastic else nullcontext()

    def _step(self, leaves: Leaves, device: Device) -> Any:
        rules = self._rules
        graph = rules.shard.graph
        operands = Operands(
            state=[rules.state.tensors[name] for name in graph.state],
            constants=[rules.plan.constants[name] for name in graph.constants],
            inputs=[leaves.tensors[index] for index in graph.inputs],
            live_in=(),
        )
        with GATE.shared():
            if rules.plan.mode == "train":
                return self._trained(operands, device)
            with self._buffers_kept():
                outputs = rules.plan.computing.forward(graph, operands)
            named = zip(rules.plan.names, rules.plan.outputs, strict=True)
            return {metric: outputs[name].tolist() for metric, name in named}

    def _trained(self, operands: Operands, device: Device) -> list[float]:
        """A step of training; the members' losses."""
        rules, trace = self._rules, self._rules.trace
        assert trace is not None
        if self._noise is None:
            self._noise = trace.draw(device.torch_device)
        with self._buffers_kept():
            noise = [one.clone() for one in self._noise]  # which the graph may overwrite
            made = trace.run(operands, noise, is_laid_out=True)
            losses: list[float] = made.outputs[trace.loss].tolist()
            gradients = made.parameters
        rules.state.touched(rules.shard.graph.written_state)
        leave_out_bad(rules.state.optimizer, losses)
        names = tuple(gradients)
        with not_repeatable(STEP_BEGUN):
            if rules.gradients.has_two_phases:
                rules.gradients.complete(rules.state.optimized(gradients))
            with rules.state.around_step(device):  # of a CPU device, which has no generator to wait for
                rules.state.update(rules.shard.trained, gradients, rules.gradients)
            rules.state.adopt_optimizer_state(names, device)
            rules.gradients.next_step()
        return losses

    @contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        """Buffers that a step overwrites are as before for members that rest, and for all should it fail."""
        rules = self._rules
        tensors = [rules.state.tensors[name] for name in rules.shard.graph.written_state]
        before = [tensor.detach().clone() for tensor in tensors]
        rows: Sequence[int] | slice = slice(None)
        try:
            yield
            rows = list(rules.resting)
        finally:
            with torch.no_grad():
                for tensor, kept in zip(tensors, before, strict=True) if rows else ():
                    tensor[rows] = kept[rows]
