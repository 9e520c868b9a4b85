"""The optimizer of a `Trainer` as factories: groups by the names of parameters, and the class with its settings.

`Trainer.create_optimizer` makes an optimizer for the parameters of one model. `recipe_of` keeps the class, the
settings and the names of the parameters, and checks that the recipe makes an equal optimizer. `task.py` takes the recipe,
and turns a `ValueError` from here into a refusal. Each trial of the pool calls the factories. The factories must keep no
parameter of the `Trainer`'s model, and must hand no tensor of theirs to two optimizers.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

_TORCH = "; use an optimizer of torch"


@dataclass(frozen=True)
class NamedGroups:
    """Builds parameter groups from names.

    Args:
        groups: the options of each group, with the names of its parameters as `"params"`.
    """

    groups: tuple[Mapping[str, Any], ...]

    def __call__(self, module: nn.Module) -> list[dict[str, Any]]:
        """Return the groups of a module's parameters."""
        named = dict(module.named_parameters())
        return [{**_own_tensors(group), "params": [named[name] for name in group["params"]]} for group in self.groups]


@dataclass(frozen=True)
class OptimizerOfClass:
    """Builds an optimizer.

    Args:
        kind: its class.
        arguments: arguments beside the groups.
    """

    kind: type[Optimizer]
    arguments: Mapping[str, Any]

    def __call__(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Return an optimizer of parameter groups."""
        return self.kind(groups, **_own_tensors(self.arguments))


def recipe_of(optimizer: Any, model: nn.Module) -> tuple[NamedGroups, OptimizerOfClass]:
    """Return the recipe for another optimizer like a given optimizer that has made no step.

    Args:
        optimizer: optimizer of the model's parameters.
        model: the model.

    Raises:
        ValueError: another such optimizer cannot be made; the message says why, with the remedy.
    """
    kind = type(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"{kind.__name__} is not a torch.optim.Optimizer{_TORCH}")  # noqa: TRY004 - it becomes a refusal
    hooks = [getattr(optimizer, f"_optimizer_step_{place}_hooks", ()) for place in ("pre", "post")]
    if any(hooks):
        raise ValueError(
            f"{kind.__name__} has step hooks, which the optimizers of trials would not have; leave the "
            "hooks out, or set after_step= of the task, as in dataclasses.replace(task, after_step=...)"
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if any(id(parameter) not in names for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(f"{kind.__name__} has tensors that are not parameters of the model{_TORCH}")
    groups = tuple(
        {**_own_tensors(group), "params": tuple(names[id(parameter)] for parameter in group["params"])}
        for group in optimizer.param_groups
    )
    # The defaults may have names unknown to the constructor, such as `decoupled_weight_decay` of AdamW.
    known = inspect.signature(kind).parameters
    arguments = _own_tensors({name: value for name, value in optimizer.defaults.items() if name in known})
    recipe = NamedGroups(groups), OptimizerOfClass(kind, arguments)
    try:
        again = recipe[1](recipe[0](model))
    except Exception as error:
        raise ValueError(f"{kind.__name__} cannot be made again from its groups ({error}){_TORCH}") from error
    # Adagrad of torch has a state before its first step.
    if not _are_equal(optimizer.state, again.state):
        raise ValueError(f"{kind.__name__} has made steps already{_TORCH} that has made none")
    for before, after in zip(optimizer.param_groups, again.param_groups, strict=True):
        if _options(before) != _options(after):
            raise ValueError(f"{kind.__name__} made again from its groups has other settings{_TORCH}")
    kept, kept_again = _attributes(optimizer), _attributes(again)
    for name in sorted(kept.keys() | kept_again.keys()):
        expected, got = kept.get(name), kept_again.get(name)
        if expected != got:
            raise ValueError(
                f"{kind.__name__} has {name}={expected!r}, and made again from its groups {got!r}; use a subclass that has the "
                "setting as its default, or an optimizer of torch"
            )
    return recipe


def _are_equal(before: Any, after: Any) -> bool:
    """Whether the states of two optimizers, or two values within, are equal."""
    if isinstance(before, torch.Tensor):
        return isinstance(after, torch.Tensor) and torch.equal(before, after)
    if isinstance(before, Mapping):
        return before.keys() == after.keys() and all(_are_equal(value, after[name]) for name, value in before.items())
    return bool(before == after)


def _own_tensors(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with copies of the tensors: a scheduler writes a learning rate that is a tensor in place."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in options.items()}


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the settings that an optimizer keeps outside of its groups: plain values, because others need not compare."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        # Without state, groups and defaults, without hooks, and without a scheduler's note (`_opt_called`).
        if name not in {"defaults", "state", "param_groups", "_opt_called"} and not name.startswith("_optimizer_")
        if _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, (*value, *value.values())))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group in a form that can be compared."""
    return {
        name: value.tolist() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }
