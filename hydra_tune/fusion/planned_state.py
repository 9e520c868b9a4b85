"""`StepState`: the state of one group as the arguments of a planned step's graph, and what is noted of it when that has run.

Note: masks. A planned step updates all members, each parameter as soon as nothing needs it any more. What members have that
take no step, because they rest or their loss is not finite, is put aside on the host before the backward and put back after.

Note: where. Parameters, buffers and optimizer state are on the device of the unit that runs; batches, constants and rates are
on the host, and are sent there for each step.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hydra_tune.devices.device import Device
from hydra_tune.devices.own_generator import own_generator
from hydra_tune.errors import OutOfMemoryError, UnfusableError
from hydra_tune.fusion.drawing import GroupGenerator
from hydra_tune.fusion.optimizers import OptimizerAtOnce
from hydra_tune.fusion.planned import Stack, groups_of, updated
from hydra_tune.fusion.planner.step_graph import StepGraph
from hydra_tune.fusion.planner.updates import UpdateTracer
from hydra_tune.fusion.steps import GroupGradients
from hydra_tune.shard.compute import Operands
from hydra_tune.shard.library import Prepared
from hydra_tune.train.state import ModelState


class StepState:
    """That of one group, for one graph.

    Args:
        graph: of its step.
        state: the group's.
        stack: what the step was planned for.
        device: any of the pool, for host memory.
        gradients: the group's rules for them.

    Attributes:
        given: the arguments of the step that has begun; none between two steps.
    """

    def __init__(
        self, graph: StepGraph, state: ModelState, stack: Stack, device: Device, gradients: GroupGradients
    ) -> None:
        self.given: dict[str, Tensor] = {}
        self._graph, self._gradients = graph, gradients
        self._state, self._updates, self._groups = state, stack.updates, stack.groups
        self._trained = tuple(name for name in graph.state if name in updated(graph))
        self._place = device.torch_device  # where the step that has begun computes
        self._make_moments(device)

    @property
    def optimizer(self) -> OptimizerAtOnce:
        """The group's."""
        assert isinstance(self._state.optimizer, OptimizerAtOnce), "others are not planned"
        return self._state.optimizer

    def begin(self, operands: Operands, place: torch.device) -> None:
        """A step begins, on this batch and at the rates that there are now, where its parameters are by now."""
        self._place = place
        self.given = self._arguments(operands)

    def forget(self) -> None:
        """The step that had begun comes to nothing: what it was given may leave the device."""
        self.given = {}

    def draw(self, number: int) -> Tensor:
        """Random numbers of the step, from the generator that stands for the members' own."""
        group = own_generator()
        assert isinstance(group, GroupGenerator), "stacked members draw from generators of their own"
        return self._graph.noise[number].draw(group, self._place)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Around the backward with its updates, for the members that the optimizer has as active."""
        optimizer = self.optimizer
        try:
            with self._put_aside([index for index, active in enumerate(optimizer.active) if not active]):
                yield
        finally:
            self.forget()
        optimizer.note_step(self._state.tensors[name] for name in self._trained)
        self._state.touched(self._trained)
        for block in self._state.optimizer_groups(self._trained):
            block.dirty = True

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
        found |= {a: sent(tensor, self._place) for a, tensor in zip(graph.constants, operands.constants, strict=True)}
        inputs = zip(graph.inputs, operands.inputs, strict=True)
        found |= {argument: sent(tensor.contiguous(), self._place) for argument, tensor in inputs}
        if graph.limits is not None:
            found[graph.limits] = sent(self._gradients.limits, self._place)
        known: dict[int, list[tuple[float, ...]]] = {}
        for argument, rate in graph.rates.items():
            if rate.group not in known:
                known[rate.group] = self._rates(rate.group)
            values, shape = known[rate.group][rate.number], graph.geometry[argument].shape
            found[argument] = sent(torch.tensor(values, dtype=rate.dtype, device="cpu").view(shape), self._place)
        return found

    def _rates(self, group: int) -> list[tuple[float, ...]]:
        """Of the members' steps; what computes otherwise than was planned is computed in smaller groups, planned anew."""
        try:
            return self._updates.rates(group, *self._steps(group))
        except UnfusableError as error:
            raise OutOfMemoryError(f"{error}, in smaller groups", enough_bytes=None) from error

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

    @contextmanager
    def _put_aside(self, members: Sequence[int]) -> Iterator[None]:
        if not members:
            yield
            return
        tensors = [self.given[self._graph.state[name]] for name in self._trained]
        tensors += [self.given[argument] for argument in self._graph.moments.values()]
        rows = sent(torch.tensor(members, device="cpu"), self._place)
        kept = [tensor[rows].cpu() for tensor in tensors]
        yield
        for tensor, before in zip(tensors, kept, strict=True):
            tensor[rows] = sent(before, self._place)


def sent(tensor: Tensor, place: torch.device) -> Tensor:
    """A tensor of the host on the device that computes, for what is asked of it from now on; the host does not wait.

    Only pinned memory is copied by a GPU itself, behind what it has still to do. Torch's allocator of such memory knows of the
    copy, and gives the memory to nobody before it is over.

    Args:
        tensor: a tensor, which may be there already.
        place: the device.
    """
    if tensor.device == place:
        return tensor
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(place, non_blocking=True)


def stack_now(prepared: Prepared, state: ModelState, inputs: Sequence[Tensor], gradients: GroupGradients) -> Stack:
    """What a group computes on now.

    Args:
        prepared: its plan.
        state: its own.
        inputs: its stacked batch, of which only the geometry counts.
        gradients: the group's rules for them.

    Raises:
        UnfusableError: no steps of such groups are planned; with the reason.
    """
    optimizer = state.optimizer
    if not isinstance(optimizer, OptimizerAtOnce):
        raise UnfusableError("its optimizer steps each member by itself")
    updates = UpdateTracer(optimizer.members, optimizer.rates)
    groups = groups_of(state.module, optimizer)
    return Stack(
        prepared=prepared,
        state=state.tensors,
        inputs=inputs,
        groups=groups,
        updates=updates,
        is_clipped=gradients.has_two_phases,
    )
