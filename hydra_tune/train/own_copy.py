"""A model of each trial's own, for integrations whose users' functions may return one model, or parts of one, each time.

The integrations of the Trainer and of Lightning (`integrations/hydra_tune_transformers/task.py`,
`integrations/hydra_tune_lightning/task.py`) call the user's function once to read the model, and mark the model's tensors
(`mark_seen`). Where a later call returns a model with a marked tensor, the trial gets a copy (`own_copy`): the marked model
stays as it was, and every trial begins there.
"""

from typing import TypeVar

from torch import nn

from hydra_tune.errors import TaskError
from hydra_tune.shard.capture.step_capture import copied_model, named_state
from hydra_tune.shard.python_state.copied_functions import parts_of, place_of

# On the tensor, because an identity may be that of another object by now, and a pickled tensor keeps its attributes.
_MARK = "_hydra_tune_seen"
_Module = TypeVar("_Module", bound=nn.Module)


def mark_seen(module: nn.Module) -> None:
    """Mark the tensors of a module that no trial trains."""
    for _, tensor in named_state(module):
        vars(tensor)[_MARK] = True


def own_copy(module: _Module, *, is_own: bool = False) -> _Module:
    """Return the module, or a copy of a module that has a marked tensor; marked frozen parameters stay shared.

    `is_own` tells whether the module is the trial's own apart from frozen parameters, which may have been thawed since.

    Raises:
        TaskError: a parameter that would be copied has hooks, which a copy would lack, or a function of the model holds the
            original in a way that a copy cannot change.
    """
    seen = [tensor for _, tensor in named_state(module) if _MARK in vars(tensor)]
    frozen = {id(tensor): tensor for tensor in seen if isinstance(tensor, nn.Parameter) and not tensor.requires_grad}
    # Modules around frozen parameters are copied too: each trial sets the modes of its own.
    if not seen or (is_own and len(seen) == len(frozen)):
        return module
    for name, parameter in module.named_parameters():
        if id(parameter) not in frozen and _has_hooks(parameter):
            raise TaskError(
                f"parameter {name!r} has a hook (register_hook), and each trial copies a model with ready-made parts without "
                "hooks; build all parts anew in the function that makes the model"
            )
    copied = copied_model(module, {**frozen})
    own = set(map(id, parts_of(copied)))  # a module that copies itself as the same object shares its parts
    place = place_of(copied, [part for part in parts_of(module) if id(part) not in frozen and id(part) not in own])
    if place is not None:
        raise TaskError(
            f"{place} holds a part of the model that each trial copies, by a global variable or an object that cannot be "
            "copied: the copy would compute with the original's parameters; build all parts anew in the function that makes "
            "the model"
        )
    for _, tensor in named_state(copied):
        if id(tensor) not in frozen:
            vars(tensor).pop(_MARK, None)
    return copied


def _has_hooks(parameter: nn.Parameter) -> bool:
    # The private names are the only ones.
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))  # noqa: SLF001
