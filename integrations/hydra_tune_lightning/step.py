"""The `training_step` and the `validation_step` of a `LightningModule`, as functions of a task.

Both hold only options, flags, names, a number and an identity, so that a trial cut into shards has little to compare before
each step, and trials with equal steps may be fused. `epoch_values.py` makes metrics of the values logged by a validation,
and `train_logs.py` keeps the values logged by a training. `task.py` makes the functions. The pool and `hydra_tune.train_plain`
call `LightningStep` for the batches of a training, and `LightningEvaluation` for the batches of a validation. Where there is
no validation, `LogsAlone` hands over the `train_logs`.

Note: a captured step does not run this code for each batch. So a step must not count batches in Python; `TrainLogs` counts
in a tensor.
"""

import dis
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from hydra_tune.errors import MetricError, TaskError
from hydra_tune_lightning.epoch_values import LoggedValue, StepLogs, metrics_of, new_metrics, states_of
from hydra_tune_lightning.options import TrainerOptions
from hydra_tune_lightning.train_logs import TrainLogs
from hydra_tune_lightning.trainer_stand_in import standing_in
from hydra_tune_lightning.validation_end import appended, states_alone

# By task, the metrics that steps of training have updated: a step that is cut runs on a twin.
_TRAINED_METRICS: WeakIdKeyDictionary = WeakIdKeyDictionary()
# By task, the metrics whose updates have been seen to add up.
_TRIED_METRICS: WeakIdKeyDictionary = WeakIdKeyDictionary()
_VARIADIC = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


def takes_number(method: Any) -> bool:
    """Whether a step of a module takes a `batch_idx` beside the batch."""
    return bool(is_param_in_hook_signature(method, "batch_idx", min_args=2))


def reads_number(method: Any) -> bool:
    """Whether a step of a module reads its `batch_idx`."""
    if not takes_number(method):
        return False
    names = [*inspect.signature(method).parameters]
    if names[1:] == []:
        return True  # all arguments in one
    name = names[1]
    functions = [getattr(method, "__func__", method)]
    while hasattr(functions[-1], "__wrapped__"):
        functions.append(functions[-1].__wrapped__)
    return any(_reads(function, name) for function in functions)


def _reads(function: Any, name: str) -> bool:
    """Whether a function, or one of its decorators, reads an argument."""
    code = getattr(function, "__code__", None)
    # A callable without Python code, such as a partial, does not show the names read inside.
    if code is None:
        return True
    if code.co_flags & _VARIADIC:
        # Decorators of torch, such as `no_grad()`, pass all arguments on; `wraps` copies the name of the module.
        return not function.__globals__.get("__name__", "").startswith("torch.")
    # An argument of a nested function is a cell, and `locals()` reads all.
    return name in code.co_cellvars or name in _loaded(code) or "locals" in code.co_names


def _loaded(code: Any) -> set[str]:
    loaded: set[str] = set()
    for instruction in dis.get_instructions(code):
        if "LOAD_FAST" in instruction.opname:
            # From Python 3.13 on an instruction may load two variables, and then has both names.
            loaded |= {instruction.argval} if isinstance(instruction.argval, str) else set(instruction.argval)
    return loaded


class TaskIdentity:
    """Tells the steps of one task from those of others, and equals all others, so that steps of two tasks may be fused."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TaskIdentity)

    def __hash__(self) -> int:
        return hash(TaskIdentity)

    def __deepcopy__(self, memo: object) -> Self:
        return self


@dataclass(frozen=True, kw_only=True)
class _ModuleStep:
    """The arguments for a step of a module.

    Args:
        task: identity of the task, the same object in all steps of the task.
        is_numbered: whether batches come with their numbers.
        takes_number: whether the method takes a number.
        logs: keeps values that `training_step` logs; None: none are kept.
    """

    task: TaskIdentity
    options: TrainerOptions
    is_numbered: bool
    takes_number: bool
    logs: TrainLogs | None

    def arguments(self, batch: Any) -> tuple[Any, ...]:
        """Return the arguments of the method: the batch, and a number if the method takes one."""
        # A step that never reads the number gets 0, and the loader stays as given.
        batch, number = batch if self.is_numbered else (batch, 0)
        return (batch, number) if self.takes_number else (batch,)

    def tried_metrics(self, module: nn.Module, *, is_read: bool = True) -> set[str]:
        """Return the places of the metrics whose updates need no trial; all, unless the states of metrics are read."""
        if not is_read:
            return {*metrics_of(module)}
        tried: set[str] = _TRIED_METRICS.setdefault(self.task, set())  # type: ignore[no-untyped-call]
        return tried


@dataclass(frozen=True, kw_only=True)
class LightningStep(_ModuleStep):
    """Calls `training_step`.

    Args:
        watched: names that a callback or a scheduler monitors.
    """

    watched: tuple[str, ...]

    def __call__(self, module: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch; of the module's logged values, the `logs` are kept."""
        assert isinstance(module, LightningModule)
        arguments = self.arguments(batch)
        logged = StepLogs(arguments[0], () if self.logs is None else self.logs.names, self.watched)
        with (
            standing_in(module, self.options, "training_step", logged),
            new_metrics(module, self.tried_metrics(module, is_read=self.logs is not None)) as metrics,
            states_alone(metrics, {} if self.logs is None else logged.metrics),
        ):
            output = module.training_step(*arguments)
            # Within the block, because the end of the block takes the states of this batch away.
            if self.logs is not None:
                self.logs.add(module, logged, metrics)
            trained = _TRAINED_METRICS.setdefault(self.task, set())  # type: ignore[no-untyped-call]
            trained.update(name for name, metric in metrics.items() if metric.update_count)
        loss: Any = output.get("loss") if isinstance(output, Mapping) else output
        if loss is None:
            kind = "a dict without 'loss'" if isinstance(output, Mapping) else "None"
            raise TaskError(f"training_step returned {kind}; return the loss of every batch, or {{'loss': loss}}")
        return loss  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class LightningEvaluation(_ModuleStep):
    """Calls `validation_step`.

    Args:
        has_end: whether `on_validation_epoch_end` follows the last batch.
    """

    has_end: bool

    def __call__(self, module: nn.Module, batch: Any) -> dict[str, Any]:
        """Return the logged values of a batch, the states of metrics, and the values that `logs` and the hook need."""
        assert isinstance(module, LightningModule)
        arguments = self.arguments(batch)
        logged = StepLogs(arguments[0])
        with (
            standing_in(module, self.options, "validation_step", logged),
            new_metrics(module, self.tried_metrics(module)) as metrics,
            states_alone(metrics, metrics),
            appended(module, is_wanted=self.has_end) as items,
        ):
            module.validation_step(*arguments)
            # Also metrics that another batch logs, or the hook reads.
            places: dict[str, list[LoggedValue]] = {name: [] for name in metrics if metrics[name].update_count}
            places |= logged.metrics
            read = places if self.has_end else logged.metrics
            trained = _TRAINED_METRICS.get(self.task, set())  # type: ignore[no-untyped-call]
            shared = sorted(trained.intersection(read))
            if shared:
                raise MetricError(
                    f"training_step and validation_step share the metric {shared[0]!r}, whose states Lightning mixes; make two "
                    "metrics"
                )
            trained_values = {} if self.logs is None else self.logs.read(module)
            values = logged.values | states_of(metrics, places) | trained_values
        return values | items


@dataclass(frozen=True)
class LogsAlone:
    """Evaluates nothing, where there is no validation, and reports the logged values of the training."""

    logs: TrainLogs

    def __call__(self, module: nn.Module, _batch: Any) -> dict[str, Any]:
        """Return the values."""
        return self.logs.read(module)


def one_batch() -> list[Tensor]:
    """Return the data of `LogsAlone`."""
    return [torch.zeros(1)]
