"""A `compute_loss` that a subclass of `Trainer` overrides, as the loss of a task.

`own_loss_of` finds the override for the task (`task.py`), and `TrainerStep` (`loss.py`) calls the result in place of the
stock loss. `refusals.py` asks `own_loss_of` as well, and lists the reasons that `refused_attributes` gives. The override's
`self` is not the `Trainer`, which is given up, but a `Trainer` without training: the settings of the loss, the attributes
of the user's own class, a stand-in for the accelerator, and as `self.model` the module of the step. The module must not
know shards or devices.

Note: each call has a `self` of its own, but trials share the attributes' contents, and no checkpoint holds the attributes.
So an override that reads the training (`self.state`), sets an attribute, or changes an attribute's content is refused by
name: the loss would be another in each trial. Attributes of the user's classes count, too. Contents, but for the
tokenizer's, are compared after the calls 1, 2, 4, 8 and so on of a model, because a large attribute takes milliseconds.
An attribute that cannot be pickled, such as an open file, is not compared. Trials on several threads call the override at
once, without a lock.
"""

import ast
import copy
import functools
import hashlib
import inspect
import io
import os
import pickle
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any, NoReturn

import torch
import transformers
from torch import Tensor, nn
from transformers import Trainer

from hydra_tune.errors import TaskError
from hydra_tune.shard.python_state.code_names import global_names

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
"""Attributes set by the library that an override may read, besides `accelerator` and the model."""
_UNCHANGED = frozenset({"processing_class", "accelerator"})
"""Attributes whose contents are not compared: a tokenizer takes long, and the stand-in for the accelerator has none."""
_THE_MODEL = frozenset({"model", "model_wrapped"})
_LIBRARY = f"{transformers.__path__[0]}{os.sep}"
_CALLS = weakref.WeakKeyDictionary[nn.Module, tuple[int, dict[str, bytes | None]]]()
"""Calls of an override so far, and the contents before the first, by the module of the step."""
_REMEDY = "write the TrainTask yourself (the page 'Bring a plain PyTorch loop' of the documentation)"


@dataclass(frozen=True, kw_only=True)
class OwnLoss:
    """Calls an overridden `compute_loss`.

    Args:
        method: `compute_loss`, bound to a `Trainer` without training.
        of_model: attributes that are the model.
    """

    method: MethodType
    of_model: frozenset[str]

    def __call__(
        self, module: nn.Module, batch: Mapping[str, Any], total: Tensor | None, *, return_outputs: bool
    ) -> Any:
        """Return the loss, and with `return_outputs` also the model's outputs.

        Raises:
            TaskError: the override reads what a trial in the pool lacks, or changes what trials share.
        """
        shared: Any = self.method.__self__
        num_calls, before = _CALLS.get(module) or (0, _contents(shared))
        num_calls += 1
        _CALLS[module] = num_calls, before
        # Of each call, because trials on several threads share the task.
        owner = object.__new__(type(shared))
        vars(owner).update(vars(shared) | dict.fromkeys(self.of_model, module))
        names = set(vars(owner))
        # A copy, because overrides take the labels out, and an evaluation reads them afterwards.
        options = {"return_outputs": True} if return_outputs else {}
        value = type(owner).compute_loss(owner, module, copy.copy(batch), num_items_in_batch=total, **options)
        # At the powers of two.
        now = _contents(shared) if num_calls & (num_calls - 1) == 0 else before
        changed = [name for name, content in now.items() if content != before.get(name)]
        # `functools.cached_property` writes past `__setattr__`.
        for name in (*changed, *(set(vars(owner)) - names)):
            _refuse_write(shared, name)
        return value


def own_loss_of(trainer: Trainer) -> OwnLoss | None:
    """Return the overridden `compute_loss` of a `Trainer`; None where the library's own computes the loss."""
    kind = type(trainer)
    # By the code's file: a script may have replaced the method of `Trainer` itself, and decorators copy names.
    code = getattr(kind.compute_loss, "__code__", None)
    if code is not None and code.co_filename.startswith(_LIBRARY):
        return None
    own = {name: value for name, value in vars(trainer).items() if name not in _names_of_library(kind)}
    # With a `model_init`, such an attribute keeps the model of before the training.
    of_model = {name for name, value in own.items() if value is trainer.model and trainer.model_init is None}
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
    return OwnLoss(method=shared.compute_loss, of_model=_THE_MODEL | of_model)


def refused_attributes(trainer: Trainer) -> Iterator[str]:
    """Describe reasons why a loss of the user's own would read the one model or `Trainer` that is given up.

    The attributes and methods of the user's class count where `compute_loss` is overridden, otherwise `compute_loss_func`.
    """
    tensors = [*trainer.model.parameters(), *trainer.model.buffers()]
    parts = {id(part) for part in (*trainer.model.modules(), *tensors)}
    memory = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}

    def reaches(*values: object) -> bool:
        content = _AttributeDigest()
        content.note(values)
        return content.has_trainer or bool(content.objects & parts or content.memory & memory)

    kind = type(trainer).__name__
    loss = own_loss_of(trainer)
    if loss is None:
        if trainer.compute_loss_func is not None and reaches(trainer.compute_loss_func):
            yield f"a compute_loss_func that holds a part of the model, or a {kind}: override compute_loss in a class instead"
        return
    for name, value in vars(loss.method.__self__).items():
        if name not in _SETTINGS - {"compute_loss_func"} and reaches(value):
            yield (
                f"self.{name} of {kind}, which holds a part of the model, or a Trainer: each trial has a model of its own; "
                "read the part from compute_loss's model"
            )
    for base in type(trainer).__mro__:
        functions = [each for each in vars(base).values() if isinstance(each, FunctionType)]
        if not base.__module__.startswith("transformers.") and reaches(*functions):
            yield (
                f"{base.__name__}, whose methods read a part of the model by a variable: each trial has a model of its own; "
                "read the part from compute_loss's model"
            )


class _AttributeDigest(pickle.Pickler):
    """Digest of a value, and the objects that the value holds.

    Pickling walks through most objects. Tensors count by their identity and version, and functions by their identity.
    Models count by their identity, parameters and buffers, and generators by their identity and state. Of a function, the
    variables of its closure are walked through as well, and global variables that are a tensor, a model or a `Trainer`.
    `PythonStateUndo` would not do here: models of the library note settings on themselves at their first call, which
    would count as changes.

    Attributes:
        objects: identities of the trainers, models and their parts, tensors, functions, methods and generators.
        memory: addresses of the memory of strided tensors.
        has_trainer: whether the value holds a `Trainer`.
    """

    def __init__(self) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, protocol=pickle.HIGHEST_PROTOCOL)
        self.objects: set[int] = set()
        self.memory: set[int] = set()
        self.has_trainer = False

    def note(self, value: object) -> bytes | None:
        """Walk through a value; return its digest, or None where an object cannot be walked through."""
        try:
            self.dump(value)
        except Exception:  # noqa: BLE001 - objects may raise anything here; the walk has noted others until then
            return None
        return hashlib.blake2b(self._file.getbuffer()).digest()

    def persistent_id(self, value: Any) -> object:
        if id(value) in self.objects:
            return id(value)
        if isinstance(value, Trainer | nn.Module | Tensor | FunctionType | MethodType | torch.Generator):
            self.objects.add(id(value))
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            # Without its Python attributes, which models of the library fill at their first call.
            self.objects.update(map(id, value.modules()))
            return id(value), tuple(map(self._tensor, (*value.parameters(), *value.buffers())))
        if isinstance(value, torch.Generator):
            return id(value), bytes(value.get_state().tolist())
        if isinstance(value, FunctionType):
            for cell in value.__closure__ or ():
                with suppress(ValueError):  # an empty cell
                    self._walk(cell.cell_contents)
            for name in global_names(value.__code__):
                variable = value.__globals__.get(name)
                if isinstance(variable, Trainer | nn.Module | Tensor):
                    self._walk(variable)
        self.has_trainer |= isinstance(value, Trainer)
        return id(value) if isinstance(value, Trainer | FunctionType | ModuleType | type) else None

    def _tensor(self, tensor: Tensor) -> tuple[int, int]:
        self.objects.add(id(tensor))
        if tensor.layout is torch.strided:
            self.memory.add(tensor.untyped_storage().data_ptr())
        return id(tensor), tensor._version  # noqa: SLF001 - torch has no public name

    def _walk(self, value: object) -> None:
        # A walk of its own: a pickler cannot begin another within `dump`.
        content = _AttributeDigest()
        content.objects |= self.objects
        content.note(value)
        self.objects |= content.objects
        self.memory |= content.memory
        self.has_trainer |= content.has_trainer


def _contents(shared: object) -> dict[str, bytes | None]:
    """Return digests of the attributes, and of those of the user's own classes, without methods and properties."""
    attributes: dict[str, Any] = {}
    for base in reversed(type(shared).__mro__[:-1]):
        if not base.__module__.startswith("transformers."):
            values = {name: value for name, value in vars(base).items() if not name.startswith("__")}
            attributes |= {name: value for name, value in values.items() if not hasattr(type(value), "__get__")}
    attributes |= vars(shared)
    return {name: _AttributeDigest().note(value) for name, value in attributes.items() if name not in _UNCHANGED}


def _names_of_library(kind: type) -> set[str]:
    """Names of the attributes that the library's own classes set on `self`."""
    return set().union(*(_names_set_by(base) for base in kind.__mro__ if base.__module__.startswith("transformers.")))


@functools.cache
def _names_set_by(base: Any) -> frozenset[str]:
    nodes = ast.walk(ast.parse(inspect.getsource(base)))
    stores = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return frozenset(node.attr for node in stores if ast.unparse(node.value) == "self")


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
