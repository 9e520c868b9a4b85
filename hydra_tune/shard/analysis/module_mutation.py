"""Refuses user code that adds, removes or replaces parameters or buffers of a module, or trains a frozen parameter.

Parameters and buffers live in blocks and are known to the optimizer, so a forward must not add or replace any. A buffer
replaced by a tensor of the same kind (`self.mean = 0.9 * self.mean + ...`) counts as overwritten: the step restores the
original tensor (`settle_buffers` of `shard/capture/step_module.py`) before the check. `ModelState`
(`train/state/model_state.py`) checks after the user's own code has run, `train/loop/plan_cache.py` when a value that the step
reads has changed between two steps, and `shard/cost/eager_pilot.py` after each step that the pilot runs. `SingleTrial`
(`train/single_trial.py`) has `ModelState` call `check_still_frozen` when a parameter thaws within a step. The module compares
tensors by identity, and must not change a model.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from hydra_tune.errors import TaskError
from hydra_tune.shard.capture.step_capture import named_state


def check_state(before: Mapping[str, Tensor], model: nn.Module) -> None:
    """Refuse a model whose code has added, removed or replaced parameters or buffers.

    Raises:
        TaskError: a tensor was added, removed or replaced; the message gives the name and a remedy.
    """
    present = dict(named_state(model))
    changed_names = sorted(present.keys() ^ before.keys())
    if changed_names:
        name = changed_names[0]
        verb, kind = ("adds", present[name]) if name in present else ("removes", before[name])
        raise TaskError(
            f"the model's forward {verb} its {_kind(kind)} {name!r}, which the optimizer and the memory plan cannot follow; "
            "make it in __init__, or run one batch through the module in model="
        )
    for name, tensor in present.items():
        # By identity: the optimizer and the blocks know the old tensor, whatever the values of the new tensor.
        if tensor is not before[name]:
            raise TaskError(
                f"the model's forward replaces its {_kind(before[name])} {name!r} by another tensor"
                f"{_difference(before[name], tensor)}; overwrite it in place, e.g. by copy_() under torch.no_grad()"
            )


def check_still_frozen(frozen: Mapping[str, Tensor]) -> None:
    """Refuse frozen parameters that start to train where the trial cannot be planned anew.

    Gradients, optimizer state and their memory are planned for the parameters that require gradients at the start of a
    trial. Freezing such a parameter later, and thawing the parameter again, equals not using the parameter and needs no
    plan. `frozen` has the parameters without gradients at the start of the trial.

    Raises:
        TaskError: such a parameter requires gradients now.
    """
    for name, tensor in frozen.items():
        if tensor.requires_grad:
            raise TaskError(
                f"parameter {name!r} did not require gradients when the trial began, and does now: the memory plan and the "
                "optimizer cannot follow; have it require gradients when model= returns, and freeze it from there on, e.g. by "
                "requires_grad_(False) in forward"
            )


def _kind(tensor: Tensor) -> str:
    return "parameter" if isinstance(tensor, nn.Parameter) else "buffer"


def _difference(old: Tensor, new: Tensor) -> str:
    if old.shape != new.shape:
        return f" of shape {tuple(new.shape)} instead of {tuple(old.shape)}"
    if old.dtype != new.dtype:
        return f" of {new.dtype} instead of {old.dtype}"
    if old.device != new.device:
        return f" on {new.device} instead of {old.device}"
    return " that requires gradients" if new.requires_grad and not isinstance(old, nn.Parameter) else ""
