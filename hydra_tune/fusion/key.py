"""Which trials may be one group, and why one stays out."""

from collections.abc import Hashable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hydra_tune.errors import UnfusableError
from hydra_tune.fusion.optimizers import options_key
from hydra_tune.shard.capture import named_state
from hydra_tune.shard.fingerprint import architecture_key
from hydra_tune.task import TrainTask


def check_task(task: TrainTask) -> None:
    """Refuse what no group does, before anything is built.

    Raises:
        UnfusableError: with the argument that it is about.
    """
    wanted: dict[str, Any] = {"accumulate": 1, "split_batches": 1, "split_operators": None, "compile": None}
    for name, value in wanted.items():
        if getattr(task, name) != value:
            raise UnfusableError(
                f"it has {name}={getattr(task, name)!r}, and a group takes each batch whole, as a step"
            )
    if task.precision != "float32":
        raise UnfusableError(f"it has precision={task.precision!r}, and groups run without autocast")


def fusion_key(task: TrainTask, module: nn.Module, optimizer: Optimizer) -> Hashable:
    """What the trials of a group have in common: equal keys, and they may be fused.

    Rates, seeds, data, schedules, epochs and reports are not part of it; each member has its own.

    Args:
        task: the trial's.
        module: what its `model=` has built.
        optimizer: what its `optimizer=` has built, of the module's parameters.

    Raises:
        UnfusableError: it may be fused with no other trial; with the reason.
    """
    check_task(task)
    architecture = architecture_key(task, module)
    if architecture is None:
        raise UnfusableError("its model or step holds something by which it cannot be compared with others")
    names = {id(parameter): name for name, parameter in named_state(module)}
    groups = tuple(tuple(names[id(p)] for p in group["params"]) for group in optimizer.param_groups)
    return (architecture, options_key(optimizer), groups, task.max_grad_norm is None, task.activations)
