"""`task_from_lightning`: the training of a `LightningModule` as a `TrainTask`.

`task_from_lightning` makes a module, reads the module and gives the module up: each trial makes another. The task keeps the
options, the data and the factories. Read `_task_of` first, for the place of each part: `data.py` for the batches, `step.py`
for a step, `optimizer.py`, `epoch_values.py`. `refusals.py`, `options.py` and `callbacks.py` have most of the refusals;
`data.py`, `optimizer.py`, `epoch_values.py` and this module refuse the rest. People import `task_from_lightning` and
`save_checkpoint`, the way back, from `hydra_tune_lightning`.

Note: order and streams. A trial's module is built, prepared and set up in Lightning's order, from the position of the
random streams that Lightning would have; a draw more or less changes numbers. `_ModuleFactory` runs in threads of the
pool, and must leave the objects of other trials alone.
"""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from hydra_tune import TrainTask
from hydra_tune.train.building import own_build
from hydra_tune.train.own_copy import mark_seen, own_copy
from hydra_tune.train.rng.rng_streams import RandomStreams
from hydra_tune.train.rng.stream_state import StreamState
from hydra_tune_lightning.callbacks import Callbacks, is_kept, remedy, reported
from hydra_tune_lightning.data import loader_from, source_of
from hydra_tune_lightning.epoch_values import EpochValues, metrics_of
from hydra_tune_lightning.errors import RefusedModuleError
from hydra_tune_lightning.optimizer import ConfiguredOptimizer, ConfigureModule, TakeOptimizer, take_scheduler
from hydra_tune_lightning.options import PRECISIONS, TrainerOptions, checked
from hydra_tune_lightning.refusals import datamodule_refusals, does_nothing, module_refusals, refusals
from hydra_tune_lightning.step import (
    LightningEvaluation,
    LightningStep,
    LogsAlone,
    TaskIdentity,
    one_batch,
    reads_number,
    takes_number,
)
from hydra_tune_lightning.train_logs import TrainLogs
from hydra_tune_lightning.trainer_stand_in import attach_for_good, stand_in, standing_in
from hydra_tune_lightning.validation_end import HOOK, ValidationEnd, without_weights

TRIED = ("2.3", "2.4", "2.5", "2.6")
"""Versions of Lightning with which the numbers have been compared."""

_LOGGER = logging.getLogger(__name__)
# Weak, and by identity: a copy of a trial's module begins another trial.
_SEEN_MODULES: WeakIdKeyDictionary = WeakIdKeyDictionary()


def task_from_lightning(
    make_module: Callable[[], LightningModule],
    *,
    datamodule: LightningDataModule | None = None,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    seed: int | None = 0,
    metric: str | tuple[str, ...] | None = None,
    train_logs: str | Sequence[str] = (),
    **trainer_options: Any,
) -> TrainTask:
    """Describe the training of a `LightningModule` as a task, whose numbers are those of `Trainer.fit()` on a CPU.

    The reference is `seed_everything(seed)`, then the module, then `Trainer(**trainer_options).fit(module, datamodule)`.
    Each epoch reports the values that `validation_step` logs with `on_epoch`: `val_loss` as `val_loss`, `acc` as `val_acc`.
    Of the values that `training_step` logs, the `train_logs` are reported, as in `Trainer.callback_metrics`. Without a name
    `train_loss` there, `train_loss` is the mean of the losses.

    Args:
        make_module: builds the module; called once here, and again whenever a trial is built, in a thread of the pool.
        datamodule: as for `fit`; `prepare_data` and `setup("fit")` are called once, here.
        train_dataloaders: as for `fit`; one `DataLoader`.
        val_dataloaders: as for `fit`; one `DataLoader`.
        seed: seeds the trial's random streams; None: the streams go on from the present position of the process, as after a
            `seed_everything` and a `random_split` of a script.
        metric: the tuner's metric, as reported; default: the monitor of a `ReduceLROnPlateau` or of a callback, else
            `val_loss`, or `train_loss` without validation.
        train_logs: names that `training_step` logs and that are reported.
        trainer_options: as for `Trainer`, with `max_epochs`.

    Returns:
        The task. Change settings that a `Trainer` does not have with `dataclasses.replace(task, activations=...)`.

    Raises:
        RefusedModuleError: the module, its data or an option would not be trained exactly; the message has the reasons.
        TaskError: an option that `Trainer` does not have, or no `max_epochs`.
    """
    train_logs = (train_logs,) if isinstance(train_logs, str) else tuple(train_logs)
    callbacks = Callbacks.of(trainer_options.pop("callbacks", None), train_logs)
    options = checked(trainer_options)
    _warn_of_version()
    if isinstance(make_module, nn.Module):
        reason = f"make_module is a {type(make_module).__name__}, and each trial needs a module of its own"
        raise RefusedModuleError([f"{reason}: give the class, or a function that builds the module"])
    if isinstance(train_dataloaders, LightningDataModule):  # as `fit` takes either in one place
        datamodule, train_dataloaders = train_dataloaders, None
    if datamodule is not None and (reasons := [*datamodule_refusals(datamodule)]):
        raise RefusedModuleError(reasons)
    # Before `RandomStreams`, which puts other streams in the place of those of the process.
    start = StreamState.now() if seed is None else None
    with RandomStreams(seed or 0).everything():
        if start is not None:
            start.restore()
        module = _built(make_module)
        if reasons := [*refusals(module)]:
            raise RefusedModuleError(reasons)
        mark_seen(module)
        factory = _ModuleFactory(make_module, options, datamodule, _set_up(module, datamodule, options), start)
        sources = (
            source_of("train_dataloader", train_dataloaders, datamodule, module),
            source_of("val_dataloader", val_dataloaders, datamodule, module),
        )
        return _task_of(module, factory, options, sources, metric, train_logs, seed or 0, callbacks)


def save_checkpoint(result: Any, path: str | Path) -> None:
    """Write the trained weights of a result to a file that `load_from_checkpoint` of the module's class reads.

    The file has the weights and the saved hyperparameters, and no state of optimizers and loops for `fit(ckpt_path=...)`.

    Args:
        result: a pool's `Result` of a task, or the `PlainResult` of `hydra_tune.train_plain`.
        path: path of the file.

    Raises:
        HydraTuneError: the run has left no weights.
    """
    module = result.module()
    checkpoint = {"pytorch-lightning_version": lightning.__version__, "state_dict": module.state_dict()}
    if module.hparams:
        checkpoint[module.CHECKPOINT_HYPER_PARAMS_NAME] = module._hparams_name  # noqa: SLF001 - no public name
        checkpoint[module.CHECKPOINT_HYPER_PARAMS_KEY] = dict(module.hparams)
    # Last, as in Lightning: the hook may change any entry.
    module.on_save_checkpoint(checkpoint)
    torch.save(checkpoint, path)


def _warn_of_version() -> None:
    if not lightning.__version__.startswith(tuple(f"{version}." for version in TRIED)):
        _LOGGER.warning(
            "the numbers of a LightningModule have been compared with lightning %s, and %s is installed; compare a trial with "
            "Trainer.fit()", ", ".join(TRIED), lightning.__version__,
        )  # fmt: skip


def _built(make_module: Callable[[], Any]) -> LightningModule:
    with own_build():
        module = make_module()
    if isinstance(module, LightningModule):
        if module in _SEEN_MODULES:
            raise RefusedModuleError(
                ["make_module returned a module that a trial has had: build a new one at each call"]
            )
        _SEEN_MODULES[module] = True
        return module
    kind = type(module)
    name = f"{kind.__module__.partition('.')[0]}'s {kind.__name__}"
    if any(base.__module__.startswith("pytorch_lightning.") for base in kind.__mro__):
        raise RefusedModuleError(
            [f"make_module returned a module of pytorch_lightning ({name}): import lightning.pytorch"]
        )
    raise RefusedModuleError([f"make_module returned {name}: return a lightning.pytorch.LightningModule"])


@dataclass(frozen=True)
class _ModuleFactory:
    """Builds a trial's module, ready to train.

    Args:
        streams: position of the random streams when a module is set up, after the datamodule.
        start: position of the streams when a module is built; None: the trial's own.
        logs: keeps values that `training_step` logs; None: none are kept.
    """

    make_module: Callable[[], LightningModule]
    options: TrainerOptions
    datamodule: LightningDataModule | None
    streams: StreamState
    start: StreamState | None = None
    logs: TrainLogs | None = None

    def __call__(self) -> LightningModule:
        """Build the module; the streams go on as after the datamodule's setup."""
        if self.start is not None:
            self.start.restore()
        module = own_copy(_built(self.make_module))
        _prepare_module_data(module, self.options)
        self.streams.restore()
        _set_up_module(module, self.options, self.datamodule)
        module = own_copy(module, is_own=True)  # the setup may have thawed shared parameters
        if self.logs is not None:
            self.logs.prepare(module)
        return module


def _set_up(module: LightningModule, datamodule: LightningDataModule | None, options: TrainerOptions) -> StreamState:
    """Prepare data and module in Lightning's order; return the position of the streams before the module's setup."""
    if datamodule is not None:
        datamodule.trainer = stand_in(options, "setup")
        datamodule.prepare_data()
    _prepare_module_data(module, options)
    if datamodule is not None:
        datamodule.setup("fit")
    streams = StreamState.now()
    _set_up_module(module, options, datamodule)
    return streams


def _prepare_module_data(module: LightningModule, options: TrainerOptions) -> None:
    with standing_in(module, options, "prepare_data"):
        module.prepare_data()


def _set_up_module(module: LightningModule, options: TrainerOptions, datamodule: Any) -> None:
    with standing_in(module, options, "setup", datamodule=datamodule, model=module):
        module.setup("fit")
        module.configure_model()


def _task_of(
    module: LightningModule,
    factory: _ModuleFactory,
    options: TrainerOptions,
    sources: tuple[Any, Any],
    metric: str | tuple[str, ...] | None,
    train_logs: tuple[str, ...],
    seed: int,
    callbacks: Callbacks,
) -> TrainTask:
    """Describe the training of a module that is ready to train."""
    is_numbered = reads_number(module.training_step)
    # Before `configure_optimizers`, which may ask the trainer for the number of batches.
    with standing_in(module, options, "train_dataloader"):
        train = loader_from(sources[0], "train_dataloader", is_numbered=is_numbered)
    if train is None:
        raise RefusedModuleError(["there is no train_dataloader: give train_dataloaders=, or a datamodule"])
    batches = len(train)
    configured = ConfiguredOptimizer.of(module, options, batches, factory.datamodule)
    logs = TrainLogs(train_logs, batches) if train_logs else None
    identity = TaskIdentity()
    evaluation = _evaluation(module, options, sources[1], logs, identity)
    reasons = [*module_refusals(module), *configured.refusals()]
    config, watched = configured.config, callbacks.watched
    if config is not None and config.reduce_on_plateau:
        watched += (config.monitor,)
        monitor = reported(config.monitor)
        reasons += _monitor_refusals(config.monitor, metric, train_logs, has_validation="validate" in evaluation)
        metric = metric or monitor
    if reasons:
        raise RefusedModuleError(reasons)
    # From now on only the loaders hold the module and the datamodule.
    attach_for_good(module, options)
    if factory.datamodule is not None:
        factory.datamodule.trainer = stand_in(options, None)
    if metric is None and callbacks.monitor is not None:
        metric = reported(callbacks.monitor)
    if evaluation and evaluation["validate"] is one_batch:
        metric = metric or "train_loss"
    return TrainTask(
        model=replace(factory, logs=logs),
        param_groups=ConfigureModule(options, batches, factory.datamodule),
        optimizer=TakeOptimizer(options.max_value),
        scheduler=None if config is None else take_scheduler,
        scheduler_interval="epoch" if config is None else config.interval,
        train=train,
        step=LightningStep(
            task=identity,
            options=options,
            is_numbered=is_numbered,
            takes_number=takes_number(module.training_step),
            logs=logs,
            watched=watched,
        ),
        epochs=options.max_epochs,
        accumulate=options.accumulate_grad_batches,
        max_grad_norm=options.max_norm,
        clip_order="module" if options.max_norm is None else "groups",  # as Lightning's `clip_grad_by_norm`
        precision=PRECISIONS[options.precision],  # type: ignore[arg-type]  # the values are precisions
        metric=metric,
        stop=callbacks.stop,
        seed=seed,
        **evaluation,
    )


def _evaluation(
    module: LightningModule, options: TrainerOptions, source: Any, logs: TrainLogs | None, identity: TaskIdentity
) -> dict[str, Any]:
    """Return the arguments of the task that describe a validation; empty without one, and without `train_logs`."""
    is_numbered = reads_number(module.validation_step)
    loader = None
    if is_overridden("validation_step", module):
        with standing_in(module, options, "val_dataloader"):
            loader = loader_from(source, "val_dataloader", is_numbered=is_numbered)
    metrics = {name: copy.deepcopy(each) for name, each in metrics_of(module).items()}
    has_end = is_overridden(HOOK, module) and not does_nothing(getattr(module, HOOK))
    at_end = ValidationEnd(without_weights(module), options) if has_end else None
    finish = EpochValues(metrics, None if logs is None else logs.values, at_end)
    if loader is None:
        return {} if logs is None else {"validate": one_batch, "evaluate": LogsAlone(logs), "finish": finish}
    # Lightning puts the global streams back after its sanity steps, but not the generator of a loader.
    generators = (loader.generator, getattr(loader.sampler, "generator", None))
    if options.num_sanity_val_steps and generators != (None, None):
        reason = f"num_sanity_val_steps={options.num_sanity_val_steps} draws from the generator of val_dataloader"
        raise RefusedModuleError([f"{reason}: give num_sanity_val_steps=0, or no generator"])
    if options.num_sanity_val_steps and loader.num_workers and loader.persistent_workers:
        reason = f"num_sanity_val_steps={options.num_sanity_val_steps} starts the persistent workers of val_dataloader"
        raise RefusedModuleError([f"{reason}: give num_sanity_val_steps=0, or persistent_workers=False"])
    evaluate = LightningEvaluation(
        task=identity,
        options=options,
        is_numbered=is_numbered,
        takes_number=takes_number(module.validation_step),
        logs=logs,
        has_end=has_end,
    )
    return {"validate": loader, "evaluate": evaluate, "finish": finish}


def _monitor_refusals(monitor: str, metric: Any, train_logs: Sequence[str], *, has_validation: bool) -> Iterator[str]:
    if monitor.startswith("train") and not is_kept(monitor, train_logs):
        yield f"a ReduceLROnPlateau that monitors {monitor!r} of training_step: {remedy(monitor)}"
    elif not has_validation:
        yield f"a ReduceLROnPlateau that monitors {monitor!r} without a validation: monitor a value of validation_step"
    first = metric[0] if isinstance(metric, tuple) else metric
    if first not in (None, reported(monitor)):
        yield (
            f"a ReduceLROnPlateau that monitors {monitor!r} with metric={metric!r}, and the scheduler gets the first metric: "
            f"let metric begin with {reported(monitor)!r}"
        )
