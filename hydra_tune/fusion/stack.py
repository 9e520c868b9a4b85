"""Members' modules as one, with stacked parameters; and what of it is one member's."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hydra_tune.devices.device import Device
from hydra_tune.fusion.optimizers import StackedOptimizer
from hydra_tune.fusion.sliced import group_optimizer
from hydra_tune.shard.capture import named_state
from hydra_tune.train.state import ModelState


class StackedModule(nn.Module):
    """Parameters and buffers of the members, stacked under the names that they have in each of them. Has no forward.

    Args:
        members: modules of one architecture.
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        states = [dict(named_state(member)) for member in members]
        for name, tensor in states[0].items():
            made = torch.stack([state[name].detach() for state in states])
            owner = self._owner(name)
            leaf = name.rpartition(".")[2]
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(leaf, nn.Parameter(made, requires_grad=tensor.requires_grad))
            else:
                owner.register_buffer(leaf, made)

    def _owner(self, name: str) -> nn.Module:
        owner: nn.Module = self
        for part in name.split(".")[:-1]:
            child = owner._modules.get(part)  # noqa: SLF001 - a name of the user's may be one of nn.Module's own
            if child is None:
                child = nn.Module()
                owner.add_module(part, child)
            owner = child
        return owner


def stacked_optimizer(members: Sequence[Optimizer], first: nn.Module, stacked: nn.Module) -> StackedOptimizer:
    """One optimizer for the stacked parameters.

    Args:
        members: the members' own.
        first: the first member's module.
        stacked: the stacked one.
    """
    names = {id(tensor): name for name, tensor in named_state(first)}
    wide = dict(stacked.named_parameters())
    groups = [[wide[names[id(p)]] for p in group["params"]] for group in members[0].param_groups]
    return group_optimizer(members, groups)


def hand_out(state: ModelState, index: int, module: nn.Module, optimizer: Optimizer) -> None:
    """Copy a member's part of a group's state to its own module and optimizer; no unit of the group runs.

    Args:
        state: the group's.
        index: of the member.
        module: its own, to be overwritten.
        optimizer: its own, whose state is to be the group's.
    """
    stacked = state.optimizer
    assert isinstance(stacked, StackedOptimizer), "not a group's state"
    with state.readers.reading(), torch.no_grad():
        values: Mapping[int, Tensor] = state.aliases()
        for name, tensor in named_state(module):
            wide = state.tensors[name]
            tensor.copy_(values.get(id(wide), wide.detach())[index])
        for name, parameter in _trained(module):
            found = stacked.member_state(state.tensors[name], index)
            if found:
                optimizer.state[parameter] = {key: _laid_out(value, parameter) for key, value in found.items()}


def put_in(state: ModelState, index: int, module: nn.Module, optimizer: Optimizer, device: Device) -> None:
    """Have a place of a group's state be another member's; no unit of the group runs.

    Args:
        state: the group's.
        index: the place.
        module: the member's own, whose weights are copied.
        optimizer: the member's own, whose state is copied if it has any, and whose rates are read from now on.
        device: any device of the pool.
    """
    stacked = state.optimizer
    assert isinstance(stacked, StackedOptimizer), "not a group's state"
    stacked.replace(index, optimizer)
    rows = {id(state.tensors[name]): tensor.detach() for name, tensor in named_state(module)}
    lacking: dict[str, dict[str, Any]] = {}
    for name, parameter in _trained(module):
        wide, own = state.tensors[name], optimizer.state.get(parameter, {})
        rows |= stacked.put(wide, index, own)
        members = [own if place == index else {} for place in range(wide.size(0))]
        lacking[name] = stacked.entries(wide, members)

    def write(tensor: Tensor) -> None:
        if id(tensor) in rows:
            tensor.detach()[index] = rows[id(tensor)]

    state.rewrite(write)
    state.adopt_saved({name: entries for name, entries in lacking.items() if entries}, device)


def adopt(
    state: ModelState, built: Sequence[tuple[nn.Module, Optimizer]], taken: Sequence[bool], device: Device
) -> None:
    """Stack the state of members' own optimizers, where one of them has taken a step.

    Args:
        state: the group's, whose optimizer has taken none.
        built: the members' modules and optimizers.
        taken: which of the places are taken.
        device: any device of the pool.
    """
    stacked = state.optimizer
    assert isinstance(stacked, StackedOptimizer), "not a group's state"
    owns = [
        {name: optimizer.state.get(p, {}) if is_taken else {} for name, p in _trained(module)}
        for (module, optimizer), is_taken in zip(built, taken, strict=True)
    ]
    found = {name: stacked.entries(state.tensors[name], [own[name] for own in owns]) for name in owns[0]}
    state.adopt_saved({name: entries for name, entries in found.items() if entries}, device)


def _laid_out(value: Any, parameter: Tensor) -> Any:
    """An entry of a parameter's state as the member's own optimizer has it: where the parameter is, with its strides."""
    if not isinstance(value, Tensor) or not value.dim():
        return value
    if value.shape != parameter.shape or value.stride() == parameter.stride():
        return value.to(parameter.device)
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _trained(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)
