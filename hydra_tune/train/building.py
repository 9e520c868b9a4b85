"""A task's own functions called to build what they are to build, and their mistakes named.

Shared by the pool and the plain loop. Knows nothing of devices.
"""

from typing import Any

import torch
from torch import nn

from hydra_tune.errors import TaskError
from hydra_tune.task import TrainTask

_OF_MODULES = ("parameters", "named_parameters", "modules", "named_modules", "children", "state_dict")


def build_model(task: TrainTask) -> nn.Module:
    """The task's module; a variable of its functions that has changed since the task was made is logged.

    Raises:
        TaskError: something else was built.
        Exception: whatever the task's own code raises.
    """
    task.warn_of_changes()
    module = task.model()
    if not isinstance(module, nn.Module):
        raise TaskError(f"model= must build a torch.nn.Module, but returned {type(module).__name__}")
    return module


def build_optimizer(task: TrainTask, groups: Any) -> torch.optim.Optimizer:
    """The task's optimizer.

    Args:
        task: builds it.
        groups: what it is to train.

    Raises:
        TaskError: something else was built, or the factory takes what it is given for a module.
        Exception: whatever the task's own code raises.
    """
    try:
        optimizer = task.optimizer(groups)
    except AttributeError as error:
        if error.obj is not groups or error.name not in _OF_MODULES:
            raise
        made_by = "list(module.parameters())" if task.param_groups is None else "what param_groups= returns"
        raise TaskError(
            f"optimizer= takes its argument for a module and asks for .{error.name}, but is given {made_by}; pass that on, "
            "as in optimizer=lambda params: SGD(params, lr=0.1) or optimizer=partial(SGD, lr=0.1)"
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TaskError(f"optimizer= must build a torch.optim.Optimizer, but returned {type(optimizer).__name__}")
    return optimizer
