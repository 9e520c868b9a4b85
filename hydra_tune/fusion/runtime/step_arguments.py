"""`StepStateBinding`: bind a group's state to the arguments of a planned step, and record the step's effects afterwards.

`PlannedStepCache` (`planned_unit.py`) and `PairingOffer` (`pair_offer.py`) make a binding for a kind of step.
`GroupStepRunner` (`planned_unit.py`) and the units of pairs (`paired_unit.py`) call `begin` before each forward, and
enter `updating` around each backward. A single thread at a time runs a group, so there is no lock. The module must not
decide on swaps: the planner does.

Note: masks. A planned step updates all members, each parameter as soon as no later operator needs the old value.
Members that take no step (resting, or without a finite loss) have their parameters and moments saved to the host before
the backward, and restored afterwards.

Note: places. Parameters, buffers and optimizer state are on the device of the running unit. Batches, constants, clipping
norms and rates are on the host, and are sent to the device for every step.

Note: a failed backward leaves parameters half updated, so the step counts only after success, and the caller marks the
backward as not repeatable.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hydra_tune.batched.batched_optimizer import BatchedOptimizer
from hydra_tune.batched.batched_random import GroupGenerator
from hydra_tune.devices.copying import sent
from hydra_tune.devices.device import Device
from hydra_tune.devices.own_generator import own_generator
from hydra_tune.errors import OutOfMemoryError, UnfusableError
from hydra_tune.fusion.group.group_step import GroupGradients
from hydra_tune.fusion.runtime.step_planner import StackedStepSpec, groups_of, updated
from hydra_tune.planner.trace.optimizer_graph import UpdateTracer
from hydra_tune.planner.trace.step_graph import StepGraph
from hydra_tune.shard.execute.compute import ShardOperands
from hydra_tune.shard.partition.plan_cache import PreparedPlan
from hydra_tune.train.state.model_state import ModelState


class StepStateBinding:
    """A group's state for a planned step graph.

    Args:
        device: any device of the pool, for host memory.

    Attributes:
        given: arguments of the step under way; empty between steps.
    """

    def __init__(
        self, graph: StepGraph, state: ModelState, stack: StackedStepSpec, device: Device, gradients: GroupGradients
    ) -> None:
        self.given: dict[str, Tensor] = {}
        self._graph, self._gradients = graph, gradients
        self._state, self._updates, self._groups = state, stack.updates, stack.groups
        self._trained = tuple(name for name in graph.state if name in updated(graph))
        self._place = device.torch_device  # device of the step under way
        self._make_moments(device)

    @property
    def optimizer(self) -> BatchedOptimizer:
        """The group's optimizer."""
        assert isinstance(self._state.optimizer, BatchedOptimizer), "others are not planned"
        return self._state.optimizer

    def begin(self, operands: ShardOperands, place: torch.device) -> None:
        """Begin a step on the given batch, with the present rates; the parameters must already be on `place`."""
        self._place = place
        self.given = self._arguments(operands)

    def forget(self) -> None:
        """Abandon the step under way and drop its arguments, which may then leave the device."""
        self.given = {}

    def draw(self, number: int) -> Tensor:
        """Draw random numbers of the step from the members' generators."""
        group = own_generator()
        assert isinstance(group, GroupGenerator), "stacked members draw from generators of their own"
        return self._graph.noise[number].draw(group, self._place)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Surround the backward with its updates, for the active members of the optimizer."""
        optimizer = self.optimizer
        try:
            with self._put_aside([index for index, active in enumerate(optimizer.active) if not active]):
                yield
        finally:
            self.forget()
        # Reached only after success: a failed backward must not count as a step.
        optimizer.note_step(self._state.tensors[name] for name in self._trained)
        # The device copies have changed, so the host copies are stale until the next spill.
        self._state.touched(self._trained)
        for block in self._state.optimizer_groups(self._trained):
            block.dirty = True

    def _make_moments(self, device: Device) -> None:
        """Create the optimizer's state in advance.

        Otherwise the first step would create the state while the memory of its activations is still in use.
        """
        entries: dict[str, dict[str, Any]] = {}
        for name in self._trained:
            parameter = self._state.tensors[name]
            present_entries = self.optimizer.state.get(parameter, {})
            lacking = [moment for key, moment in self._graph.moments if key == name and moment not in present_entries]
            if lacking:
                initial_state = self._updates.initial_state(
                    self._groups[name], torch.empty_like(parameter, device="cpu")
                )
                steps = present_entries.get("steps", [0] * self._updates.count)
                entries[name] = {"steps": list(steps)} | {moment: initial_state[moment] for moment in lacking}
        if entries:
            self._state.adopt_saved(entries, device)

    def _arguments(self, operands: ShardOperands) -> dict[str, Tensor]:
        graph, tensors = self._graph, self._state.tensors
        arguments = {argument: tensors[name].detach() for name, argument in graph.state.items()}
        arguments |= {a: self.optimizer.state[tensors[name]][moment] for (name, moment), a in graph.moments.items()}
        arguments |= {
            a: sent(tensor, self._place) for a, tensor in zip(graph.constants, operands.constants, strict=True)
        }
        inputs = zip(graph.inputs, operands.inputs, strict=True)
        arguments |= {argument: sent(tensor.contiguous(), self._place) for argument, tensor in inputs}
        if graph.limits is not None:
            arguments[graph.limits] = sent(self._gradients.limits, self._place)
        rates_by_group: dict[int, list[tuple[float, ...]]] = {}
        for argument, rate in graph.rates.items():
            if rate.group not in rates_by_group:
                rates_by_group[rate.group] = self._rates(rate.group)
            values, shape = rates_by_group[rate.group][rate.number], graph.geometry[argument].shape
            arguments[argument] = sent(torch.tensor(values, dtype=rate.dtype, device="cpu").view(shape), self._place)
        return arguments

    def _rates(self, group: int) -> list[tuple[float, ...]]:
        """Return the members' rates for the present step.

        A step whose optimizer computes differently from the plan raises, so that the trials continue in smaller groups,
        planned anew.
        """
        try:
            return self._updates.rates(group, *self._steps(group))
        except UnfusableError as error:
            raise OutOfMemoryError(f"{error}, in smaller groups", enough_bytes=None) from error

    def _steps(self, group: int) -> tuple[list[int], list[bool] | None]:
        """Return the members' step counts, and whether each member's momentum has begun."""
        states = [self._entries(name) for name in self._trained if self._groups[name] == group]
        steps, begun = states[0]["steps"], states[0].get("begun")
        if any(state["steps"] != steps or state.get("begun") != begun for state in states):
            raise OutOfMemoryError(
                "parameters of a planned group have taken different numbers of steps, for which no update is planned; its "
                "trials continue in smaller groups",
                enough_bytes=None,
            )
        return steps, begun

    def _entries(self, name: str) -> dict[str, Any]:
        entries: dict[str, Any] = self.optimizer.state[self._state.tensors[name]]
        if "steps" not in entries:
            entries["steps"] = [0] * self._updates.count
        return entries

    @contextmanager
    def _put_aside(self, members: Sequence[int]) -> Iterator[None]:
        if not members:
            yield
            return
        tensors = [self.given[self._graph.state[name]] for name in self._trained]
        tensors += [self.given[argument] for argument in self._graph.moments.values()]
        # The plan reserves no device memory for these copies, so they go to the host.
        rows = sent(torch.tensor(members, device="cpu"), self._place)
        saved_rows = [tensor[rows].cpu() for tensor in tensors]
        yield
        for tensor, rows_before in zip(tensors, saved_rows, strict=True):
            tensor[rows] = sent(rows_before, self._place)


def stack_now(
    prepared: PreparedPlan, state: ModelState, inputs: Sequence[Tensor], gradients: GroupGradients
) -> StackedStepSpec:
    """Return the stack that a group computes on now.

    Raises:
        UnfusableError: no steps are planned for such groups; the message gives the reason.
    """
    optimizer = state.optimizer
    if not isinstance(optimizer, BatchedOptimizer):
        raise UnfusableError("its optimizer steps each member by itself")
    updates = UpdateTracer(optimizer.members, optimizer.rates)
    groups = groups_of(state.module, optimizer)
    return StackedStepSpec(
        prepared=prepared,
        state=state.tensors,
        inputs=inputs,
        groups=groups,
        updates=updates,
        is_clipped=gradients.has_two_phases,
    )
