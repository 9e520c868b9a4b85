"""A `LightningModule` in the pool gives the bits of `Trainer.fit()`, whole and cut; what would not is refused by name."""

import copy
import logging
import math
import pickle
import random
import re
import threading
from functools import partial

import pytest
import torch

pytest.importorskip("lightning", reason="the integration needs Lightning")

import numpy as np
import optuna
import torchmetrics
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
)
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torchmetrics.classification import MulticlassAccuracy

import hydra_tune_optuna
from hydra_tune import HydraExecutor, load_module, train_plain
from hydra_tune.errors import MetricError, TaskError
from hydra_tune.train.checkpoint.trial_checkpoint import StartCheckpoint
from hydra_tune_lightning import RefusedModuleError, save_checkpoint, task_from_lightning
from tests.support import checkpointed
from tests.support.lightning_modules import (
    CLASSES,
    FEATURES,
    TRAIN_LOGS,
    Autoencoder,
    Classifier,
    DecayGroups,
    DecoderAlone,
    DecoratedStep,
    Loaders,
    Metrics,
    NumberedSteps,
    OtherArguments,
    Plain,
    Recurrent,
    SplitSamples,
    TrainLogs,
    ValidationEnd,
    WithoutValidation,
    fitted,
    samples,
)

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def generated():
    """Batches of a loader whose last one is full, or dropped, and whose sampler has a generator of its own."""
    generator = torch.Generator().manual_seed(3)
    return [
        DataLoader(samples(38, 1), 5, shuffle=True, drop_last=True, generator=generator),
        DataLoader(samples(20, 2), 5),
    ]


def classifier(**arguments):
    return lambda: Classifier(**arguments)


CASES = {
    "an autoencoder": {"make": Autoencoder, "train_logs": ("train_loss",)},
    "a classifier with metrics": {"make": Classifier},
    "dropout": {"make": classifier(dropout=0.3)},
    "a schedule of epochs": {"make": classifier(scheduling="epoch")},
    "a schedule of steps": {"make": classifier(scheduling="step"), "accumulate_grad_batches": 3},
    "a schedule by the validation loss": {"make": classifier(scheduling="plateau"), "max_epochs": 4},
    "accumulated, the last step of an epoch shorter": {"make": classifier(dropout=0.2), "accumulate_grad_batches": 3},
    "clipped by norm": {"make": Classifier, "gradient_clip_val": 0.1},
    "clipped by norm, with groups of weight decay": {"make": DecayGroups, "gradient_clip_val": 0.1, "max_epochs": 4},
    "clipped by value": {
        "make": classifier(scheduling="step"),
        "gradient_clip_val": 0.01,
        "gradient_clip_algorithm": "value",
    },
    "bfloat16": {"make": classifier(dropout=0.1), "precision": "bf16-mixed"},
    "bfloat16, with a weight used three times": {"make": Recurrent, "precision": "bf16-mixed"},
    "metrics of lists and sums": {"make": Metrics, "metric": "val_mse"},
    "steps that read their number": {"make": NumberedSteps},
    "steps of other arguments": {"make": OtherArguments},
    "a datamodule that splits": {"make": Plain, "datamodule": SplitSamples},
    "loaders as arguments": {
        "make": Plain,
        "loaders": lambda: (DataLoader(samples(20, 1), 6, shuffle=True), DataLoader(samples(9, 2), 4, shuffle=True)),
    },
    "no validation": {"make": WithoutValidation},
    "a decorator that reads the number": {"make": DecoratedStep},
    "an optimizer of some parameters": {"make": DecoderAlone},
    "training logs": {"make": TrainLogs, "train_logs": TRAIN_LOGS, "accumulate_grad_batches": 3},
    "training logs without validation": {
        "make": type("Own", (TrainLogs,), {"validation_step": LightningModule.validation_step}),
        "train_logs": ("train/mean", "train_sum"),
    },
    "a hook after the validation": {"make": ValidationEnd, "num_sanity_val_steps": 2},
    "sanity steps": {"make": classifier(dropout=0.3), "num_sanity_val_steps": 2},
    "a loader with a generator, whose passes are not exhausted": {
        "make": classifier(),
        "loaders": generated,
        "max_epochs": 3,
    },
}
SEED = 3
# Torch casts the weight anew for each use, and a cut model once.
WHOLE = ("bfloat16, with a weight used three times",)


class Case:
    """A case: `fit` gives what Lightning does, `task` describes the same training."""

    def __init__(self, make, datamodule=None, loaders=tuple, metric=None, train_logs=(), **options):
        self.make, self.datamodule, self.loaders, self.metric = make, datamodule, loaders, metric
        self.train_logs = train_logs
        self.options = {"max_epochs": 2, "num_sanity_val_steps": 0, **options}

    def fit(self):
        datamodule = None if self.datamodule is None else self.datamodule()
        return fitted(self.make, SEED, datamodule, self.loaders(), **self.options)

    def task(self):
        loaders = dict(zip(("train_dataloaders", "val_dataloaders"), self.loaders(), strict=False))
        datamodule = None if self.datamodule is None else self.datamodule()
        return task_from_lightning(
            self.make,
            datamodule=datamodule,
            **loaders,
            seed=SEED,
            metric=self.metric,
            train_logs=self.train_logs,
            logger=False,  # as `fitted`
            **self.options,
        )


@pytest.fixture(scope="module")
def stock():
    """`Trainer.fit()` of each case, once."""
    runs = {}

    def run(name):
        if name not in runs:
            case = Case(**CASES[name])
            runs[name] = case, *case.fit()
        return runs[name]

    return run


def assert_same(result, weights, epochs, train_logs=()):
    state = result.state_dict()
    assert list(state) == list(weights)
    assert [name for name, value in weights.items() if not torch.equal(value, state[name])] == []
    assert len(result.history) == len(epochs)
    for entry, values in zip(result.history, epochs, strict=True):
        unlogged = {"step", "epoch", "seconds", "train_loss"}.difference(train_logs)
        reported = {name: value for name, value in entry.items() if name not in unlogged}
        logged = {
            name if name.startswith("train") else "val_" + name.removeprefix("val_"): value
            for name, value in values.items()
            if not name.startswith(("train", "twice")) or re.sub("_(step|epoch)$", "", name) in train_logs
        }
        assert reported == logged


def some(*fast):
    """All cases, those not named among the slow tests."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize("name", CASES)
def test_the_task_is_the_training_of_lightning(stock, name):
    case, weights, epochs = stock(name)
    task = case.task()
    assert_same(train_plain(task), weights, epochs, case.train_logs)
    with HydraExecutor("cpu:1") as pool:
        (result,) = pool.run([task])
    assert_same(result, weights, epochs, case.train_logs)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", some("an autoencoder", "clipped by value"))
def test_a_model_that_is_cut_has_the_same_bits(stock, name):
    case, weights, epochs = stock(name)
    with HydraExecutor("cpu:2", num_shards=2) as pool:
        (result,) = pool.run([case.task()])
    assert result.num_shards == (1 if name in WHOLE else 2)
    assert_same(result, weights, epochs, case.train_logs)


@pytest.mark.slow
@pytest.mark.parametrize("average", ["micro", "macro"])
def test_a_model_that_does_not_fit_its_device_has_the_same_bits(average):
    """A validation whose metric averages over classes is not cut."""

    class Wide(Autoencoder):
        def __init__(self):
            super().__init__(width=400)
            self.accuracy = MulticlassAccuracy(3, average=average)

        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.accuracy.update(self(batch[0])[:, :3], batch[1])
            self.log("val_acc", self.accuracy)

    case = Case(Wide)
    weights, epochs = case.fit()
    with HydraExecutor("cpu:1", device_memory="150KiB") as pool:
        (result,) = pool.run([case.task()])
    assert result.num_shards > 1
    assert_same(result, weights, epochs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}], ids=["plain", "accumulated and clipped"]
)
def test_fused_trials_are_close(options):
    makes = [classifier(lr=rate, dropout=dropout) for rate, dropout in ((0.05, 0.1), (0.02, 0.2))]
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, **options}
    with HydraExecutor("cpu:1", fusion="on") as pool:
        results = pool.run([task_from_lightning(make, seed=SEED, **options) for make in makes])
    for make, result in zip(makes, results, strict=True):
        weights, epochs = fitted(make, SEED, **options)
        assert result.group_size == 2
        for name, value in result.state_dict().items():
            assert torch.allclose(value, weights[name], atol=1e-4), name
        assert math.isclose(result.metrics["val_loss"], epochs[-1]["val_loss"], rel_tol=1e-3)


def overriding(name, base=Autoencoder):
    return type("Own", (base,), {name: lambda self, *arguments, **options: str(arguments)})


def configuring(configure):
    return type("Own", (Autoencoder,), {"configure_optimizers": configure})


class Manual(Autoencoder):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Frozen(Autoencoder):
    def __init__(self):
        super().__init__()
        self.encoder.eval()


class Grouped(Metrics):
    def __init__(self):
        super().__init__()
        self.of_classes = torchmetrics.MetricCollection([MulticlassAccuracy(3)])


class Wrapped(Classifier):
    def __init__(self):
        super().__init__()
        self.accuracy = torchmetrics.MinMaxMetric(self.accuracy)


class Averaged(Classifier):
    def __init__(self):
        super().__init__()
        self.accuracy = torchmetrics.MeanMetric()
        self.accuracy.add_state("mean", torch.zeros(()), dist_reduce_fx="mean")


def computing(self, batch, batch_idx):
    self.accuracy.update(self(batch[0]), batch[1])
    self.log("val_loss", self.accuracy.compute())


class UpdatedTwice(Metrics):
    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.error.update(*batch[:1], *batch[:1])


class Shared(Classifier):
    """Has one metric for both steps, in a method that both call."""

    def common_step(self, batch, stage):
        logits = self(batch[0])
        self.accuracy(logits, batch[1])
        self.log(f"{stage}_acc", self.accuracy)
        return nn.functional.cross_entropy(logits, batch[1])

    def training_step(self, batch, batch_idx):
        return self.common_step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.common_step(batch, "val"))


class EvalLayer(nn.Dropout):
    def train(self, mode=True):
        return super().train(False)


class StaysInEval(Autoencoder):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(self.encoder, EvalLayer())


class SetsEpoch(SequentialSampler):
    def set_epoch(self, epoch):
        self.epoch = epoch


class Drawing(Autoencoder):
    def train_dataloader(self):
        torch.rand(1)
        return super().train_dataloader()


class Epochs:
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(range(self.size))

    def __len__(self):
        return self.size

    def set_epoch(self, epoch):
        pass


class Rows(IterableDataset):
    def __iter__(self):
        return iter(samples(20, 1))


def loader(batches=4, **options):
    return DataLoader(samples(20, 1), batches, **options)


def two_optimizers(self):
    return [torch.optim.SGD(self.encoder.parameters(), 0.1), torch.optim.SGD(self.decoder.parameters(), 0.1)]


def two_schedulers(self):
    optimizer = torch.optim.SGD(self.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR
    return [optimizer], [schedule(optimizer, 1), schedule(optimizer, 2)]


def plateau(**config):
    def configure(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss", **config}}

    return configure


def every_other_epoch(self):
    optimizer = torch.optim.SGD(self.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "frequency": 2}}


HOOKS = (
    "optimizer_step",
    "backward",
    "optimizer_zero_grad",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_before_zero_grad",
    "on_after_backward",
    "on_train_batch_start",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_fit_start",
    "on_train_start",
    "on_train_end",
    "configure_callbacks",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "log",
    "teardown",
)
OPTIONS = {
    "max_steps=10": {"max_steps": 10},
    "strategy='ddp'": {"strategy": "ddp"},
    "devices=2": {"devices": 2},
    "accelerator='gpu'": {"accelerator": "gpu"},
    "precision='16-mixed'": {"precision": "16-mixed"},
    "precision='64-true'": {"precision": "64-true"},
    "limit_train_batches=0.5": {"limit_train_batches": 0.5},
    "check_val_every_n_epoch=2": {"check_val_every_n_epoch": 2},
    "val_check_interval=0.5": {"val_check_interval": 0.5},
    "overfit_batches=1": {"overfit_batches": 1},
    "limit_val_batches=0": {"limit_val_batches": 0},
    "fast_dev_run=True": {"fast_dev_run": True},
    "deterministic=True": {"deterministic": True},
    "the callback object": {"callbacks": [object()]},
    "the callback OwnCheckpoint": {"callbacks": [type("OwnCheckpoint", (ModelCheckpoint,), {})()]},
    "StochasticWeightAveraging, which the pool would not call: after_step=": {
        "callbacks": StochasticWeightAveraging(0.1)
    },
    "EarlyStopping monitors 'train_loss' of training_step: give train_logs": {"callbacks": EarlyStopping("train_loss")},
    "max_epochs=-1": {"max_epochs": -1},
    "gradient_clip_algorithm='max'": {"gradient_clip_algorithm": "max"},
}
REFUSED = {
    **{f"Own overrides {name}, which": {"make": overriding(name)} for name in HOOKS},
    **{option: {"options": options} for option, options in OPTIONS.items()},
    "manual optimization": {"make": Manual},
    "returns 2 optimizers": {"make": configuring(two_optimizers)},
    "configure_optimizers returns None": {"make": configuring(lambda self: None)},
    "returns 2 schedulers": {"make": configuring(two_schedulers)},
    "frequency=2": {"make": configuring(every_other_epoch)},
    "a ReduceLROnPlateau with interval='step'": {"make": configuring(plateau(interval="step"))},
    "monitors 'val_loss' without a validation": {
        "make": type("Own", (WithoutValidation,), {"configure_optimizers": plateau()})
    },
    "monitors 'val_loss' with metric='val_acc'": {"make": configuring(plateau()), "metric": "val_acc"},
    "LBFGS": {"make": configuring(lambda self: torch.optim.LBFGS(self.parameters()))},
    "encoder is in eval mode": {"make": Frozen},
    "with compute groups": {"make": Grouped},
    "wraps another metric": {"make": Wrapped},
    "or stays so in train()": {"make": StaysInEval},
    "has a sampler with set_epoch()": {
        "train_dataloaders": DataLoader(samples(8, 1), batch_sampler=BatchSampler(SetsEpoch(range(8)), 4, False))
    },
    "limit_train_batches=1:": {"options": {"limit_train_batches": 1}},
    "whose state 'mean' is no sum": {"make": Averaged},
    "has no training_step": {"make": type("Own", (Autoencoder,), {"training_step": LightningModule.training_step})},
    "takes dataloader_iter": {
        "make": type("Own", (Autoencoder,), {"training_step": lambda self, dataloader_iter: None})
    },
    "takes dataloader_idx": {
        "make": type("Own", (Autoencoder,), {"validation_step": lambda self, batch, batch_idx, dataloader_idx: None})
    },
    "train_dataloader() draws random numbers": {"make": Drawing},
    "no train_dataloader": {"make": Plain},
    "val_dataloader gives list": {"val_dataloaders": [loader(), loader()]},
    "train_dataloader gives list": {"train_dataloaders": [loader()]},
    "train_dataloader gives dict": {"train_dataloaders": {"a": loader()}},
    "sampler with set_epoch()": {"train_dataloaders": loader(sampler=Epochs(20))},
    "num_sanity_val_steps=2 draws": {"val_dataloaders": loader(shuffle=True, generator=torch.Generator())},
    "without a length": {"train_dataloaders": DataLoader(Rows())},
    "make_module is a Autoencoder": {"make": Autoencoder()},
    "torch's Linear": {"make": lambda: nn.Linear(1, 1)},
    "datamodule is DataLoader": {"datamodule": loader()},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_would_not_be_exact_is_refused_by_name(reason):
    case = dict(REFUSED[reason])
    make, options = case.pop("make", Autoencoder), case.pop("options", {})
    before = torch.get_rng_state()
    with pytest.raises(RefusedModuleError, match=re.escape(reason)):
        task_from_lightning(make, **{"max_epochs": 1, **options}, **case)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("stop", "epochs"),
    [
        (EarlyStopping("val_loss", patience=1), 2),
        (EarlyStopping("val_acc", mode="max", min_delta=0.5, patience=2), 3),
        (EarlyStopping("val_loss", stopping_threshold=1.2, check_on_train_epoch_end=False), 1),
        (EarlyStopping("train_loss", divergence_threshold=1.4), 2),
        (EarlyStopping("nothing", strict=False), 7),
    ],
)
def test_a_training_ends_as_early_stopping_says(stop, epochs):
    case = Case(classifier(lr=0.5), max_epochs=7, callbacks=[stop], train_logs=["train_loss"], metric="val_loss")
    weights, logged = case.fit()
    assert len(logged) == epochs
    assert_same(train_plain(case.task()), weights, logged, case.train_logs)


def test_a_name_that_early_stopping_does_not_find_fails_the_trial():
    with HydraExecutor("cpu:1") as pool:
        task = task_from_lightning(Autoencoder, max_epochs=1, callbacks=EarlyStopping("acc"), metric="val_loss")
        result = pool.submit(task).result()
    assert "EarlyStopping monitors 'acc'" in str(result.error)


def test_a_warning_names_files_that_nobody_writes(caplog):
    callbacks = [ModelCheckpoint(monitor="acc"), RichProgressBar(), LearningRateMonitor()]
    task = task_from_lightning(Autoencoder, max_epochs=1, callbacks=callbacks, logger=True, enable_progress_bar=True)
    assert task.metrics == ("val_acc",)
    words = [re.search("without (.*) of the Trainer", record.message)[1] for record in caplog.records]
    assert words == ["ModelCheckpoint", "LearningRateMonitor", "logger"]


def test_an_unknown_option_is_named_with_a_hint():
    with pytest.raises(TaskError, match="did you mean 'gradient_clip_val'"):
        task_from_lightning(Autoencoder, max_epochs=1, gradient_clip_vall=0.1)
    with pytest.raises(TaskError, match="needs max_epochs"):
        task_from_lightning(Autoencoder)


def stepping(step, validation=Autoencoder.validation_step):
    return type("Own", (Autoencoder,), {"training_step": step, "validation_step": validation})


@pytest.mark.cases(5)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            stepping(lambda self, batch, batch_idx: self.decoder(self.encoder(batch[0])).mean() * self.current_epoch),
            "self.trainer.current_epoch",
        ),
        (stepping(lambda self, batch, batch_idx: self.trainer.optimizers), "self.trainer.optimizers"),
        (
            stepping(lambda self, batch, batch_idx: self.trainer.strategy.broadcast(1)),
            "self.trainer.strategy.broadcast",
        ),
        (stepping(lambda self, batch, batch_idx: None), "training_step returned None"),
        (type("Own", (Classifier,), {"validation_step": computing}), "calls compute() of a MulticlassAccuracy"),
        (UpdatedTwice, "updates the metric 'error' twice"),
        (Shared, "share the metric 'accuracy'"),
        (stepping(lambda self, batch, batch_idx: {"losses": 1}), "a dict without 'loss'"),
    ],
)
@pytest.mark.parametrize("shards", [None, 2])
def test_a_step_that_asks_for_more_than_a_trial_knows_fails_by_name(make, message, shards):
    task = task_from_lightning(make, max_epochs=1)
    with HydraExecutor("cpu:1", num_shards=shards) as pool:
        result = pool.submit(task).result()
    assert isinstance(result.error, TaskError | MetricError)
    assert message in str(result.error)


class LogsList(Metrics):
    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.ranking.update(logits.softmax(dim=1), batch[1])
        self.log("train_auroc", self.ranking, on_epoch=True)
        return nn.functional.cross_entropy(logits, batch[1])


@pytest.mark.parametrize(
    ("make", "name", "message"),
    [
        (Autoencoder, "train_acc", "train_logs has 'train_acc', which training_step has not logged"),
        (LogsList, "train_auroc", "logs the metric 'ranking', whose states are lists"),
    ],
)
def test_a_training_log_that_is_not_there_fails_by_name(make, name, message):
    task = task_from_lightning(make, max_epochs=1, train_logs=[name], metric="train_loss")
    with HydraExecutor("cpu:1") as pool:
        result = pool.submit(task).result()
    assert isinstance(result.error, MetricError)
    assert message in str(result.error)


def ending(hook, step=ValidationEnd.validation_step):
    return type("Own", (ValidationEnd,), {"on_validation_epoch_end": hook, "validation_step": step})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (ending(lambda self: self.outputs.clear()), "leaves values in the metric 'accuracy'"),
        (ending(lambda self: self.accuracy.reset()), "leaves values in self.outputs"),
        (ending(lambda self: setattr(self, "best", 1), lambda *_: None), "leaves values in self.best"),
        (ending(lambda self: self.train_accuracy.update(*2 * [torch.ones(1)]), lambda *_: None), "'train_accuracy'"),
        (ending(lambda self: self.layers, lambda *_: None), "'Own' object has no attribute 'layers'"),
        (ending(lambda self: self.current_epoch, lambda *_: None), "self.trainer.current_epoch"),
        (
            ending(lambda self: self.outputs.clear(), lambda self, *_: self.outputs.append("a")),
            "appends a str to self.outputs",
        ),
    ],
)
def test_a_hook_that_looks_at_more_than_a_validation_fails_by_name(make, message):
    task = task_from_lightning(make, max_epochs=1, metric="train_loss")
    with pytest.raises((MetricError, TaskError), match=re.escape(message)):
        train_plain(task)


class Meter:
    def __init__(self):
        self.total, self.count = 0.0, 0


def counts(self, batch):
    self.correct, self.seen = self.correct + 1, self.seen + len(batch[1])


def counts_in_a_meter(self, batch):
    self.meter.total, self.meter.count = self.meter.total + 1.0, self.meter.count + 1


ACCUMULATIONS = {
    "correct": (counts, lambda self: self.correct / max(self.seen, 1)),
    "meter": (counts_in_a_meter, lambda self: self.meter.total / max(self.meter.count, 1)),
    "sums": (lambda self, batch: self.sums["loss"].append(1.0), lambda self: float(len(self.sums["loss"]))),
    "total": (lambda self, batch: self.total.add_(1), lambda self: self.total),
    "per_loader": (lambda self, batch: self.per_loader[0].append(1.0), lambda self: float(len(self.per_loader[0]))),
}


@pytest.mark.parametrize("name", ACCUMULATIONS)
def test_a_hook_that_reads_what_it_cannot_see_fails_by_name(name):
    accumulate, value = ACCUMULATIONS[name]

    class Accumulating(ValidationEnd):
        def __init__(self):
            super().__init__()
            self.correct, self.seen, self.meter, self.sums = 0, 0, Meter(), {"loss": []}
            self.total, self.per_loader = torch.zeros(()), [[], []]

        def validation_step(self, batch, batch_idx):
            accumulate(self, batch)

        def on_validation_epoch_end(self):
            self.log("val_loss", value(self))

    with pytest.raises(MetricError, match=f"'Accumulating' object has no attribute '{name}'"):
        train_plain(task_from_lightning(Accumulating, max_epochs=1))


def test_a_hook_that_reads_what_the_training_leaves_fails_by_name():
    def training_step(self, batch, batch_idx):
        self.losses.append(1.0)
        return self(batch[0]).mean()

    def on_validation_epoch_end(self):
        self.log("val_loss", float(len(self.losses)))

    own = {"training_step": training_step, "on_validation_epoch_end": on_validation_epoch_end}
    make = type("Own", (ValidationEnd,), {**own, "validation_step": lambda *_: None})
    with pytest.raises(MetricError, match="'Own' object has no attribute 'losses'"):
        train_plain(task_from_lightning(make, max_epochs=1))


def test_a_hook_may_read_what_stays():
    class Staying(ValidationEnd):
        def __init__(self):
            super().__init__()
            self.names, self.settings = ["a", "b"], {"scale": 3.0}

        def validation_step(self, batch, batch_idx):
            self.last = batch[0]
            self.losses.append(2.0)

        def on_validation_epoch_end(self):
            self.log("val_loss", self.settings["scale"] * len(self.names) + len(self.losses))
            self.losses.clear()

    assert train_plain(task_from_lightning(Staying, max_epochs=2)).metrics["val_loss"] == 9.0


def test_a_step_of_the_training_that_is_left_out_is_refused_as_one_that_is_changed():
    def idle(self, scheduler, metric):
        """Do nothing."""

    with pytest.raises(RefusedModuleError, match="Own overrides lr_scheduler_step, which the pool would not call"):
        task_from_lightning(type("Own", (Autoencoder,), {"lr_scheduler_step": idle}), max_epochs=1)


def test_hooks_without_code_and_names_that_lightning_has_removed():
    def idle(self):
        """Do nothing."""

    assert (
        task_from_lightning(type("Own", (Autoencoder,), {"on_train_start": idle}), max_epochs=1).finish.at_end is None
    )
    with pytest.raises(RefusedModuleError, match="validation_epoch_end, which Lightning 2 has removed"):
        task_from_lightning(
            type("Own", (Autoencoder,), {"validation_epoch_end": lambda self, outputs: 1}), max_epochs=1
        )


def test_a_module_that_a_trial_has_had_is_refused():
    module = Autoencoder()
    task = task_from_lightning(lambda: module, max_epochs=1)
    with HydraExecutor("cpu:1") as pool:
        result = pool.submit(task).result()
    assert isinstance(result.error, RefusedModuleError)
    assert "build a new one at each call" in str(result.error)


def test_a_copy_of_a_module_that_a_trial_has_had_trains_on():
    best = train_plain(task_from_lightning(Autoencoder, max_epochs=1)).module()
    weights = copy.deepcopy(best.state_dict())
    task = task_from_lightning(lambda: copy.deepcopy(best), max_epochs=1)
    result = train_plain(task)
    assert not all(torch.equal(value, result.state_dict()[name]) for name, value in weights.items())
    assert all(torch.equal(value, best.state_dict()[name]) for name, value in weights.items())


class InOneStep(Shared):
    """Updates its metric in one of the two steps, by an argument."""

    def __init__(self, stage):
        super().__init__()
        self.stage = stage

    def common_step(self, batch, stage):
        if stage == self.stage:
            return super().common_step(batch, stage)
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


def test_a_metric_that_another_task_of_the_class_has_trained_is_free_for_validation():
    with HydraExecutor("cpu:1") as pool:
        for stage in ("train", "val"):
            result = pool.run(task_from_lightning(partial(InOneStep, stage), max_epochs=1))
    assert "val_acc" in result.metrics


class OnABackbone(Loaders):
    """Has a backbone that scripts load once."""

    def __init__(self, backbone, lr):
        super().__init__()
        self.backbone, self.head, self.lr = backbone, nn.Linear(8, CLASSES), lr

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.head(self.backbone(batch[0])), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
def test_trials_that_share_a_part_begin_from_its_weights(devices):
    backbone = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU())
    begin = {name: value.clone() for name, value in backbone.state_dict().items()}
    tasks = [task_from_lightning(lambda: OnABackbone(backbone, 0.1), max_epochs=2, seed=SEED) for _ in range(3)]
    with HydraExecutor(devices) as pool:
        results = pool.run(tasks)
    assert all(torch.equal(value, backbone.state_dict()[name]) for name, value in begin.items())
    weights, _ = fitted(lambda: OnABackbone(backbone, 0.1), SEED, max_epochs=2)
    for result in results:
        assert all(torch.equal(value, result.state_dict()[name]) for name, value in weights.items())


def test_a_task_is_made_while_other_threads_draw():
    is_over = threading.Event()

    def draw():
        while not is_over.is_set():
            torch.rand(3)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        tasks = [task_from_lightning(Classifier, max_epochs=1) for _ in range(20)]
    finally:
        is_over.set()
        thread.join()
    assert {task.epochs for task in tasks} == {1}


def test_all_batches_as_a_share_are_all_batches():
    limits = {"limit_train_batches": 1.0, "limit_val_batches": 1.0, "val_check_interval": 1.0}
    task = task_from_lightning(Autoencoder, max_epochs=1, **limits)
    assert len(task.train) == len(Autoencoder().train_dataloader())
    assert len(task.validate) == len(Autoencoder().val_dataloader())


def test_a_result_is_a_module_and_a_checkpoint_again(tmp_path):
    task = task_from_lightning(classifier(width=9), max_epochs=1)
    with HydraExecutor("cpu:1") as pool:
        (result,) = pool.run([task])
    save_checkpoint(result, tmp_path / "trained.ckpt")
    loaded = Classifier.load_from_checkpoint(tmp_path / "trained.ckpt", weights_only=True)
    fresh = Classifier(width=9)
    fresh.load_state_dict(result.state_dict())
    assert loaded.hparams == fresh.hparams == result.module().hparams
    for name, value in result.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name])
        assert torch.equal(value, fresh.state_dict()[name])


@pytest.mark.cases(1)
@pytest.mark.parametrize("shards", [None, 2])
def test_a_trained_module_keeps_nothing_of_the_pool(shards):
    before = {name: repr(value) for name, value in vars(Classifier()).items() if name not in ("_modules", "training")}
    with HydraExecutor("cpu:1", num_shards=shards) as pool:
        (result,) = pool.run([task_from_lightning(Classifier, max_epochs=1)])
    module = result.module()
    assert {name: repr(vars(module)[name]) for name in before} == before
    for part in (module.accuracy, module.train_accuracy):
        assert part.update_count == 0
        assert {name: getattr(part, name) for name in part._defaults} == part._defaults


@pytest.mark.parametrize("argument", ["datamodule", "train_dataloaders"])
def test_a_datamodule_is_prepared_and_set_up_once(argument):
    datamodule = SplitSamples()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    task = task_from_lightning(Plain, **{argument: datamodule}, max_epochs=2, **quiet)
    with HydraExecutor("cpu:1") as pool:
        pool.run([task])
    assert datamodule.calls == ["prepare_data", "fit"]


class DrawsInSetup(Plain):
    """Draws from each global stream, between layers."""

    def setup(self, stage):
        self.rate = random.random() * np.random.rand()  # noqa: NPY002 - the global stream
        super().setup(stage)
        self.layers.append(nn.Dropout(self.rate / 2))


def test_draws_of_a_setup_are_those_of_lightning():
    case = Case(DrawsInSetup, datamodule=SplitSamples, max_epochs=1)
    weights, epochs = case.fit()
    with HydraExecutor("cpu:1") as pool:
        (result,) = pool.run([case.task()])
    assert_same(result, weights, epochs)


def draw():
    """Draw from each global stream, as a script that splits its data."""
    return torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002 - the global stream


def test_a_task_goes_on_from_where_the_streams_of_a_script_are():
    def make_after_draws():
        draw()
        return Classifier(dropout=0.3)

    weights, epochs = fitted(make_after_draws, SEED, max_epochs=1)
    with torch.random.fork_rng():
        seed_everything(SEED)
        draw()
        task = task_from_lightning(classifier(dropout=0.3), max_epochs=1, seed=None)
        draws = draw()
        seed_everything(SEED)
        draw()
        assert all(map(np.array_equal, draws, draw()))
    with HydraExecutor("cpu:1") as pool:
        (result,) = pool.run([task])
    assert_same(result, weights, epochs)


def test_a_study_prunes_and_finds_what_lightning_gives():
    def objective(trial):
        rate = trial.suggest_categorical("rate", [0.05, 5.0])
        return task_from_lightning(classifier(lr=rate), max_epochs=4, num_sanity_val_steps=0, seed=SEED)

    with HydraExecutor("cpu:1") as pool:
        study = hydra_tune_optuna.create_study(
            executor=pool,
            pruner=optuna.pruners.ThresholdPruner(upper=1.3, n_warmup_steps=2),
            sampler=optuna.samplers.GridSampler({"rate": [0.05, 5.0]}),
        )
        study.optimize(objective, n_trials=2)
    values = {trial.params["rate"]: trial for trial in study.trials}
    _, epochs = fitted(classifier(lr=0.05), SEED, max_epochs=4, num_sanity_val_steps=0)
    assert values[0.05].value == epochs[-1]["val_loss"]
    assert values[5.0].state == optuna.trial.TrialState.PRUNED


REPORTED = ("val_loss", "train_acc", "train_acc_step", "train_sum", "train_sum_step")


@pytest.mark.cases(1)
@pytest.mark.parametrize("scheduling", ["plateau", "step"])
def test_a_trial_resumes_with_the_bits_of_lightning(scheduling):
    def make():
        return TrainLogs(dropout=0.2, scheduling=scheduling)

    case = Case(make, max_epochs=3, accumulate_grad_batches=3, train_logs=("train_acc", "train_sum"))
    weights, epochs = case.fit()
    keeper, plans = checkpointed.Collector(), checkpointed.library()
    checkpointed.run(case.task(), plans, keeper)
    for saved in keeper.saved[1::4]:
        resumed = checkpointed.run(case.task(), plans, beginning=StartCheckpoint(saved=saved))
        assert all(torch.equal(value, resumed["state"][name]) for name, value in weights.items())
        assert {name: resumed["history"][-1][name] for name in REPORTED} == {
            name: epochs[-1][name] for name in REPORTED
        }


class Asking(Plain):
    """Asks the trainer for all that is the same in each trial."""

    def setup(self, stage):
        assert (self.current_epoch, self.global_step, self.trainer.max_epochs, self.logger) == (0, 0, 2, None)
        assert len(self.trainer.datamodule.parts[0]) == 38
        super().setup(stage)

    def training_step(self, batch, batch_idx):
        trainer = self.trainer
        assert (trainer.training, trainer.sanity_checking, trainer.world_size) == (True, False, 1)
        assert torch.equal(trainer.strategy.reduce(batch[0], reduce_op="mean"), batch[0])
        assert (trainer.accumulate_grad_batches, trainer.is_global_zero, self.global_rank) == (2, True, 0)
        return super().training_step(batch, batch_idx)["loss"] + torch.zeros(1, device=self.device).sum()

    def configure_optimizers(self):
        assert (self.trainer.estimated_stepping_batches, self.trainer.num_training_batches) == (8, 8)
        assert (len(self.trainer.datamodule.parts), self.trainer.model) == (2, self)
        return super().configure_optimizers()


class AskingSamples(SplitSamples):
    def train_dataloader(self):
        assert self.trainer.world_size == 1
        return super().train_dataloader()


@pytest.mark.cases(1)
@pytest.mark.parametrize("shards", [None, 2])
def test_questions_for_the_trainer_have_its_answers(shards):
    case = Case(Asking, datamodule=AskingSamples, max_epochs=2, accumulate_grad_batches=2)
    weights, epochs = case.fit()
    task = pickle.loads(pickle.dumps(case.task()))
    with HydraExecutor("cpu:1", num_shards=shards) as pool:
        (result,) = pool.run([task])
    assert_same(result, weights, epochs)


@pytest.mark.cases(1 / 3)
def test_a_module_is_planned_and_loaded_from_a_file(tmp_path):
    task = Case(Plain, datamodule=SplitSamples).task()
    with HydraExecutor("cpu:1") as pool:
        assert pool.plan([task]).trials[0].num_shards == 1
        (result,) = pool.run([task])
    result.save(tmp_path / "weights.safetensors")
    module = load_module(task, tmp_path / "weights.safetensors")
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in result.state_dict().items())
