"""Modules that contain the model of a `Trainer`, such as the losses of sentence-transformers, whose `forward` calls the model.

`losses_around` finds these attributes of a `Trainer`, and returns copies with an empty module in the place of the model;
`refusals.py` refuses a loss that holds a part of the model as well (`holds_part`). `placed` puts a trial's model there for a
call (`own_loss.py`). A loss with parameters or buffers of its own goes with the model: the module of the trial is then a
`ModelWithLosses`. `task.py` asks for the module of a trial (`module_of`), and gives the `Trainer` of a result another model.
The module must not know shards or devices.
"""

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import Trainer


class _Place(nn.Module):
    """Stands for the model."""


class ModelWithLosses(nn.Module):
    """A model, and losses with parameters or buffers of their own.

    Args:
        model: the model.
        losses: losses by the attribute of the `Trainer`, as `losses_around` returns the losses.
    """

    def __init__(self, model: nn.Module, losses: dict[str, nn.Module]) -> None:
        super().__init__()
        self.model = model
        self.losses = nn.ModuleDict(losses)

    def train(self, mode: bool = True) -> "ModelWithLosses":
        """Set the mode of the model alone: a `Trainer` leaves the modes of the losses as they are."""
        self.training = mode
        self.model.train(mode)
        return self


def module_of(trainer: Trainer) -> nn.Module:
    """Return the module of a trial: the model of a `Trainer`, with the losses that have a state of their own."""
    losses = {name: loss for name, loss in losses_around(trainer).items() if has_state(loss)}
    model: nn.Module = trainer.model
    return ModelWithLosses(model, losses) if losses else model


def replace_model(trainer: Trainer, model: nn.Module) -> None:
    """Give a `Trainer` another model, also in the modules around the model."""
    for name, loss in losses_around(trainer).items():
        setattr(trainer, name, placed(loss, model))
    # `Trainer` holds the model in three places, and hands the model of the third to callbacks.
    trainer.model = trainer.model_wrapped = trainer.callback_handler.model = model


def own_losses(trainer: Trainer) -> None:
    """Give a `Trainer` copies of the modules around its model, whose tensors a script may use for several Trainers."""
    model = trainer.model
    for name in losses_around(trainer):
        setattr(trainer, name, copy.deepcopy(getattr(trainer, name), {id(model): model}))


def losses_around(trainer: Trainer) -> dict[str, nn.Module]:
    """Return copies of the attributes that contain the model, without the model; tensors of their own are shared."""
    model = trainer.model
    return {
        name: _copied(value, [model], _Place())
        for name, value in vars(trainer).items()
        if isinstance(value, nn.Module) and value is not model and any(part is model for part in value.modules())
        if name != "model_wrapped"
    }


def placed(loss: nn.Module, model: nn.Module) -> nn.Module:
    """Return a copy of a loss of `losses_around` with a model in its place; tensors of the loss are shared."""
    # By the class, because the loss may be a copy of a copy.
    return _copied(loss, [part for part in loss.modules() if isinstance(part, _Place)], model)


def has_state(loss: nn.Module) -> bool:
    """Whether a loss of `losses_around` has parameters or buffers of its own."""
    return any(True for _ in (*loss.parameters(), *loss.buffers()))


def holds_part(loss: nn.Module, model: nn.Module) -> bool:
    """Whether a module around a model holds a part of the model beside the model itself."""
    parts = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())} - {id(model)}
    unvisited, visited = [loss], {id(model)}
    while unvisited:
        module = unvisited.pop()
        if id(module) in visited:
            continue
        visited.add(id(module))
        tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if not parts.isdisjoint(map(id, (module, *tensors))):
            return True
        unvisited += module.children()
    return False


def _copied(loss: nn.Module, former: Sequence[nn.Module], model: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {id(each): model for each in former}
    inside = {id(part) for each in former for part in each.modules()}
    for part in loss.modules():
        if id(part) not in inside:
            memo |= {id(tensor): tensor for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False))}
    return copy.deepcopy(loss, memo)
