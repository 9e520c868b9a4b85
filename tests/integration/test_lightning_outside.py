"""Code of a `LightningModule` that Lightning's loops run outside of the hooks: schedulers, loaders, loggers and workers."""

import random
from functools import partial

import pytest
import torch

pytest.importorskip("lightning", reason="the integration needs Lightning")

from lightning.pytorch import LightningDataModule, LightningModule, seed_everything
from torch.utils.data import DataLoader, Dataset

from hydra_tune import HydraExecutor
from hydra_tune.errors import TaskError
from hydra_tune_lightning import RefusedModuleError, task_from_lightning
from tests.support.lightning_modules import Autoencoder, Plain, SplitSamples, fitted, samples


class ScheduleByEpoch(Autoencoder):
    name = "current_epoch"

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** getattr(self, self.name))
        return [optimizer], [schedule]


class ScheduleByStep(ScheduleByEpoch):
    name = "global_step"


class ChainedSchedule(ScheduleByEpoch):
    """Has a method for a schedule, within another schedule."""

    def factor(self, step):
        return 0.5**self.current_epoch

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        schedules = [
            torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 1),
            torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor),
        ]
        return [optimizer], [torch.optim.lr_scheduler.SequentialLR(optimizer, schedules, [1])]


class PartialSchedule(ScheduleByEpoch):
    def factor(self, base, step):
        return base**self.current_epoch

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, partial(self.factor, 0.5))]


class ScheduleByMethod(ScheduleByEpoch):
    def factor(self, step):
        return 0.5**self.global_step

    def configure_optimizers(self):
        optimizer, factor = torch.optim.SGD(self.parameters(), 0.1), self.factor
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 2 * factor(step))]


class CollatesByEpoch(Autoencoder):
    def collate(self, rows):
        inputs, classes = zip(*rows, strict=True)
        return torch.stack(inputs) / (1 + self.current_epoch), torch.stack(classes)

    def train_dataloader(self):
        return DataLoader(samples(20, 1), 5, collate_fn=self.collate)


class CollatesInTraining(LightningDataModule):
    def collate(self, rows):
        inputs, classes = zip(*rows, strict=True)
        return torch.stack(inputs) * (2 if self.trainer.training else 1), torch.stack(classes)

    def train_dataloader(self):
        return DataLoader(samples(20, 1), 5, collate_fn=self.collate)


@pytest.mark.parametrize(
    ("make", "datamodule", "name"),
    [
        (ScheduleByEpoch, None, "current_epoch"),
        (ScheduleByStep, None, "global_step"),
        (ChainedSchedule, None, "current_epoch"),
        (PartialSchedule, None, "current_epoch"),
        (ScheduleByMethod, None, "global_step"),
        (CollatesByEpoch, None, "current_epoch"),
        (Plain, CollatesInTraining, "training"),
    ],
)
def test_code_outside_of_hooks_that_asks_for_the_place_in_the_training_fails_by_name(make, datamodule, name):
    with HydraExecutor("cpu:1") as pool:
        try:
            task = task_from_lightning(make, datamodule=None if datamodule is None else datamodule(), max_epochs=2)
            error = pool.submit(task).result().error
        except TaskError as refusal:
            error = refusal
    assert isinstance(error, TaskError)
    assert f"reads self.trainer.{name}" in str(error)


def test_persistent_workers_that_sanity_steps_start_are_refused():
    loader = DataLoader(samples(9, 2), 4, num_workers=1, persistent_workers=True)
    with pytest.raises(
        RefusedModuleError, match="num_sanity_val_steps=2 starts the persistent workers of val_dataloader"
    ):
        task_from_lightning(Autoencoder, val_dataloaders=loader, max_epochs=1)


def test_persistent_workers_without_sanity_steps_have_the_bits_of_lightning():
    loader = DataLoader(samples(8, 2), 4, num_workers=1, persistent_workers=True)
    options = {"max_epochs": 2, "num_sanity_val_steps": 0}
    weights, epochs = fitted(Plain, 3, None, (loader, loader), **options)
    task = task_from_lightning(Plain, train_dataloaders=loader, val_dataloaders=loader, seed=3, **options)
    with HydraExecutor("cpu:1") as pool:
        (result,) = pool.run([task])
    assert all(torch.equal(value, weights[name]) for name, value in result.state_dict().items())
    assert [entry["val_loss"] for entry in result.history] == [float(epoch["val_loss"]) for epoch in epochs]


class Noisy(Dataset):
    """Adds numbers that a worker draws."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return samples(16, 1)[index][0] + torch.rand(1) + random.random(), torch.tensor(0)


@pytest.mark.parametrize("workers", [False, True])
def test_workers_draw_as_lightning_seeds_them(monkeypatch, workers):
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    seed_everything(3, workers=workers)
    of_lightning, loader = (DataLoader(Noisy(), 4, num_workers=2) for _ in range(2))
    weights, _ = fitted(Plain, 3, None, (of_lightning,), max_epochs=2, num_sanity_val_steps=0, workers=workers)
    task = task_from_lightning(Plain, train_dataloaders=loader, seed=3, max_epochs=2, num_sanity_val_steps=0)
    assert loader.worker_init_fn is None
    with HydraExecutor("cpu:1") as pool:
        (result,) = pool.run([task])
    assert all(torch.equal(value, weights[name]) for name, value in result.state_dict().items())


class WritesToLogger(Autoencoder):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.logger.log_metrics({"loss": loss.detach()})
        self.logger.experiment.add_scalar("loss", 1.0)
        return loss


class AsksForLogger(Autoencoder):
    def training_step(self, batch, batch_idx):
        assert self.logger is None
        return super().training_step(batch, batch_idx)


class TearsNothingDown(SplitSamples):
    def teardown(self, stage):
        """Leave all as it is."""


@pytest.mark.parametrize(("make", "options"), [(WritesToLogger, {}), (AsksForLogger, {"logger": False})])
@pytest.mark.parametrize("shards", [None, 2])
def test_a_step_finds_a_logger_that_writes_nothing(make, options, shards):
    task = task_from_lightning(make, max_epochs=1, **options)
    with HydraExecutor("cpu:1", num_shards=shards) as pool:
        (result,) = pool.run([task])
    assert result.status == "completed"


def test_options_and_hooks_without_an_effect_are_taken():
    task_from_lightning(Plain, datamodule=TearsNothingDown(), max_epochs=2, min_epochs=1)
    with pytest.raises(RefusedModuleError, match="min_epochs=2"):
        task_from_lightning(Autoencoder, max_epochs=2, min_epochs=2)


def test_a_result_has_no_trainer():
    with HydraExecutor("cpu:1") as pool:
        (result,) = pool.run([task_from_lightning(Autoencoder, max_epochs=1)])
    module = result.module()
    assert isinstance(module, LightningModule)
    assert module._trainer is None
