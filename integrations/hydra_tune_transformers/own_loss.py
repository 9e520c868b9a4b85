"""A `compute_loss` that a subclass of `Trainer` overrides, as the loss of a task.

`own_loss_of` finds the override for the task (`task.py`), and `TrainerStep` (`loss.py`) calls the result in place of the
stock loss. `evaluation.py` calls an overridden `prediction_step` and `log` of the same class. `refusals.py` asks
`own_loss_of` as well, and lists the reasons that `refused_attributes` gives. The override's `self` is not the `Trainer`,
which is given up, but a `Trainer` without training: the settings of the loss, the attributes of the user's own class, a
stand-in for the accelerator, and as `self.model` the module of the step. The module must not know shards or devices.

Note: each call has a `self` of its own, but trials share the attributes' contents, and no checkpoint holds the attributes.
So an override that reads the training (`self.state`), sets an attribute, or changes an attribute's content is refused by
name: the loss would be another in each trial. Attributes of the user's classes count, too, and so do globals and other
variables that the classes' functions name. Contents, but for the tokenizer's, are compared after the calls 1, 2, 4, 8 and so
on of a model, because a large attribute takes milliseconds. An attribute that cannot be pickled, such as an open file, is not
compared. Trials on several threads call the override at once, without a lock.

Note: metrics. Trainers of trl append to `self._metrics["train"]` and `self._metrics["eval"]`, and their `log` averages the
lists. Each call has a copy of `_metrics`. The pool gives the values of an evaluation to `log`; values of the training are
left out. A value from `accelerator.gather_for_metrics` is a `GatheredMetric` (`gathered.py`). A number that `compute_loss`
counts on `self` is unknown, and a metric made of the number is left out.

Note: modules around the model. An attribute may be a module that contains the model, such as `self.loss` of
sentence-transformers. The override gets a copy of the attribute around the trial's model (`around.py`).
"""

import ast
import copy
import functools
import hashlib
import inspect
import io
import os
import pickle
import textwrap
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any, NoReturn

import torch
import transformers
from accelerate import PartialState
from torch import Tensor, nn
from transformers import Trainer

from hydra_tune.errors import TaskError
from hydra_tune.shard.python_state.code_names import global_names
from hydra_tune.shard.python_state.reachable_values import walked
from hydra_tune.shard.python_state.value_holder import ValueHolder
from hydra_tune_transformers.around import ModelWithLosses, has_state, losses_around, placed
from hydra_tune_transformers.gathered import GatheredMetric

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
_UNCHANGED = (transformers.PreTrainedTokenizerBase, transformers.ProcessorMixin)
"""Classes of attributes whose contents are not compared, because the comparison takes long."""
_METRICS = "_metrics"
_TRAINING, _EVALUATION = "train", "eval"
_METHOD = "_method_called_by_the_pool"
_NO_MODEL = nn.Module().eval()
"""The model of a `log`, which asks whether a training or an evaluation has ended."""
_THE_MODEL = frozenset({"model", "model_wrapped"})
_LIBRARY = f"{transformers.__path__[0]}{os.sep}"
_CALLS = weakref.WeakKeyDictionary[nn.Module, tuple[int, dict[str, bytes | None], list[ValueHolder]]]()
"""Calls of an override so far, and the contents and variables before the first, by the module of the step."""
_REMEDY = "write the TrainTask yourself (the page 'Bring a plain PyTorch loop' of the documentation)"
_INSTEAD = {"device": "read model.device", "is_in_train": "read model.training"}
"""Remedies for attributes of the accelerator and of `Trainer` that the model has as well."""


@dataclass(frozen=True, kw_only=True)
class OwnLoss:
    """Calls an overridden `compute_loss`, and an overridden `prediction_step` and `log` beside it.

    Args:
        method: `compute_loss`, bound to a `Trainer` without training.
        of_model: attributes that are the model.
        around_model: attributes that are modules around the model, without parameters or buffers of their own.
        counts: attributes that `compute_loss` sets, in a class with metrics.
        has_metrics: whether the class collects metrics in `_metrics`.
        has_prediction_step: whether `prediction_step` is overridden as well.
    """

    method: MethodType
    of_model: frozenset[str]
    around_model: frozenset[str]
    counts: frozenset[str]
    has_metrics: bool
    has_prediction_step: bool

    def __call__(self, module: nn.Module, batch: Mapping[str, Any], total: Tensor | None) -> Tensor:
        """Return the loss.

        Raises:
            TaskError: the override reads what a trial in the pool lacks, or changes what trials share.
        """
        loss: Tensor = self._called("compute_loss", module, batch, num_items_in_batch=total)[0]
        return loss

    def loss_and_outputs(
        self, module: nn.Module, batch: Mapping[str, Any], total: Tensor | None
    ) -> tuple[Tensor, Any, dict[str, Any]]:
        """Return the loss, the model's outputs, and the metrics of an evaluated batch; raises as the call."""
        arguments = {"return_outputs": True, "num_items_in_batch": total}
        (loss, outputs), metrics = self._called("compute_loss", module, batch, **arguments)
        return loss, outputs, metrics

    def predict(
        self, module: nn.Module, batch: Mapping[str, Any], *, loss_alone: bool, ignored: tuple[str, ...]
    ) -> tuple[Any, Any, Any, dict[str, Any]]:
        """Return loss, predictions, labels and metrics of an evaluated batch by `prediction_step`; raises as the call."""
        arguments = {"prediction_loss_only": loss_alone, "ignore_keys": list(ignored)}
        (loss, predictions, labels), metrics = self._called("prediction_step", module, batch, **arguments)
        return loss, predictions, labels, metrics

    def log(self, metrics: dict[str, Any], collected: Mapping[str, list[float]]) -> None:
        """Let `log` of the class add to the metrics of an evaluation what the class has collected; raises as the call."""
        owner = self._owner(_NO_MODEL, "log")
        owner._metrics[_EVALUATION].update(collected)  # noqa: SLF001 - the name in trl
        # Of the user's class, because `log` of the owner's own class does nothing.
        above: Any = super(type(owner), owner)
        above.log(metrics)

    def _called(
        self, name: str, module: nn.Module, batch: Mapping[str, Any], **arguments: Any
    ) -> tuple[Any, dict[str, Any]]:
        shared: Any = self.method.__self__
        num_calls, before, variables = _CALLS.get(module) or (0, _contents(shared), _variables(type(shared)))
        num_calls += 1
        _CALLS[module] = num_calls, before, variables
        owner = self._owner(module, name)
        names = set(vars(owner))
        around = (
            {}
            if num_calls & (num_calls - 1)
            else {name: _state_around(vars(owner)[name], owner.model) for name in self._losses_of(module)}
        )
        # A copy, because overrides take the labels out, and an evaluation reads them afterwards.
        inputs = copy.copy(batch)
        try:
            value = getattr(type(owner), name)(owner, owner.model, inputs, **arguments)
        except AttributeError as error:
            if error.obj is not inputs:
                raise
            # Stock, the batch of a tokenizer's collator is a `BatchEncoding`, which has its values as attributes, too.
            raise TaskError(
                f"{name} of {type(shared).__name__} reads inputs.{error.name}, and a batch in the pool is a dict without "
                "attributes of its own: read values by their keys, as inputs['labels'], and leave out inputs.to(), because "
                "the batch is on the model's device"
            ) from error
        # At the powers of two.
        now = _contents(shared) if num_calls & (num_calls - 1) == 0 else before
        changed = [name for name, content in now.items() if content != before.get(name)]
        # `functools.cached_property` writes past `__setattr__`.
        stateful = [name for name, state in around.items() if _state_around(vars(owner)[name], owner.model) != state]
        for attribute in (*changed, *stateful, *(set(vars(owner)) - names)):
            _refuse_write(owner, attribute)
        for variable in variables if num_calls & (num_calls - 1) == 0 else ():
            if (label := variable.change(by_step=True)) is not None and not _has_grown(variable):
                _refuse_change(owner, label)
        if any(isinstance(each, GatheredMetric) for each in (value if isinstance(value, tuple) else (value,))):
            raise TaskError(
                f"the loss of {type(shared).__name__} follows from accelerator.gather_for_metrics, which is for metrics: "
                f"compute the loss from the batch and the model, or {_REMEDY}"
            )
        return value, _evaluated(owner) if self.has_metrics else {}

    def _losses_of(self, module: nn.Module) -> list[str]:
        """Return the attributes that are modules around the model."""
        return [*self.around_model, *(module.losses if isinstance(module, ModelWithLosses) else ())]

    def _owner(self, module: nn.Module, method: str) -> Any:
        """Return a `self` of one call, because trials on several threads share the task."""
        shared: Any = self.method.__self__
        owner = object.__new__(type(shared))
        model, losses = (
            (module.model, dict(module.losses.items())) if isinstance(module, ModelWithLosses) else (module, {})
        )
        own = dict.fromkeys(self.of_model, model) | {name: GatheredMetric(None) for name in self.counts}
        own |= {name: placed(vars(shared)[name], model) for name in self.around_model}
        own |= {name: placed(loss, model) for name, loss in losses.items()}
        if self.has_metrics:
            own[_METRICS] = copy.deepcopy(vars(shared)[_METRICS])
        vars(owner).update(vars(shared) | own | {_METHOD: method})
        return owner


def own_loss_of(trainer: Trainer) -> OwnLoss | None:
    """Return the overridden `compute_loss` of a `Trainer`; None where the library's own computes and evaluates the loss."""
    kind = type(trainer)
    has_prediction_step = not _is_of_library(kind.prediction_step)
    if _is_of_library(kind.compute_loss) and not has_prediction_step:
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
    shared: Any = object.__new__(type(kind.__name__, (kind, _TrainerWithoutTraining), rules))
    vars(shared).update(settings | own | {"accelerator": _SingleProcessAccelerator()})
    losses = {name: loss for name, loss in losses_around(trainer).items() if name in own}
    vars(shared).update(losses)
    for name in (*of_model, *filter(lambda name: has_state(losses[name]), losses)):
        del vars(shared)[name]
    return OwnLoss(
        method=shared.compute_loss,
        of_model=_THE_MODEL | of_model,
        around_model=frozenset(losses).intersection(vars(shared)),
        counts=_set_by_loss(kind) & own.keys() if has_metrics(trainer) else frozenset(),
        has_metrics=has_metrics(trainer),
        has_prediction_step=has_prediction_step,
    )


def has_metrics(trainer: Trainer) -> bool:
    """Whether a `Trainer` collects metrics as those of trl: a mapping of lists for training, and one for evaluation."""
    metrics = vars(trainer).get(_METRICS)
    return isinstance(metrics, Mapping) and all(
        isinstance(metrics.get(mode), Mapping) for mode in (_TRAINING, _EVALUATION)
    )


def _is_of_library(function: Any) -> bool:
    # By the code's file: a script may have replaced the method of `Trainer` itself, and decorators copy names.
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(_LIBRARY)


def _evaluated(owner: Any) -> dict[str, Any]:
    """Return the known metrics that a call has collected for an evaluation: a tensor or a number each."""
    metrics: dict[str, Any] = {}
    for name, collected in owner._metrics[_EVALUATION].items():  # noqa: SLF001 - the name in trl
        values = [each.value if isinstance(each, GatheredMetric) else each for each in collected]
        if any(value is None for value in values):
            continue
        # In double precision, as Python's numbers, of which `log` makes the average.
        tensors = [value.detach().double() if isinstance(value, Tensor) else value for value in values]
        match tensors:
            case []:  # `log` meets the empty list as well
                metrics[name] = torch.empty(0, dtype=torch.float64)
            case [single]:
                metrics[name] = single
            case _:
                metrics[name] = torch.stack([*map(torch.as_tensor, tensors)])
    return metrics


def refused_attributes(trainer: Trainer) -> Iterator[str]:
    """Describe reasons why a loss of the user's own would read the one model or `Trainer` that is given up.

    The attributes and methods of the user's class count where `compute_loss` is overridden, otherwise `compute_loss_func`.
    """
    tensors = [*trainer.model.parameters(), *trainer.model.buffers()]
    parts = {id(part) for part in (*trainer.model.modules(), *tensors)}
    memory = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}

    def reaches(*values: object) -> bool:
        content = AttributeDigest()
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


class AttributeDigest(pickle.Pickler):
    """Digest of a value, and the objects that the value holds.

    Pickling walks through most objects. Tensors count by their identity and version, and functions by their identity.
    Models count by their identity, parameters and buffers, and generators by their identity and state. Of a function, the
    variables of its closure are walked through as well, and global variables that are a tensor, a model or a `Trainer`.
    `PythonStateUndo` would not do here: models of the library note settings on themselves at their first call, which
    would count as changes.

    `shared.py` takes digests of objects that trials share as well.

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
        """Note an object, and return what stands for the object in the digest; None: its parts."""
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
        # `PartialState` is one for the process: a Trainer that another thread makes changes its contents for a moment.
        is_known_by_identity = isinstance(value, Trainer | FunctionType | ModuleType | type | PartialState)
        return id(value) if is_known_by_identity else None

    def _tensor(self, tensor: Tensor) -> tuple[int, int]:
        self.objects.add(id(tensor))
        if tensor.layout is torch.strided:
            self.memory.add(tensor.untyped_storage().data_ptr())
        return id(tensor), tensor._version  # noqa: SLF001 - torch has no public name

    def _walk(self, value: object) -> None:
        # A walk of its own: a pickler cannot begin another within `dump`.
        content = AttributeDigest()
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
    return {
        name: AttributeDigest().note(value)
        for name, value in attributes.items()
        if name != "accelerator" and not isinstance(value, _UNCHANGED)
    }


def _variables(kind: type) -> list[ValueHolder]:
    """Return the places outside of `self` that functions of the user's own classes may read or change."""
    own = (base for base in kind.__mro__ if not base.__module__.startswith("transformers."))
    functions = {
        f"{base.__name__}.{name}": function
        for base in own
        for name, function in vars(base).items()
        if isinstance(function, FunctionType)
    }
    holders = walked(functions, None, keeps_tensors=False, is_lenient=True).holders
    # Libraries set variables of the environment at any time.
    return [holder for holder in holders if "the environment" not in holder.labels]


def _has_grown(holder: ValueHolder) -> bool:
    """Whether a dict has only got further keys, such as a cache that is filled when first read; notes the dict anew."""
    if not holder.is_mapping:
        return False
    before, values = holder.noted, holder.read()
    old, new = (dict(zip(each[: len(each) // 2], each[len(each) // 2 :], strict=True)) for each in (before, values))
    holder.noted = values
    return all(key in new and new[key] is value for key, value in old.items())


def _state_around(loss: nn.Module, model: nn.Module) -> list[object]:
    """Return the Python attributes and the buffers of a module around a model, without those of the model.

    Each call has a copy of the module, so a change would be lost.
    """
    inside = set(map(id, model.modules()))
    parts = [part for part in loss.modules() if id(part) not in inside]
    internals = vars(nn.Module()).keys()
    attributes = [
        (name, AttributeDigest().note(v)) for part in parts for name, v in vars(part).items() if name not in internals
    ]
    return [*attributes, *(id(buffer) for part in parts for buffer in part.buffers(recurse=False))]


def _names_of_library(kind: type) -> set[str]:
    """Names of the attributes that the library's own classes set on `self`."""
    return set().union(*(_names_set_by(base) for base in kind.__mro__ if base.__module__.startswith("transformers.")))


def _set_by_loss(kind: type) -> frozenset[str]:
    """Names of the attributes that `compute_loss` of the user's own classes sets on `self`."""
    own = (vars(base).get("compute_loss") for base in kind.__mro__ if not base.__module__.startswith("transformers."))
    return frozenset().union(*(_names_set_by(inspect.unwrap(function)) for function in own if function is not None))


@functools.cache
def _names_set_by(code: Any) -> frozenset[str]:
    try:
        source = textwrap.dedent(inspect.getsource(code))
    except OSError:  # typed in at a prompt
        return frozenset()
    nodes = ast.walk(ast.parse(source))
    stores = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return frozenset(node.attr for node in stores if ast.unparse(node.value) == "self")


class _TrainerWithoutTraining(Trainer):  # type: ignore[misc]  # to mypy the library is Any
    """Stands between the user's classes and `Trainer`, for calls of `super()` that need no training."""

    def log(self, logs: object, *_: Any, **__: Any) -> None:
        """Keep no log: a result's history has the reports."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs

    def compute_loss_context_manager(self) -> AbstractContextManager[object]:
        """Enter nothing: the pool has entered the precision."""
        return nullcontext()


class _SingleProcessAccelerator:
    """Stands in for the `Accelerator`, as far as losses ask: one process, and models without wrappers."""

    num_processes, process_index, is_main_process, is_local_main_process = 1, 0, True, True
    parallelism_config = None

    def unwrap_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        return model

    def gather_for_metrics(self, value: Any, *_: Any, **__: Any) -> GatheredMetric:
        if not isinstance(value, Tensor):
            raise TaskError(
                f"accelerator.gather_for_metrics is given a {type(value).__name__}, and a trial in the pool gathers tensors; "
                f"gather each tensor, or {_REMEDY}"
            )
        return GatheredMetric(value.detach())

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        remedy = _INSTEAD.get(name, _REMEDY)
        raise TaskError(f"compute_loss reads self.accelerator.{name}, which a trial in the pool lacks; {remedy}")


def _refuse_read(self: Any, name: str) -> NoReturn:
    # Python's own protocols, such as copying, ask for names that need not exist.
    if name.startswith("__") or name not in _names_of_library(type(self)):
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
    method = vars(self).get(_METHOD, "compute_loss")
    remedy = _INSTEAD.get(name, f"compute the loss from the batch, the model and settings, or {_REMEDY}")
    raise TaskError(f"{method} of {type(self).__name__} reads self.{name}, which a trial in the pool lacks: {remedy}")


def _refuse_write(self: Any, name: str, value: object = None) -> None:
    if isinstance(value, GatheredMetric):  # of this call's `self` alone
        vars(self)[name] = value
        return
    _refuse_change(self, f"self.{name}")


def _refuse_change(self: Any, place: str) -> NoReturn:
    method = vars(self).get(_METHOD, "compute_loss")
    raise TaskError(
        f"{method} of {type(self).__name__} changes {place}, which trials of a search would share and no checkpoint "
        f"holds: leave the change out, report by compute_metrics, or {_REMEDY}"
    )


def _leave_out(self: Any, logs: object, *_: Any, **__: Any) -> None:
    """Stand in for `Trainer.log`, which changes no number: a result's history has the reports."""
    del self, logs
