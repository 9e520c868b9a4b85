"""Values that a `LightningModule` logs in some batches or epochs, and what ends or slows a training by them, as Lightning."""

import re

import pytest
import torch

pytest.importorskip("lightning", reason="the integration needs Lightning")

from lightning.pytorch.callbacks import EarlyStopping
from torch.nn import functional

from hydra_tune import HydraExecutor, train_plain
from hydra_tune.errors import MetricError
from hydra_tune_lightning import RefusedModuleError, task_from_lightning
from tests.support.lightning_modules import Autoencoder, Classifier, fitted

SEED = 3
QUIET = {"num_sanity_val_steps": 0}


def assert_as_fitted(make, names, train_logs=(), shards=None, **options):
    """Compare weights, epochs and some values with those of Lightning."""
    weights, epochs = fitted(make, SEED, **QUIET, **options)
    task = task_from_lightning(make, seed=SEED, train_logs=train_logs, **QUIET, **options)
    with HydraExecutor("cpu:1", num_shards=shards) as pool:
        results = [train_plain(task), *pool.run([task])]
    for result in results:
        state = result.state_dict()
        assert [name for name, value in weights.items() if not torch.equal(value, state[name])] == []
        found = [{name: entry[reported] for name, reported in names.items()} for entry in result.history]
        assert found == [{name: entry[name] for name in names} for entry in epochs]
    return epochs


class LogsInSomeBatches(Classifier):
    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        loss = functional.cross_entropy(logits, batch[1])
        self.train_accuracy(logits, batch[1])
        if batch_idx % 3 == 1:
            self.log("train_max", -loss, on_step=False, on_epoch=True, reduce_fx="max")
            self.log("train_min", loss, on_step=False, on_epoch=True, reduce_fx="min")
            self.log("train_mean", loss, on_step=True, on_epoch=True)
            self.log("train_last", loss)
        if batch_idx == 4:
            self.log("train_acc", self.train_accuracy, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.accuracy.update(logits, batch[1])
        self.log("val_loss", functional.cross_entropy(logits, batch[1]))
        if batch_idx == 1:
            self.log("val_acc", self.accuracy)
            self.log("val_min", logits.min().square(), reduce_fx="min")


@pytest.mark.cases(1)
@pytest.mark.parametrize("shards", [None, 2])
def test_values_of_some_batches_are_those_of_lightning(shards):
    of_training = ("train_max", "train_min", "train_mean", "train_last", "train_acc")
    names = [*of_training, "train_mean_step", "train_mean_epoch", "train_acc_step", "val_loss", "val_acc", "val_min"]
    assert_as_fitted(LogsInSomeBatches, {name: name for name in names}, of_training, shards, max_epochs=3)


def logging(name, **options):
    """Return a module whose `training_step` logs a name."""

    def training_step(self, batch, batch_idx):
        loss = functional.mse_loss(self(batch[0]), batch[0])
        self.log(name, loss, **options)
        return loss

    return type("Own", (Autoencoder,), {"training_step": training_step})


def slowed(make, monitor):
    def configure(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.5)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.05)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": monitor}}

    return type("Own", (make,), {"configure_optimizers": configure})


@pytest.mark.parametrize(
    ("make", "train_logs", "reason"),
    [
        (
            slowed(Autoencoder, "train_loss"),
            (),
            "that monitors 'train_loss' of training_step: give train_logs=['train_loss']",
        ),
        (slowed(Autoencoder, "train_loss_epoch"), (), "training_step: give train_logs=['train_loss']"),
        (EarlyStopping("train_loss_epoch"), (), "training_step: give train_logs=['train_loss']"),
        (
            EarlyStopping("train_loss", check_on_train_epoch_end=False),
            ["train_loss"],
            "leave check_on_train_epoch_end out",
        ),
    ],
)
def test_a_monitor_of_the_training_is_refused_with_a_remedy(make, train_logs, reason):
    callbacks, make = ([make], Autoencoder) if isinstance(make, EarlyStopping) else ([], make)
    with pytest.raises(RefusedModuleError, match=re.escape(reason)):
        task_from_lightning(make, max_epochs=1, callbacks=callbacks, train_logs=train_logs)


@pytest.mark.parametrize("monitor", ["train_loss", "train_loss_epoch", "train_loss_step"])
def test_a_monitor_of_the_training_is_followed(monitor):
    make = slowed(logging("train_loss", on_step=True, on_epoch=True), monitor)
    stop = EarlyStopping(monitor, min_delta=0.02, patience=2)
    epochs = assert_as_fitted(make, {monitor: monitor}, ["train_loss"], max_epochs=9, callbacks=[stop])
    assert len(epochs) < 9


@pytest.mark.parametrize(
    "monitoring", [lambda make: (make, [EarlyStopping("loss")]), lambda make: (slowed(make, "loss"), [])]
)
def test_a_monitor_of_the_training_is_not_mistaken_for_one_of_the_validation(monitoring):
    make, callbacks = monitoring(logging("loss"))
    task = task_from_lightning(make, max_epochs=1, callbacks=callbacks)
    with pytest.raises(MetricError, match=re.escape("training_step logs 'loss', which a callback or a scheduler")):
        train_plain(task)


def test_a_name_of_both_steps_is_an_error():
    make = logging("val_loss", on_epoch=True)
    with pytest.raises(MetricError, match="training_step and validation_step log 'val_loss'"):
        train_plain(task_from_lightning(make, max_epochs=1, train_logs=["val_loss"]))


class LogsInSomeEpochs(Autoencoder):
    def __init__(self):
        super().__init__(lr=0.0)
        self.calls = 0

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.calls += 1
        if self.calls <= 3:  # three batches in each validation
            self.log("val_some", batch[0].mean())


@pytest.mark.parametrize("is_strict", [True, False])
def test_a_value_of_some_epochs_counts_until_the_next(is_strict):
    stop = EarlyStopping("val_some", patience=2, strict=is_strict)
    options = {"max_epochs": 6, "callbacks": [stop], **QUIET}
    _, epochs = fitted(LogsInSomeEpochs, SEED, **options)
    assert len(epochs) == 3
    result = train_plain(task_from_lightning(LogsInSomeEpochs, seed=SEED, metric="val_loss", **options))
    assert len(result.history) == 3
