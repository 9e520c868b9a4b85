"""Which trials may be one group, and why one stays out."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hydra_tune.errors import UnfusableError
from hydra_tune.fusion.optimizers import options_key
from hydra_tune.memory.block import storage_identity
from hydra_tune.shard.capture import named_state
from hydra_tune.shard.fingerprint import architecture_key
from hydra_tune.task import TrainTask
from hydra_tune.train.hooks import gradient_hooks


def check_task(task: TrainTask) -> None:
    """Refuse what no group does, before anything is built.

    Raises:
        UnfusableError: with the argument that it is about.
    """
    wanted: dict[str, Any] = {"split_batches": 1, "split_operators": None, "compile": None}
    for name, value in wanted.items():
        if getattr(task, name) != value:
            raise UnfusableError(f"it has {name}={getattr(task, name)!r}, and a group takes each batch whole")
    if task.precision != "float32":
        raise UnfusableError(f"it has precision={task.precision!r}, and groups run without autocast")


@dataclass(frozen=True, slots=True)
class FusionKey:
    """What the trials of a group have in common.

    Attributes:
        family: by which keys are equal: everything but numbers that a model holds, and losses and metrics.
        architecture: with the numbers; trials of equal ones are alike, others may be (`GroupPlans.are_alike`).
    """

    family: Hashable
    architecture: Hashable = field(compare=False)


def fusion_key(task: TrainTask, module: nn.Module, optimizer: Optimizer) -> FusionKey:
    """What the trials of a group have in common: equal keys, and they may be fused if they are alike.

    Rates, seeds, data, schedules, epochs and reports are not part of it; each member has its own.

    Args:
        task: the trial's.
        module: what its `model=` has built.
        optimizer: what its `optimizer=` has built, of the module's parameters.

    Raises:
        UnfusableError: it may be fused with no other trial; with the reason.
    """
    check_task(task)
    _check_module(module)
    architecture = architecture_key(task, module)
    if architecture is None:
        raise UnfusableError("its model or step holds something by which it cannot be compared with others")
    names = {id(parameter): name for name, parameter in named_state(module)}
    groups = tuple(tuple(names[id(p)] for p in group["params"]) for group in optimizer.param_groups)
    family = (
        _without_numbers(_without_losses(architecture)),
        options_key(optimizer),
        groups,
        task.activations,
        task.accumulate,
    )
    return FusionKey(family, architecture)


def _check_module(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise UnfusableError(f"parameter {name!r} is lazy: its shape is unknown until a forward")
    for found in gradient_hooks(module):
        raise UnfusableError(f"{found}, which a group's step would leave out")
    names: dict[int, str] = {}
    for name, tensor in named_state(module):
        if tensor.layout is not torch.strided or not tensor.numel():
            continue
        other = names.setdefault(storage_identity(tensor), name)
        if other != name:
            raise UnfusableError(
                f"{other!r} and {name!r} of its model share memory but are different tensors, and copies of them would not"
            )


def _without_losses(key: Any) -> Any:
    """An architecture's key with `step=` alone of what is done with the model."""
    model, (_loss, step, _evaluate), *rest = key
    return (model, step, *rest)


def _without_numbers(key: Any) -> Any:
    """An architecture's key without the values of real numbers, and of 0 and 1, which may be meant as such."""
    if not isinstance(key, tuple | frozenset):
        return key
    if isinstance(key, tuple) and len(key) == 2 and (key[0] is float or (key[0] is int and key[1] in (0, 1))):  # noqa: PLR2004
        return (float,)
    return type(key)(map(_without_numbers, key))
