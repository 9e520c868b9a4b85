"""The optimizer and the scheduler of `configure_optimizers`, as factories of a task.

A trial's `configure_optimizers` runs once, when the pool asks for parameter groups. The groups then carry the optimizer
to the factory of optimizers, and the optimizer carries the scheduler to the factory of schedulers. `ConfiguredOptimizer` reads
the answer of a module, for `task.py` and for each trial. `task.py` makes the factories, and a trial calls the factories in
the order of groups, optimizer, scheduler.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import _configure_optimizers, _configure_schedulers_automatic_opt
from torch import nn
from torch.optim import Optimizer

from hydra_tune.errors import TaskError
from hydra_tune_lightning.errors import RefusedModuleError
from hydra_tune_lightning.options import TrainerOptions
from hydra_tune_lightning.trainer_stand_in import standing_in

_SCHEDULER = "_hydra_tune_lightning_scheduler"


@dataclass(frozen=True)
class ConfiguredOptimizer:
    """The answer of `configure_optimizers`.

    Attributes:
        optimizer: the only optimizer.
        config: scheduler, interval and monitor; None without a scheduler.
    """

    optimizer: Optimizer
    config: Any

    @classmethod
    def of(
        cls, module: LightningModule, options: TrainerOptions, batches: int, datamodule: Any
    ) -> "ConfiguredOptimizer":
        """Ask a module that is ready to train; an epoch has `batches` batches.

        Raises:
            RefusedModuleError: no optimizer or several, several schedulers, or an optimizer of a class that is not of torch.
        """
        # As `Trainer.estimated_stepping_batches`: the rest of an epoch makes a step of its own.
        steps = options.max_epochs * -(-batches // options.accumulate_grad_batches)
        known = {"datamodule": datamodule, "model": module, "num_training_batches": batches}
        with standing_in(module, options, "configure_optimizers", estimated_stepping_batches=steps, **known):
            answer = module.configure_optimizers()
            if answer is None:
                raise RefusedModuleError(["configure_optimizers returns None: return an optimizer"])
            optimizers, schedulers, monitor = _configure_optimizers(answer)
            configs = _configure_schedulers_automatic_opt(schedulers, monitor)
        if len(optimizers) != 1:
            remedy = "return one, with parameter groups"
            raise RefusedModuleError([f"configure_optimizers returns {len(optimizers)} optimizers: {remedy}"])
        if len(configs) > 1:
            remedy = "chain them, as in SequentialLR or ChainedScheduler"
            raise RefusedModuleError([f"configure_optimizers returns {len(configs)} schedulers: {remedy}"])
        if not isinstance(optimizers[0], Optimizer):
            kind = type(optimizers[0]).__name__
            raise RefusedModuleError([f"{kind} is not a torch.optim.Optimizer: return an optimizer of torch's classes"])
        return cls(optimizers[0], configs[0] if configs else None)

    def refusals(self) -> Iterator[str]:
        """Describe what the pool would not do as Lightning, each with the remedy."""
        optimizer, config = self.optimizer, self.config
        if isinstance(optimizer, torch.optim.LBFGS):
            yield "LBFGS, which calls training_step several times in a step: use another optimizer"
        if config is None:
            return
        if config.frequency != 1:
            yield f"a scheduler with frequency={config.frequency}: scale the schedule, and leave frequency out"
        if config.reduce_on_plateau and config.interval != "epoch":
            yield "a ReduceLROnPlateau with interval='step': use interval='epoch'"
        if config.reduce_on_plateau and not isinstance(config.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            yield "reduce_on_plateau=True for another scheduler than ReduceLROnPlateau: use ReduceLROnPlateau"


class _ParameterGroups(list[Any]):
    """Parameter groups with the optimizer made by the module for these groups."""

    configured: ConfiguredOptimizer


@dataclass(frozen=True)
class ConfigureModule:
    """Asks a trial's module for its optimizer, and returns the parameter groups."""

    options: TrainerOptions
    batches: int
    datamodule: Any

    def __call__(self, module: nn.Module) -> list[Any]:
        """Return the groups, for `TakeOptimizer`."""
        assert isinstance(module, LightningModule)
        configured = ConfiguredOptimizer.of(module, self.options, self.batches, self.datamodule)
        if configured.config is not None:
            _watch_schedule(configured.config.scheduler, module, self.options)
        groups = _ParameterGroups(configured.optimizer.param_groups)
        groups.configured = configured
        return groups


@dataclass(frozen=True)
class TakeOptimizer:
    """Takes the optimizer from the groups of `ConfigureModule`.

    Args:
        max_value: limit for the values of gradients, which the optimizer clips before each step; None: no such clipping.
    """

    max_value: float | None

    def __call__(self, groups: Any) -> Optimizer:
        """Return the optimizer."""
        if not isinstance(groups, _ParameterGroups):
            raise TaskError(
                "the parameters of the module have been replaced (split_operators=), and configure_optimizers has made the "
                "optimizer for the module's own; leave split_operators out"
            )
        optimizer, config = groups.configured.optimizer, groups.configured.config
        if self.max_value is not None:
            _clip_by_value(optimizer, self.max_value)
        if config is not None:
            vars(optimizer)[_SCHEDULER] = config.scheduler
        return optimizer


def _watch_schedule(scheduler: Any, module: LightningModule, options: TrainerOptions) -> None:
    """Have functions of a schedule that hold the module find the stand-in: there is no epoch and no step to read.

    Found are methods of the module, functions with the module or such a method in their closure, and partial ones of these.
    """
    for part in getattr(scheduler, "_schedulers", ()):
        _watch_schedule(part, module, options)
    functions = getattr(scheduler, "lr_lambdas", None)
    if isinstance(functions, list):
        functions[:] = [_watched(each, module, options) if _holds(each, module) else each for each in functions]


def _holds(function: Any, module: LightningModule) -> bool:
    if isinstance(function, MethodType):
        return function.__self__ is module
    if isinstance(function, functools.partial):
        return any(
            each is module or _holds(each, module)
            for each in (function.func, *function.args, *function.keywords.values())
        )
    # An object keeps its state in the scheduler's, so the object stays as it is.
    cells = (isinstance(function, FunctionType) and function.__closure__) or ()
    held: list[Any] = []
    for cell in cells:
        with suppress(ValueError):  # of a variable without a value
            held.append(cell.cell_contents)
    return any(each is module or (not isinstance(each, FunctionType) and _holds(each, module)) for each in held)


def _watched(
    function: Callable[[int], float], module: LightningModule, options: TrainerOptions
) -> Callable[[int], float]:
    def factor(step: int) -> float:
        with standing_in(module, options, "lr_scheduler_step"):
            return function(step)

    return factor


def take_scheduler(optimizer: Optimizer) -> Any:
    """Return the module's scheduler for the optimizer of `TakeOptimizer`."""
    return vars(optimizer).pop(_SCHEDULER)


def _clip_by_value(optimizer: Optimizer, max_value: float) -> None:
    """Make an optimizer clip gradients by value at the beginning of each step."""
    scheduled_step = vars(optimizer).pop("step", None)
    kind = _clipping(type(optimizer), max_value)  # type: ignore[arg-type]  # classes are hashable
    optimizer.__class__ = kind
    if scheduled_step is None:
        return

    reference: weakref.ref[Any] = weakref.ref(optimizer)  # as in the scheduler's own wrapper

    # A scheduler has put a wrapper of the class's own step on the object, and looks whether the wrapper has been called.
    @functools.wraps(kind.step)
    def step(*arguments: Any, **options: Any) -> Any:
        reference()._opt_called = True  # type: ignore[union-attr]  # noqa: SLF001 - the scheduler's mark
        return kind.step(reference(), *arguments, **options)  # type: ignore[arg-type]  # it is the caller's

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # noqa: SLF001 - the scheduler's mark
    vars(optimizer)["step"] = step


@functools.cache
def _clipping(kind: type[Optimizer], max_value: float) -> type[Optimizer]:
    """Return a class of optimizers with clipping by value; all trials share the class, so that trials can be compared."""

    class ValueClipping(kind):  # type: ignore[valid-type, misc]
        def step(self, closure: Any = None) -> Any:
            parameters = [p for group in self.param_groups for p in group["params"]]
            nn.utils.clip_grad_value_(parameters, max_value)
            return super().step(closure)

    ValueClipping.__name__ = ValueClipping.__qualname__ = f"{kind.__name__}ClippedByValue"
    return ValueClipping
