"""A stand-in for the `Trainer`, found by a module's code as `self.trainer`; `self.log` works through the stand-in.

The stand-in has the attributes whose values are right in every trial. Any other attribute is refused by name: a
`self.current_epoch` without a trainer would be 0 for ever. `standing_in` attaches the stand-in while code of the module
runs, because copies of a `LightningModule` lose their trainer. `task.py`, `step.py`, `optimizer.py` and `validation_end.py`
enter `standing_in` around the hooks and the schedules of the module. Loaders run code of the module, too, so `task.py` leaves
a stand-in attached to the module of the loaders (`attach_for_good`). A datamodule keeps the `stand_in` that `task.py` gives.

Note: after the block of `standing_in` the module must be as before, or a checkpoint, a comparison of steps and the result
would have the trainer.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

from hydra_tune.errors import TaskError
from hydra_tune_lightning.options import NUMERIC, TrainerOptions

_ALWAYS: dict[str, Any] = {
    "max_steps": -1,
    "world_size": 1,
    "num_nodes": 1,
    "num_devices": 1,
    "global_rank": 0,
    "local_rank": 0,
    "node_rank": 0,
    "is_global_zero": True,
    "sanity_checking": False,
    "testing": False,
    "predicting": False,
    "fast_dev_run": False,
    "barebones": False,
    "progress_bar_callback": None,
}
_LOGGER = DummyLogger()
_BEFORE_TRAINING = {"current_epoch": 0, "global_step": 0}
# `self.log` caches the ids of metrics in `_metric_attributes`; in a copy of the module the metrics have other ids.
_SAVED = ("_trainer", "_current_fx_name", "_metric_attributes", "_device")


class TrainerStandIn:
    """Answers questions for attributes, and refuses other attributes of `path`, in words of the module's code."""

    def __init__(self, path: str, **attributes: Any) -> None:
        vars(self).update(attributes, _path=path)

    def __getattr__(self, name: str) -> Any:
        # A deep copy looks for `__deepcopy__` and expects an AttributeError from an object without the method.
        if name.startswith("__"):
            raise AttributeError(name)
        raise TaskError(
            f"the module reads {self._path}.{name}, which no trial of a pool knows at that place; pass the value to the "
            "module's constructor, or leave the reading out"
        )


def _as_is(tensor: Any, *_arguments: Any, **_options: Any) -> Any:
    """Return a value of all processes: a pool has a single process."""
    return tensor


class _NothingToReset:
    """Stands in for the connector of loggers: each step's results are new."""

    def should_reset_tensors(self, _name: str) -> bool:
        return False


def stand_in(options: TrainerOptions, hook: str | None, **attributes: Any) -> TrainerStandIn:
    """Return a stand-in for the `Trainer` of some options, with further attributes.

    Args:
        options: options of the `Trainer`.
        hook: method of the module that runs; None: code that runs at any time, in training or validation.
        **attributes: further attributes.
    """
    known = _ALWAYS | {name: getattr(options, name) for name in NUMERIC} | attributes
    known |= {"logger": _LOGGER, "loggers": [_LOGGER]} if options.has_logger else {"logger": None, "loggers": []}
    if hook is None:
        return TrainerStandIn("self.trainer", **known)
    known |= {"training": hook == "training_step", "validating": hook in ("validation_step", "on_validation_epoch_end")}
    return TrainerStandIn("self.trainer", **(known if hook.endswith(("_step", "_end")) else _BEFORE_TRAINING | known))


def attach_for_good(module: nn.Module, options: TrainerOptions) -> None:
    """Attach a stand-in to a module that nobody trains: code that loaders call finds no epoch and no step."""
    trainer = stand_in(options, None)
    for part in module.modules():
        if isinstance(part, LightningModule):
            vars(part)["_trainer"] = trainer


@functools.cache
def _casts_once() -> bool:
    """Whether mixed precision casts a twice-used weight only once, which changes the sum of the gradients.

    Lightning 2.4 does, and 2.6 does not.
    """
    return bool(MixedPrecision("bf16-mixed", "cpu").autocast_context_manager()._cache_enabled)  # noqa: SLF001


@contextmanager
def standing_in(
    module: nn.Module, options: TrainerOptions, hook: str, results: Any = None, **attributes: Any
) -> Iterator[None]:
    """Attach a stand-in to a module, and to its parts that are `LightningModule`s, and take the stand-in away again.

    Args:
        module: the module whose code is going to run.
        options: options of the `Trainer`.
        hook: name of the method that runs.
        results: object whose `log` gets the values of `self.log`.
        **attributes: further attributes of the stand-in.
    """
    trainer = stand_in(
        options,
        hook,
        strategy=TrainerStandIn("self.trainer.strategy", reduce=_as_is, all_gather=_as_is),
        _results=results,
        _logger_connector=_NothingToReset(),
        _accelerator_connector=TrainerStandIn("self.trainer._accelerator_connector", is_distributed=False),
        **attributes,
    )
    parts = [part for part in module.modules() if isinstance(part, LightningModule)]
    has_cache = torch.is_autocast_cache_enabled()
    before = [{name: vars(part)[name] for name in _SAVED} for part in parts]
    # The pool moves tensors without telling the module.
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    # Not by assignment, which would wrap the trainer in a weak reference.
    for part in parts:
        vars(part).update(_trainer=trainer, _current_fx_name=hook, _device=device)
    torch.set_autocast_cache_enabled(has_cache and _casts_once())
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(has_cache)
        for part, saved in zip(parts, before, strict=True):
            vars(part).update(saved)
