"""Fusion keys: decide which trials may share a fused group, and explain why a trial may not.

`fusion_key` reduces a trial to a hashable key. Trials with equal keys are candidates for a group;
`GroupPlanFactory.check_alike` then compares the captured graphs. Trials of a sweep over learning rates or dropout
probabilities, for example, have equal keys. `GroupMatcher` (`pool/fusion/group_matcher.py`) takes a trial's key as soon
as the trial is built, without the pool's lock, so nothing of the trial may be changed or run here; `LiveGroup`
(`pool/fusion/live_group.py`) compares a joiner's key with the group's. `pool/dry_run/fusion_report.py` takes the key of each
task that `HydraExecutor.plan` forecasts, and `pool/dry_run/step_profiles.py` where a profile is asked for;
`fusion/runtime/task_profiles.py` calls `check_task`.

Note: a property must enter the key if the step's graph or the group's update depends on the property, and no other check
compares the property.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hydra_tune.batched.batched_optimizer import options_key
from hydra_tune.errors import UnfusableError
from hydra_tune.memory.block import storage_identity
from hydra_tune.shard.capture.fingerprint import architecture_key
from hydra_tune.shard.capture.step_capture import named_state
from hydra_tune.shard.cost.update_pilot import zeroes_more_than_gradients
from hydra_tune.task import TrainTask
from hydra_tune.train.hooks import gradient_hooks

# In words of a task's arguments.
_PARTS = (
    "model=",
    "step=",
    "torch's default dtype",
    "precision=",
    "compile=",
    "loss_weight=",
    "finish=",
    "evaluate=",
    "optimizer=",
    "param_groups=",
    "activations=",
    "accumulate=",
)


def check_task(task: TrainTask) -> None:
    """Refuse a task that no group supports, before anything is built.

    Raises:
        UnfusableError: the task uses an unsupported argument, named in the message.
    """
    if task.compile is not None:
        raise UnfusableError(f"it has compile={task.compile!r}, and the compiled code is for a single trial")
    supported: dict[str, Any] = {"split_batches": 1, "split_operators": None}
    for name, value in supported.items():
        if getattr(task, name) != value:
            raise UnfusableError(f"it has {name}={getattr(task, name)!r}, and a group takes each batch whole")
    if task.divides_by_rest:
        raise UnfusableError(
            f"it has remainder={task.remainder!r}, and a group divides the losses of all steps by accumulate"
        )
    if task.splits_steps:
        raise UnfusableError(f"it has parallel={task.parallel!r}, and a group computes on one device")


@dataclass(frozen=True, slots=True)
class FusionKey:
    """Properties shared by all trials of a group.

    Attributes:
        family: decides equality of keys: everything except numbers inside the model, losses and metrics. One part for
            each of `_PARTS`.
        architecture: also covers the numbers. `GroupMatcher.build` replaces the value of `fusion_key` by the architecture
            of the `MemberTrial`, which has digests of the Python state in addition. Then trials with equal architectures
            are alike, and other trials may be alike (`GroupPlanFactory.check_alike`).
    """

    family: tuple[Hashable, ...]
    architecture: Hashable = field(compare=False)


def fusion_key(task: TrainTask, module: nn.Module, optimizer: Optimizer) -> FusionKey:
    """Return the key of a trial; trials with equal keys may be fused if their graphs are alike.

    Rates, seeds, data, schedules, epochs and reports do not enter the key, because every member keeps its own.

    Raises:
        UnfusableError: the trial cannot be fused with any other trial; the message gives the reason.
    """
    check_task(task)
    _check_module(module)
    if zeroes_more_than_gradients(optimizer):
        raise UnfusableError(
            f"{type(optimizer).__name__} has a zero_grad() of its own, which a group's step would leave out"
        )
    architecture = architecture_key(task, module)
    if architecture is None:
        raise UnfusableError("its model or step holds a value that cannot be compared with those of other trials")
    names = {id(parameter): name for name, parameter in named_state(module)}
    groups = tuple(tuple(names[id(p)] for p in group["params"]) for group in optimizer.param_groups)
    family = (
        *_without_numbers(_without_losses(architecture)),
        # Metrics may differ between members where each is a number for each member.
        None if task.finish is None else _evaluation(architecture),
        options_key(optimizer),
        groups,
        task.activations,
        task.accumulate,
    )
    return FusionKey(family, architecture)


def differing_parts(one: FusionKey, other: FusionKey) -> list[str]:
    """Name the arguments of two tasks in which their keys differ."""
    pairs = zip(_PARTS, one.family, other.family, strict=True)
    return [name for name, part, other_part in pairs if part != other_part]


def _check_module(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise UnfusableError(f"parameter {name!r} is lazy: its shape is unknown until a forward")
    for hook in gradient_hooks(module):
        raise UnfusableError(f"{hook}, which a group's step would leave out")
    names: dict[int, str] = {}
    for name, tensor in named_state(module):
        # Sparse tensors have no storage to compare, and empty tensors no memory to share.
        if tensor.layout is not torch.strided or not tensor.numel():
            continue
        # Stacking copies every named tensor, so two names for the same memory would become two independent tensors.
        first_name = names.setdefault(storage_identity(tensor), name)
        if first_name != name:
            raise UnfusableError(
                f"{first_name!r} and {name!r} of its model share memory but are different tensors, and their stacked copies "
                "would not share memory"
            )


def _without_losses(key: Any) -> Any:
    model, (_loss, step, _evaluate), *other_parts = key
    return (model, step, *other_parts)


def _evaluation(key: Any) -> Any:
    _model, (_loss, _step, evaluate), *_others = key
    return evaluate


def _without_numbers(key: Any) -> Any:
    """Return an architecture key without the values of floats and of the integers 0 and 1, often written for floats."""
    if not isinstance(key, tuple | frozenset):
        return key
    if isinstance(key, tuple) and len(key) == 2 and (key[0] is float or (key[0] is int and key[1] in (0, 1))):  # noqa: PLR2004
        return (float,)
    return type(key)(map(_without_numbers, key))
