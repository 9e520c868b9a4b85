"""Calls of a task's factories of model and optimizer, with clear errors for common mistakes.

`Trial` (`trial.py`) calls these factories through this module when the trial is built, inside the trial's random streams and
the capture gate, and `train_plain` (`train/loop/reference_loop.py`) does so before its first step. `SingleTrial`
(`single_trial.py`) and `MemberTrial` (`fusion/group/member.py`) prepare a built module for planning; `LoopTrial`
(`own_loop/loop_trial.py`) calls `on_host`. Everything else that calls a user's function to get a model (`SharedModule`, loops
until `register`, weights of results, the integrations) does so in `own_build`, too, but for objectives of Optuna, which may
take long and run in `own_default_dtype` alone. The module must not know the pool, the scheduler or a pool's devices.
"""

import functools
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hydra_tune.errors import TaskError
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.task import TrainTask
from hydra_tune.train.default_dtype import has_own_change, own_default_dtype

_LOGGER = logging.getLogger(__name__)
_OF_MODULES = ("parameters", "named_parameters", "modules", "named_modules", "children", "state_dict")


@contextmanager
def own_build(most_seconds: float = math.inf) -> Iterator[None]:
    """Context of a user's function that builds a model: one at a time in a process, as `from_pretrained` needs.

    Args:
        most_seconds: after which another thread may begin to build.

    Raises:
        TaskError: as of `own_default_dtype`.
    """
    # A thread that has changed the dtype is alone already, and would let others in where it waited for its turn.
    with nullcontext() if has_own_change() else GATE.building(most_seconds), own_default_dtype():
        yield


def build_model(task: TrainTask) -> nn.Module:
    """Build the task's module; log changes of the variables of its functions since the task was made.

    Raises:
        TaskError: the factory built another kind of object.
        Exception: any error of the task's own code.
    """
    task.warn_of_changes()
    with own_build():
        module = task.model()
    if not isinstance(module, nn.Module):
        raise TaskError(f"model= must build a torch.nn.Module, but returned {type(module).__name__}")
    return module


def on_host(module: nn.Module) -> nn.Module:
    """Return a module, with its parameters and buffers on the host; its factory may have moved the module to a GPU."""
    has_left = any(tensor.is_cuda for tensor in (*module.parameters(), *module.buffers()))
    return module.cpu() if has_left else module


def build_optimizer(task: TrainTask, groups: Any) -> torch.optim.Optimizer:
    """Build the task's optimizer from the parameters or parameter groups to train.

    Raises:
        TaskError: the factory built another kind of object, or takes its argument for a module.
        Exception: any error of the task's own code.
    """
    try:
        optimizer = task.optimizer(groups)
    except AttributeError as error:
        # Only a module's method, asked of the groups themselves, shows this mistake; other errors belong to the factory.
        if error.obj is not groups or error.name not in _OF_MODULES:
            raise
        made_by = "list(module.parameters())" if task.param_groups is None else "what param_groups= returns"
        raise TaskError(
            f"optimizer= takes its argument for a module and asks for .{error.name}, but is given {made_by}; pass the argument "
            "on, as in optimizer=lambda params: SGD(params, lr=0.1) or optimizer=partial(SGD, lr=0.1)"
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TaskError(f"optimizer= must build a torch.optim.Optimizer, but returned {type(optimizer).__name__}")
    return optimizer


def warn_of_unclipped(task: TrainTask, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Log that clipping leaves out a parameter that may get a gradient, because the optimizer does not have the parameter."""
    if task.max_grad_norm is None:
        return
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter not in trained:
            _warn_of_unclipped(name)
            return


# Once for each name in a process, and not in each trial of a search.
@functools.cache
def _warn_of_unclipped(name: str) -> None:
    _LOGGER.warning(
        "max_grad_norm= leaves out the gradient of the parameter %r, which is in no group of the optimizer; a loop that "
        "clips over module.parameters() counts the gradient. Give the optimizer the parameter, or freeze the parameter in "
        "model= by requires_grad_(False)",
        name,
    )


def refuse_lazy(module: nn.Module) -> None:
    """Refuse a module whose parameters have no shape yet, where planning needs the sizes.

    Raises:
        TaskError: names the first such parameter.
    """
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise TaskError(
                f"parameter {name!r} is lazy: its shape is unknown until a forward; run one batch through the module in "
                "model=, or give the sizes"
            )


def in_training_mode(module: nn.Module) -> None:
    """Set a module to training mode before a capture, unless all its parts are in training mode."""
    # `train` may be the user's own and keep count, and a plain loop calls the method only where a pass begins.
    if not all(part.training for part in module.modules()):
        module.train()
