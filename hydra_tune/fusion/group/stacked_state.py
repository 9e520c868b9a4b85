"""Convert between members' own modules and the stacked module of a group.

`StackedModule` and `stacked_optimizer` build the group's state. `hand_out` copies a slot back to a member's own module
and optimizer, for example before a checkpoint and when a member completes or leaves, and `put_in` copies a joining member
into a slot. `GroupTrial` (`group_trial.py`) builds the state before the first step and after each change of size;
`SlotTable` (`slot_table.py`) copies slots.

Note: no unit of the group may run during a copy. The stacked tensors belong to a `ModelState`
(`train/state/model_state.py`), whose blocks may move to another device or to the host between two units, so a slot is
read through `aliases` and written through `rewrite`. The module must not choose the slots: `SlotTable` does.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hydra_tune.batched.batched_optimizer import StackedOptimizer
from hydra_tune.batched.per_member_optimizer import group_optimizer
from hydra_tune.devices.device import Device
from hydra_tune.shard.capture.step_capture import named_state
from hydra_tune.train.state.model_state import ModelState


class StackedModule(nn.Module):
    """Parameters and buffers of all members, stacked under the members' own names. Has no forward."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        states = [dict(named_state(member)) for member in members]
        for name, tensor in states[0].items():
            stacked_tensor = torch.stack([state[name].detach() for state in states])
            owner = self._owner(name)
            leaf = name.rpartition(".")[2]
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(leaf, nn.Parameter(stacked_tensor, requires_grad=tensor.requires_grad))
            else:
                owner.register_buffer(leaf, stacked_tensor)

    def _owner(self, name: str) -> nn.Module:
        owner: nn.Module = self
        for part in name.split(".")[:-1]:
            child = owner._modules.get(part)  # noqa: SLF001 - a submodule may be named like an attribute of nn.Module
            if child is None:
                child = nn.Module()
                owner.add_module(part, child)
            owner = child
        return owner


def stacked_optimizer(members: Sequence[Optimizer], first: nn.Module, stacked: nn.Module) -> StackedOptimizer:
    """Build a single optimizer for the stacked parameters."""
    names = {id(tensor): name for name, tensor in named_state(first)}
    stacked_parameters = dict(stacked.named_parameters())
    groups = [[stacked_parameters[names[id(p)]] for p in group["params"]] for group in members[0].param_groups]
    return group_optimizer(members, groups)


def hand_out(state: ModelState, index: int, module: nn.Module, optimizer: Optimizer) -> None:
    """Copy a member's part of a group's state to the member's own module and optimizer; no unit of the group may run."""
    stacked_optimizer = state.optimizer
    assert isinstance(stacked_optimizer, StackedOptimizer), "not a group's state"
    with state.readers.reading(), torch.no_grad():
        # Paging may move a tensor's bytes on another thread meanwhile.
        # An alias keeps the present bytes readable until a unit runs.
        values: Mapping[int, Tensor] = state.aliases()
        for name, tensor in named_state(module):
            stacked_tensor = state.tensors[name]
            tensor.copy_(values.get(id(stacked_tensor), stacked_tensor.detach())[index])
        for name, parameter in _trained(module):
            entries = stacked_optimizer.member_state(state.tensors[name], index)
            if entries:
                optimizer.state[parameter] = {key: _laid_out(value, parameter) for key, value in entries.items()}


def put_in(state: ModelState, index: int, module: nn.Module, optimizer: Optimizer, device: Device) -> None:
    """Copy another member into a slot of a group's state; no unit of the group may run."""
    stacked_optimizer = state.optimizer
    assert isinstance(stacked_optimizer, StackedOptimizer), "not a group's state"
    stacked_optimizer.replace(index, optimizer)
    rows = {id(state.tensors[name]): tensor.detach() for name, tensor in named_state(module)}
    lacking: dict[str, dict[str, Any]] = {}
    for name, parameter in _trained(module):
        stacked_tensor, own_state = state.tensors[name], optimizer.state.get(parameter, {})
        rows |= stacked_optimizer.put(stacked_tensor, index, own_state)
        # State that the group has in no slot yet begins as fresh for all other members.
        members = [own_state if place == index else {} for place in range(stacked_tensor.size(0))]
        lacking[name] = stacked_optimizer.entries(stacked_tensor, members)

    def write(tensor: Tensor) -> None:
        if id(tensor) in rows:
            tensor.detach()[index] = rows[id(tensor)]

    # `rewrite` brings every block home and writes on the host, so the next load carries the new
    # row to a device. Optimizer state that the group lacks is adopted afterwards, as new tensors.
    state.rewrite(write)
    state.adopt_saved({name: entries for name, entries in lacking.items() if entries}, device)


def rows_of(state: ModelState, begin: int, end: int) -> ModelState:
    """Return the state of the members from `begin` up to `end`, in the same blocks; only for evaluations."""
    part = copy.copy(state)
    part.tensors = _Rows(state.tensors, begin, end)
    return part


class _Rows(Mapping[str, Tensor]):
    """Some rows of stacked tensors, cut at each look: paging gives the tensors other memory between two units."""

    def __init__(self, tensors: Mapping[str, Tensor], begin: int, end: int) -> None:
        self._tensors, self._rows = tensors, slice(begin, end)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name].detach()[self._rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def adopt(
    state: ModelState, built: Sequence[tuple[nn.Module, Optimizer]], taken: Sequence[bool], device: Device
) -> None:
    """Stack the state of the members' own optimizers, where at least one has taken a step."""
    stacked_optimizer = state.optimizer
    assert isinstance(stacked_optimizer, StackedOptimizer), "not a group's state"
    owns = [
        {name: optimizer.state.get(p, {}) if is_taken else {} for name, p in _trained(module)}
        for (module, optimizer), is_taken in zip(built, taken, strict=True)
    ]
    lacking = {
        name: stacked_optimizer.entries(state.tensors[name], [own_state[name] for own_state in owns])
        for name in owns[0]
    }
    state.adopt_saved({name: entries for name, entries in lacking.items() if entries}, device)


def _laid_out(value: Any, parameter: Tensor) -> Any:
    """Return a state entry on the parameter's device, with its strides, as the member's optimizer has it."""
    # Step counts have no dimensions, and torch keeps them on the host.
    if not isinstance(value, Tensor) or not value.dim():
        return value
    if value.shape != parameter.shape or value.stride() == parameter.stride():
        return value.to(parameter.device)
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _trained(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)
