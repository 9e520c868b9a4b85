"""The callbacks of a `Trainer`: some are taken over, some change no number, and all others are refused by name.

`task_from_lightning` (`task.py`) asks `Callbacks.of` first. With an `EarlyStopping`, the `stop` of the task is a
`CallbackStop`, which the pool and `hydra_tune.train_plain` call after each report. `task.py` reads `monitor`, `watched` and
the functions for monitored names, and `options.py` warns of options with `NOT_WRITTEN`. The callbacks belong to the user
and serve all trials of a task, in several threads: no call may change a callback.
"""

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import callbacks as stock
from torch import Tensor

from hydra_tune.errors import MetricError
from hydra_tune.task import reported_names
from hydra_tune_lightning.errors import RefusedModuleError

_LOGGER = logging.getLogger(__name__)

WITHOUT_EFFECT: tuple[type, ...] = (stock.ProgressBar, stock.ModelSummary)
"""Callbacks that only show something; derived classes are taken for the same, and are never called."""

NOT_WRITTEN = {
    "ModelCheckpoint": "save_checkpoint(result, path) writes the trained weights, and keep_best= of a study keeps the best",
    "OnExceptionCheckpoint": "HydraExecutor(checkpoint_dir=...) saves trials that resume",
    "LearningRateMonitor": "a result's history has all reports",
    "DeviceStatsMonitor": "a pool's stats() and hydra-tune trace show the devices",
    "ThroughputMonitor": "a pool's stats() and hydra-tune trace show the devices",
    "logger": "a result's history has all reports",
    "enable_checkpointing": "save_checkpoint(result, path) writes the trained weights, and HydraExecutor(checkpoint_dir=...) "
    "saves trials that resume",
}
"""Callbacks and options that write files or logs and change no number: a warning says so, with these words."""

_REMEDIES = {
    "Timer": "give max_epochs",
    "StochasticWeightAveraging": "after_step= of the task may average weights",
    "EMAWeightAveraging": "after_step= of the task may average weights",
    "WeightAveraging": "after_step= of the task may average weights",
    "GradientAccumulationScheduler": "give accumulate_grad_batches",
    "LearningRateFinder": "search for the rate",
    "BatchSizeFinder": "search for the batch size",
}


def reported(name: str) -> str:
    """Return the name of a logged value in a report."""
    return next(iter(reported_names({name: 0.0})))


def is_kept(monitor: str, train_logs: Sequence[str]) -> bool:
    """Whether a monitored name is one of `train_logs`, or the `_step` or `_epoch` of one."""
    return monitor in train_logs or logged_name(monitor) in train_logs


def logged_name(monitor: str) -> str:
    """Return the name given to `self.log` for a monitored name."""
    return monitor.removesuffix("_epoch").removesuffix("_step")


def remedy(monitor: str) -> str:
    """Return the advice for a monitored name of the training without a report."""
    return f"give train_logs=[{logged_name(monitor)!r}]"


def warn_not_written(name: str) -> None:
    """Log that a callback or an option writes nothing in a pool."""
    _LOGGER.warning("the pool trains without %s of the Trainer: %s", name, NOT_WRITTEN[name])


@dataclass(frozen=True)
class CallbackStop:
    """Ends a training as `EarlyStopping` does, by the code of the callbacks themselves, on new copies at each call."""

    callbacks: tuple[stock.EarlyStopping, ...]

    def __call__(self, history: Sequence[Mapping[str, float]]) -> bool:
        """Whether the training ends after the last report of its history.

        Raises:
            MetricError: the first report has no value of the name that a callback with `strict=True` monitors.
        """
        # Copies, because a callback counts, and each call goes through the whole history from the first report.
        return any([_stops(copy.deepcopy(callback), history) for callback in self.callbacks])  # noqa: C419 - each raises


def _stops(callback: stock.EarlyStopping, history: Sequence[Mapping[str, float]]) -> bool:
    stops, name, last = False, reported(callback.monitor), None
    for entry in history:
        last = entry.get(name, last)  # Lightning keeps a value until the next
        if last is not None:
            stops, _ = callback._evaluate_stopping_criteria(_tensor(last))  # noqa: SLF001 - no public name
        elif callback.strict:
            raise MetricError(
                f"EarlyStopping monitors {callback.monitor!r}, and a report has {', '.join(entry)}; log the value in "
                "validation_step with on_epoch, or name a value of training_step in train_logs="
            )
    return stops


def _tensor(value: float) -> Tensor:
    """Return the tensor that Lightning would have: of float32, unless a metric has computed more digits."""
    tensor = torch.tensor(value)
    return tensor if tensor.item() == value or value != value else torch.tensor(value, dtype=torch.float64)  # noqa: PLR0124


@dataclass(frozen=True)
class Callbacks:
    """The parts of a task that the callbacks of a `Trainer` become.

    Attributes:
        stop: ends a training early; None: none does.
        monitor: name monitored by the first callback that monitors a name; None: no callback does.
        watched: names whose values end the training.
    """

    stop: CallbackStop | None
    monitor: str | None
    watched: tuple[str, ...]

    @classmethod
    def of(cls, given: Any, train_logs: Sequence[str]) -> "Callbacks":
        """Take the `callbacks` of a `Trainer` over, and warn of callbacks that write files.

        Raises:
            RefusedModuleError: the pool would not call a callback, or a callback monitors a value missing from reports.
        """
        callbacks = [given] if isinstance(given, stock.Callback) else [*(given or ())]
        if reasons := [reason for callback in callbacks for reason in _refusals(callback, train_logs)]:
            raise RefusedModuleError(reasons)
        for callback in callbacks:
            if type(callback).__name__ in NOT_WRITTEN:
                warn_not_written(type(callback).__name__)
        stops = tuple(callback for callback in callbacks if isinstance(callback, stock.EarlyStopping))
        monitors = [callback.monitor for callback in callbacks if getattr(callback, "monitor", None)]
        watched = tuple(callback.monitor for callback in stops)
        return cls(CallbackStop(stops) if stops else None, monitors[0] if monitors else None, watched)


def _refusals(callback: Any, train_logs: Sequence[str]) -> Iterator[str]:
    kind, name = type(callback), type(callback).__name__
    # Not a subclass, whose further methods the pool would not call.
    if kind is stock.EarlyStopping:
        is_of_training = is_kept(callback.monitor, train_logs)
        if callback.monitor.startswith("train") and not is_of_training:
            yield f"EarlyStopping monitors {callback.monitor!r} of training_step: {remedy(callback.monitor)}"
        if is_of_training and callback._check_on_train_epoch_end is False:  # noqa: SLF001 - no public name
            yield (
                f"EarlyStopping monitors {callback.monitor!r} of training_step with check_on_train_epoch_end=False, before the "
                "epoch's value is there: leave check_on_train_epoch_end out"
            )
    elif not isinstance(callback, WITHOUT_EFFECT) and not (kind is getattr(stock, name, None) and name in NOT_WRITTEN):
        otherwise = "call its work on result.module() or result.history after the training"
        yield f"the callback {name}, which the pool would not call: {_REMEDIES.get(name, otherwise)}"
