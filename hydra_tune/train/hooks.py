"""Hooks on gradients, which neither shards nor groups would honour.

A captured graph does not contain hooks, and the copies on which a step is tried lack the hooks of parameters. Where
several shards use a parameter, its hooks would get each shard's part of the gradient. `SingleTrial`
(`single_trial.py`) refuses a model with such hooks before the model is first cut, `OwnCodeTrial` (`own_code_trial.py`) when
the trial leaves its own code, and `fusion_key` (`fusion/matching/fusion_key.py`) before the trial may join a group.
"""

from collections.abc import Iterator

from torch import nn
from torch.nn.modules import module as global_hooks

from hydra_tune.errors import TaskError

# Private attribute -> public method that registers such a hook: torch has no public way to list hooks.
_OF_PARAMETERS = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}
_OF_MODULES = {
    "_backward_hooks": "register_full_backward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
}


def refuse_gradient_hooks(module: nn.Module) -> None:
    """Refuse a module with hooks on the gradients of its parameters or submodules.

    Raises:
        TaskError: names the first such hook.
    """
    for hook_description in gradient_hooks(module):
        raise TaskError(
            f"{hook_description}, which training in shards cannot honour; change gradients inside the forward, e.g. by a "
            "torch.autograd.Function or a hook on an activation, or in the optimizer's step"
        )


def gradient_hooks(module: nn.Module) -> Iterator[str]:
    """Yield a description of each hook on gradients: of parameters, of submodules, or of all modules of torch."""
    for name, parameter in module.named_parameters():
        for attribute, method in _OF_PARAMETERS.items():
            if getattr(parameter, attribute, None):
                yield f"parameter {name!r} has a gradient hook ({method})"
    for path, submodule in module.named_modules():
        for attribute, method in _OF_MODULES.items():
            if getattr(submodule, attribute):
                yield f"module {path or type(submodule).__name__!r} has a backward hook ({method})"
    if global_hooks._global_backward_hooks or global_hooks._global_backward_pre_hooks:  # noqa: SLF001 - no public name
        yield "torch has a backward hook for all modules (register_module_full_backward_hook)"
