"""A `compute_loss` that a subclass of `Trainer` overrides, as the loss of a task.

`own_loss_of` finds the override, and `TrainerStep` (`loss.py`) calls the result in place of the stock loss. The override's
`self` is not the `Trainer`, which is given up, but a `Trainer` without training: the settings of the loss, the attributes
of the user's own class, and as `self.model` the module of the step.

Note: trials share the `self` of a task, and no checkpoint holds its attributes. So an override that reads the training
(`self.state`), sets an attribute, or changes a container is refused by name: the loss would be another in each trial.
"""

import copy
import dis
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NoReturn

from torch import Tensor, nn
from transformers import Trainer

from hydra_tune.errors import TaskError

_SETTINGS = frozenset(
    [
        "args",
        "can_return_loss",
        "compute_loss_func",
        "is_deepspeed_enabled",
        "is_fsdp_enabled",
        "is_fsdp_xla_enabled",
        "is_model_parallel",
        "label_names",
        "label_smoother",
        "loss_is_scaled_for_ga",
        "model_accepts_loss_kwargs",
        "processing_class",
        "_loss_shifts_labels",
    ]
)
"""Attributes of every `Trainer` that an override may read."""
_THE_MODEL = frozenset({"model", "model_wrapped"})
_REMEDY = "write the TrainTask yourself (the page 'Bring a plain PyTorch loop' of the documentation)"


@dataclass(frozen=True, kw_only=True)
class OwnLoss:
    """Calls an overridden `compute_loss`.

    Args:
        method: `compute_loss`, bound to a `Trainer` without training.
        of_model: attributes that are the model.
    """

    method: Callable[..., Any]
    of_model: frozenset[str]

    def __call__(
        self, module: nn.Module, batch: Mapping[str, Any], total: Tensor | None, *, return_outputs: bool
    ) -> Any:
        """Return the loss, and with `return_outputs` also the model's outputs.

        Raises:
            TaskError: the override reads what a trial in the pool lacks, or changes what trials share.
        """
        shared: Any = getattr(self.method, "__self__")  # noqa: B009 - a Callable has no such attribute for mypy
        before = _contents(vars(shared))
        # Of each call, because trials on several threads share the task.
        owner = object.__new__(type(shared))
        vars(owner).update(vars(shared) | dict.fromkeys(self.of_model, module))
        # A copy, because overrides take the labels out, and an evaluation reads them afterwards. Of the same class, which
        # may offer the values as attributes.
        options = {"return_outputs": True} if return_outputs else {}
        value = type(owner).compute_loss(owner, module, copy.copy(batch), num_items_in_batch=total, **options)
        for name, content in _contents(vars(shared)).items():
            if not _is_same(content, before[name]):
                _refuse_write(shared, name)
        return value


def own_loss_of(trainer: Trainer) -> OwnLoss | None:
    """Return the overridden `compute_loss` of a `Trainer`; None where the library's own computes the loss."""
    kind = type(trainer)
    if next(base for base in kind.__mro__ if "compute_loss" in vars(base)).__module__.startswith("transformers."):
        return None
    own = {name: value for name, value in vars(trainer).items() if name not in _names_of_library(kind)}
    of_model = {name for name, value in own.items() if value is trainer.model}
    settings = {name: vars(trainer)[name] for name in _SETTINGS if name in vars(trainer)}
    rules = {
        "__getattr__": _refuse_read,
        "__setattr__": _refuse_write,
        "log": _leave_out,
        "__module__": kind.__module__,
    }
    shared: Any = object.__new__(type(kind.__name__, (kind,), rules))
    vars(shared).update(settings | own | {"accelerator": _SingleProcessAccelerator()})
    for name in of_model:
        del vars(shared)[name]
    return OwnLoss(method=getattr(shared, "compute_loss"), of_model=_THE_MODEL | of_model)  # noqa: B009 - see __call__


def refused_attributes(trainer: Trainer) -> Iterator[str]:
    """Describe attributes of an overridden `compute_loss` that belong to the one model or `Trainer` that is given up."""
    loss = own_loss_of(trainer)
    if loss is None:
        return
    parts = {id(part) for part in (*trainer.model.modules(), *trainer.model.parameters(), *trainer.model.buffers())}
    for name, value in vars(getattr(loss.method, "__self__")).items():  # noqa: B009 - see OwnLoss.__call__
        if name not in _SETTINGS and any(_is_of(each, trainer, parts) for each in _one_level(value)):
            yield (
                f"self.{name} of {type(trainer).__name__}, which holds a part of the model, or a method of this Trainer: each "
                "trial has a model of its own; read the part from compute_loss's model"
            )


def _is_of(value: Any, trainer: Trainer, parts: set[int]) -> bool:
    if getattr(value, "__self__", None) is trainer or value is trainer or id(value) in parts:
        return True
    tensors = value.parameters() if isinstance(value, nn.Module) else ()
    return any(id(tensor) in parts for tensor in tensors)


def _one_level(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple | set | deque):
        yield from value


def _contents(attributes: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Note the items of containers, and the versions of tensors."""
    noted: dict[str, tuple[Any, ...]] = {}
    for name, value in attributes.items():
        if isinstance(value, dict):
            noted[name] = (*value, *value.values())
        elif isinstance(value, list | set | deque):
            noted[name] = tuple(value)
        elif isinstance(value, Tensor):
            noted[name] = (value._version,)  # noqa: SLF001 - torch has no public name
    return noted


def _is_same(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    # Versions are small numbers, which Python keeps once; items are compared by identity.
    return len(now) == len(before) and all(
        a is b or (type(a) is int and a == b) for a, b in zip(now, before, strict=True)
    )


def _names_of_library(kind: type) -> set[str]:
    """Names of the attributes that the library's own classes set."""
    functions = [
        inspect.unwrap(value)
        for base in kind.__mro__
        if base.__module__.startswith("transformers.")
        for value in vars(base).values()
        if isinstance(value, FunctionType)
    ]
    return {i.argval for each in functions for i in dis.get_instructions(each) if i.opname == "STORE_ATTR"}


class _SingleProcessAccelerator:
    """Stands in for the `Accelerator`, as far as the stock `compute_loss` asks: one process, and models without wrappers."""

    num_processes, process_index, is_main_process, is_local_main_process = 1, 0, True, True
    parallelism_config = None

    def unwrap_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        return model

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise TaskError(f"compute_loss reads self.accelerator.{name}, which a trial in the pool lacks; {_REMEDY}")


def _refuse_read(self: Any, name: str) -> NoReturn:
    # Python's own protocols, such as copying, ask for names that need not exist.
    if name.startswith("__") or name not in _names_of_library(type(self)):
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
    raise TaskError(
        f"compute_loss of {type(self).__name__} reads self.{name}, which a trial in the pool lacks: compute the loss from the "
        f"batch, the model and settings, or {_REMEDY}"
    )


def _refuse_write(self: Any, name: str, value: object = None) -> NoReturn:
    del value
    raise TaskError(
        f"compute_loss of {type(self).__name__} changes self.{name}, which trials of a search would share and no checkpoint "
        f"holds: leave the change out, report by compute_metrics, or {_REMEDY}"
    )


def _leave_out(self: Any, logs: object, *_: Any, **__: Any) -> None:
    """Stand in for `Trainer.log`, which changes no number: a result's history has the reports."""
    del self, logs
