"""Runs planned steps of a group: a round as any (`rounds.py`), of steps within a device's memory.

Note: masks. A planned step updates all members, each parameter as soon as nothing needs it any more. What members have that
take no step, because they rest or their loss is not finite, is put aside on the host before the backward and put back after.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hydra_tune.devices.device import Device
from hydra_tune.devices.own_generator import own_generator
from hydra_tune.errors import BudgetError, OutOfMemoryError, UnfusableError
from hydra_tune.fusion.batches import StackedBatches
from hydra_tune.fusion.drawing import GroupGenerator
from hydra_tune.fusion.optimizers import OptimizerAtOnce
from hydra_tune.fusion.planned import CLIPS, PlannedStep, Stack, StepPlanner, groups_of, stack_of, updated
from hydra_tune.fusion.planner.run import PlannedRun
from hydra_tune.fusion.planner.updates import UpdateTracer
from hydra_tune.fusion.rounds import Round, Rules
from hydra_tune.fusion.steps import leave_out_bad
from hydra_tune.memory.pressure import not_repeatable
from hydra_tune.quantities import format_bytes
from hydra_tune.shard.batch import Leaves
from hydra_tune.shard.compute import Operands
from hydra_tune.shard.library import Prepared
from hydra_tune.train.state import STEP_BEGUN, ModelState


class PlannedSteps:
    """A planned step on the state of one group, again and again.

    Args:
        planned: the step.
        state: the group's.
        updates: of its members' optimizers.
        groups: parameter -> its parameter group.
        device: any of the pool.
    """

    def __init__(
        self,
        planned: PlannedStep,
        state: ModelState,
        updates: UpdateTracer,
        groups: Mapping[str, int],
        device: Device,
    ) -> None:
        self.planned = planned
        self._graph = graph = planned.graph
        self._state, self._updates, self._groups = state, updates, groups
        self._trained = tuple(name for name in graph.state if name in updated(graph))
        self._device = device.torch_device
        self._given: dict[str, Tensor] = {}
        self._make_moments(device)
        self._run = PlannedRun(planned.part.schedule, [graph], self._device, [lambda _: self._given], self._draw)

    def close(self) -> None:
        """End the copying."""
        self._run.close()

    @property
    def optimizer(self) -> OptimizerAtOnce:
        """The group's."""
        assert isinstance(self._state.optimizer, OptimizerAtOnce), "others are not planned"
        return self._state.optimizer

    def forward(self, operands: Operands) -> list[float]:
        """The losses of all members."""
        self._given = self._arguments(operands)
        found: list[Tensor] = []
        forward, _ = self.planned.part.schedule.segments
        self._run.segment(forward, lambda _side, _number, losses: found.append(losses))
        losses: list[float] = found[0].tolist()
        return losses

    def backward(self) -> None:
        """Backward and update, for the members that the optimizer has as active."""
        optimizer = self.optimizer
        _, backward = self.planned.part.schedule.segments
        with self._put_aside([index for index, active in enumerate(optimizer.active) if not active]):
            self._run.segment(backward)
        self._given = {}
        self._count(optimizer)
        self._state.touched(self._trained)
        for block in self._state.optimizer_groups(self._trained):
            block.dirty = True

    def _draw(self, _side: int, number: int) -> Tensor:
        group = own_generator()
        assert isinstance(group, GroupGenerator), "stacked members draw from generators of their own"
        return self._graph.noise[number].draw(group, self._device)

    def _make_moments(self, device: Device) -> None:
        """The optimizer's state, which else its first step would make beside all that it has computed with."""
        entries: dict[str, dict[str, Any]] = {}
        for name in self._trained:
            parameter = self._state.tensors[name]
            known = self.optimizer.state.get(parameter, {})
            lacking = [moment for key, moment in self._graph.moments if key == name and moment not in known]
            if lacking:
                first = self._updates.initial_state(self._groups[name], torch.empty_like(parameter, device="cpu"))
                steps = known.get("steps", [0] * self._updates.count)
                entries[name] = {"steps": list(steps)} | {moment: first[moment] for moment in lacking}
        if entries:
            self._state.adopt_saved(entries, device)

    def _arguments(self, operands: Operands) -> dict[str, Tensor]:
        graph, tensors = self._graph, self._state.tensors
        found = {argument: tensors[name].detach() for name, argument in graph.state.items()}
        found |= {a: self.optimizer.state[tensors[name]][moment] for (name, moment), a in graph.moments.items()}
        found |= dict(zip(graph.constants, operands.constants, strict=True))
        found |= {a: tensor.contiguous() for a, tensor in zip(graph.inputs, operands.inputs, strict=True)}
        known: dict[int, list[tuple[float, ...]]] = {}
        for argument, rate in graph.rates.items():
            if rate.group not in known:
                known[rate.group] = self._updates.rates(rate.group, *self._steps(rate.group))
            values, shape = known[rate.group][rate.number], graph.geometry[argument].shape
            found[argument] = torch.tensor(values, dtype=rate.dtype, device=self._device).view(shape)
        return found

    def _steps(self, group: int) -> tuple[list[int], list[bool] | None]:
        """How many steps the members have made, and whose momentum has begun."""
        states = [self._entries(name) for name in self._trained if self._groups[name] == group]
        steps, begun = states[0]["steps"], states[0].get("begun")
        if any(state["steps"] != steps or state.get("begun") != begun for state in states):
            raise OutOfMemoryError(
                "parameters of a planned group have not made the same steps, for which no update was planned; they go on in "
                "smaller groups",
                enough_bytes=None,
            )
        return steps, begun

    def _entries(self, name: str) -> dict[str, Any]:
        entries: dict[str, Any] = self.optimizer.state[self._state.tensors[name]]
        if "steps" not in entries:
            entries["steps"] = [0] * self._updates.count
        return entries

    def _count(self, optimizer: OptimizerAtOnce) -> None:
        """What the optimizer's own step would have noted."""
        optimizer.note_step(self._state.tensors[name] for name in self._trained)

    @contextmanager
    def _put_aside(self, members: Sequence[int]) -> Iterator[None]:
        tensors = [self._given[self._graph.state[name]] for name in self._trained] if members else []
        tensors += [self._given[argument] for argument in self._graph.moments.values()] if members else []
        rows = torch.tensor(members, device=self._device)
        kept = [tensor[rows].cpu() for tensor in tensors]
        yield
        for tensor, before in zip(tensors, kept, strict=True):
            tensor[rows] = before.to(self._device)


class PlannedRound(Round):
    """A round of planned steps.

    Args:
        rules, batches, leaves, settle, go_on: as of `Round`.
        steps_of: runs the steps.
    """

    def __init__(
        self,
        rules: Rules,
        batches: StackedBatches,
        leaves: Leaves,
        settle: Callable[[list[Any]], None],
        go_on: Callable[[], StackedBatches | None],
        planned: PlannedSteps,
    ) -> None:
        super().__init__(rules, batches, leaves, settle, go_on)
        self._planned = planned
        self._workspace_bytes = planned.planned.workspace_bytes

    def _trained(self, operands: Operands, device: Device) -> list[float]:
        """As of `Round`; what has failed in the forward leaves no trace."""
        del device
        rules, is_stochastic = self._rules, self._rules.shard.graph.stochastic
        mark = rules.streams.mark() if is_stochastic else None
        with torch.no_grad(), self._buffers_kept():
            try:
                losses = self._planned.forward(operands)
            except BaseException:
                if mark is not None:
                    rules.streams.go_back(mark)
                raise
        rules.state.touched(rules.shard.graph.written_state)
        leave_out_bad(rules.state.optimizer, losses)
        with not_repeatable(STEP_BEGUN), torch.no_grad():
            self._planned.backward()
        rules.gradients.next_step()
        return losses


class PlannedGroup:
    """The planned steps of one group, by the plans of its steps.

    Args:
        planner: plans them.
        device: any of the pool.
    """

    def __init__(self, planner: StepPlanner, device: Device) -> None:
        self._planner, self._device = planner, device
        self._known: dict[Prepared, PlannedSteps] = {}

    @property
    def host_bytes(self) -> int:
        """Host memory for what they swap."""
        return sum(steps.planned.host_bytes for steps in self._known.values())

    def steps(
        self, prepared: Prepared, state: ModelState, inputs: Sequence[Tensor], *, is_clipped: bool
    ) -> PlannedSteps | None:
        """Those of a plan; None where the device has room for them as they are.

        Args:
            prepared: the group's plan.
            state: the group's.
            inputs: its stacked batch, of which only the geometry counts.
            is_clipped: whether updates wait for the norm of all gradients.

        Raises:
            OutOfMemoryError: there is no room for them, planned or not.
        """
        if prepared.plan.mode != "train" or self._planner.fits(prepared):
            return None
        if prepared not in self._known:
            try:
                self._known[prepared] = self._made(prepared, state, inputs, is_clipped=is_clipped)
            except UnfusableError as error:
                raise OutOfMemoryError(
                    f"a step of a group needs {format_bytes(prepared.plan.peak_bytes)} at once and cannot be planned: {error}",
                    enough_bytes=prepared.plan.peak_bytes,
                ) from error
            except BudgetError as error:
                raise OutOfMemoryError(str(error), enough_bytes=error.enough_bytes) from error
        return self._known[prepared]

    def make_ready(
        self, prepared: Prepared, built: Sequence[tuple[nn.Module, Optimizer]], inputs: Sequence[Tensor]
    ) -> None:
        """Plan a step for another number of members, if it needs a plan; on any thread.

        Args:
            prepared: the plan for them.
            built: modules and optimizers of the members.
            inputs: the batch of one of them.

        Raises:
            UnfusableError, BudgetError: as of `StepPlanner.planned`.
        """
        if prepared.plan.mode == "train" and not self._planner.fits(prepared):
            self._planner.planned(stack_of(prepared, built, inputs))

    def clear(self) -> None:
        """The group has another state, or none."""
        for steps in self._known.values():
            steps.close()
        self._known.clear()

    def _made(
        self, prepared: Prepared, state: ModelState, inputs: Sequence[Tensor], *, is_clipped: bool
    ) -> PlannedSteps:
        if is_clipped:
            raise UnfusableError(CLIPS)
        optimizer = state.optimizer
        if not isinstance(optimizer, OptimizerAtOnce):
            raise UnfusableError("its optimizer steps each member by itself")
        updates = UpdateTracer(optimizer.members, optimizer.rates)
        groups = groups_of(state.module, optimizer)
        stack = Stack(prepared=prepared, state=state.tensors, inputs=inputs, groups=groups, updates=updates)
        return PlannedSteps(self._planner.planned(stack), state, updates, groups, self._device)
