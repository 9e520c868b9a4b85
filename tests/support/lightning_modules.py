"""Small `LightningModule`s and datamodules, and `fitted`: what a user of Lightning runs.

Nothing here knows of hydra-tune.
"""

import copy
import functools
import warnings

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

FEATURES, CLASSES = 12, 3


def samples(count, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(inputs, inputs[:, :CLASSES].argmax(dim=1))


class Loaders(LightningModule):
    """Has 38 samples in batches of 5, the last of which is smaller, and 17 to validate."""

    def train_dataloader(self):
        return DataLoader(samples(38, 1), 5, shuffle=True)

    def val_dataloader(self):
        return DataLoader(samples(17, 2), 7)


class Autoencoder(Loaders):
    def __init__(self, width=8, lr=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, 4))
        self.decoder = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, FEATURES))

    def forward(self, inputs):
        return self.decoder(self.encoder(inputs))

    def training_step(self, batch, batch_idx):
        inputs, _ = batch
        loss = functional.mse_loss(self(inputs), inputs)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        inputs, _ = batch
        self.log("val_loss", functional.mse_loss(self(inputs), inputs))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Recurrent(Autoencoder):
    """Uses a weight three times."""

    def __init__(self):
        super().__init__()
        self.again = nn.Linear(FEATURES, FEATURES)

    def forward(self, inputs):
        for _ in range(3):
            inputs = torch.tanh(self.again(inputs))
        return super().forward(inputs)


class Classifier(Loaders):
    """A classifier with dropout, a dict of a loss, and metrics.

    Args:
        scheduling: what configure_optimizers returns beside the optimizer.
    """

    def __init__(self, width=16, dropout=0.0, scheduling=None, lr=0.05, momentum=0.9):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, CLASSES)
        )
        self.train_accuracy = MulticlassAccuracy(CLASSES, average="micro", validate_args=False)
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro", validate_args=False)

    def forward(self, inputs):
        return self.layers(inputs)

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        logits = self(inputs)
        loss = functional.cross_entropy(logits, labels)
        self.train_accuracy(logits, labels)
        self.log("train_acc", self.train_accuracy, on_step=True, on_epoch=True)
        self.log_dict({"train_loss": loss, "twice": 2 * loss}, on_epoch=True)
        return {"loss": loss, "logits": logits}

    def validation_step(self, batch, batch_idx):
        inputs, labels = batch
        logits = self(inputs)
        loss = functional.cross_entropy(logits, labels)
        self.accuracy(logits, labels)
        self.log("val_acc", self.accuracy, prog_bar=True)
        self.log_dict({"val_loss": loss, "val_double": 2 * loss}, on_step=True, on_epoch=True)
        self.log("val_logit", logits.mean())
        self.log("val_max", loss, reduce_fx="max")
        self.log("val_min", loss, reduce_fx=torch.min)
        self.log("val_sum", loss, reduce_fx="sum")
        self.log("val_plain", 0.1 * len(labels), batch_size=3)
        self.log("on a step alone", loss, on_step=True, on_epoch=False)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=self.hparams.momentum)
        return optimizer if self.hparams.scheduling is None else SCHEDULES[self.hparams.scheduling](self, optimizer)


SCHEDULES = {
    "epoch": lambda _, optimizer: ([optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]),
    "step": lambda module, optimizer: {
        "optimizer": optimizer,
        "lr_scheduler": {
            "scheduler": torch.optim.lr_scheduler.OneCycleLR(
                optimizer, 0.1, total_steps=int(module.trainer.estimated_stepping_batches)
            ),
            "interval": "step",
        },
    },
    "plateau": lambda _, optimizer: {
        "optimizer": optimizer,
        "lr_scheduler": {
            "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5),
            "monitor": "val_loss",
        },
    },
}


class Metrics(Classifier):
    """Metrics whose states are lists and float sums, in a collection and by update()."""

    def __init__(self):
        super().__init__(scheduling="epoch")
        self.ranking = MulticlassAUROC(CLASSES, validate_args=False)
        metrics = {"mse": MeanSquaredError(), "top2": MulticlassAccuracy(CLASSES, top_k=2, validate_args=False)}
        self.of_classes = MetricCollection({"top2": metrics["top2"]}, compute_groups=False)
        self.error = metrics["mse"]

    def validation_step(self, batch, batch_idx):
        inputs, labels = batch
        logits = self(inputs)
        self.ranking.update(logits.softmax(dim=1), labels)
        self.of_classes.update(logits, labels)
        self.error(logits.softmax(dim=1), functional.one_hot(labels, CLASSES).float())
        self.log("val_auroc", self.ranking)
        self.log_dict(self.of_classes, prog_bar=True)
        self.log("val_mse", self.error, on_step=True, on_epoch=True)


class ValidationEnd(Classifier):
    """Computes the values of a validation after its last batch, as the guide of Lightning 2 says."""

    def __init__(self, **options):
        super().__init__(**options)
        self.outputs, self.losses = [], []

    def validation_step(self, batch, batch_idx):
        inputs, labels = batch
        logits = self(inputs)
        loss = functional.cross_entropy(logits, labels)
        self.accuracy.update(logits, labels)
        self.outputs.append({"logits": logits, "labels": labels, "size": len(labels)})
        self.losses.append(loss)
        return loss

    def on_validation_epoch_end(self):
        logits = torch.cat([each["logits"] for each in self.outputs])
        labels = torch.cat([each["labels"] for each in self.outputs])
        self.log("val_loss", torch.stack(self.losses).mean(), prog_bar=True)
        self.log_dict(
            {"whole": functional.cross_entropy(logits, labels), "size": sum(each["size"] for each in self.outputs)}
        )
        self.log("val_acc", self.accuracy.compute(), sync_dist=True)
        self.accuracy.reset()
        self.outputs.clear()
        self.losses = []


class TrainLogs(Classifier):
    """Logs in training_step by every kind of reduction."""

    def __init__(self, **options):
        super().__init__(**options)
        self.mean = MeanMetric(nan_strategy="disable")

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        logits = self(inputs)
        loss = functional.cross_entropy(logits, labels)
        self.train_accuracy(logits, labels)
        self.mean.update(loss)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        self.log("train_acc", self.train_accuracy, on_step=True, on_epoch=True)
        self.log("train_acc_last", self.train_accuracy)
        self.log("train/mean", self.mean, on_step=False, on_epoch=True)
        self.log("train_last", loss, prog_bar=True)
        self.log("train_max", logits.max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("train_min", logits.min().bfloat16(), on_epoch=True, reduce_fx=torch.min)
        self.log("train_sum", loss, on_epoch=True, reduce_fx="sum")
        self.log("train_double", loss.double(), on_epoch=True)
        self.log("train_sized", 0.1, on_epoch=True, batch_size=3)
        self.log("twice", 2 * loss, on_epoch=True)
        return loss


TRAIN_LOGS = (
    "train_loss",
    "train_acc",
    "train_acc_last",
    "train/mean",
    "train_last",
    "train_max",
    "train_min",
    "train_sum",
    "train_double",
    "train_sized",
)


class NumberedSteps(Classifier):
    """Reads the number of the batch."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)["loss"] * (0.5 if batch_idx == 0 else 1.0)

    def validation_step(self, batch, batch_idx):
        self.log("val_number", float(batch_idx))
        super().validation_step(batch, batch_idx)


def weighs_odd_batches(step):
    @functools.wraps(step)
    def weighed(self, batch, batch_idx):
        found = step(self, batch, batch_idx)
        return {"loss": found["loss"] * (2.0 if batch_idx % 2 else 1.0)}

    return weighed


class DecoratedStep(Classifier):
    """Has a step that does not read the number of the batch, under a decorator that does."""

    training_step = weighs_odd_batches(Classifier.training_step)


class DecoderAlone(Autoencoder):
    """Leaves the encoder as it is, without freezing it."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.decoder.parameters(), lr=0.1)


class DecayGroups(Autoencoder):
    """Has weights and biases in groups of their own, so in another order than the module."""

    def configure_optimizers(self):
        biases = [p for p in self.parameters() if p.ndim == 1]
        weights = [p for p in self.parameters() if p.ndim > 1]
        return torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": weights}], lr=0.01)


class OtherArguments(NumberedSteps):
    """Takes the number among other arguments, and a batch alone."""

    def training_step(self, *arguments):
        return super().training_step(*arguments)

    def validation_step(self, batch):
        Classifier.validation_step(self, batch, 0)


class SplitSamples(LightningDataModule):
    """Splits in `setup`, which draws from the global stream, as many do."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def prepare_data(self):
        self.calls.append("prepare_data")

    def setup(self, stage):
        self.calls.append(stage)
        self.parts = random_split(samples(55, 3), [38, 17])

    def train_dataloader(self):
        return DataLoader(self.parts[0], 5, shuffle=True, generator=torch.Generator().manual_seed(7))

    def val_dataloader(self):
        return DataLoader(self.parts[1], 7)


class Plain(Classifier):
    """Without loaders of its own, and with layers that `setup` makes."""

    train_dataloader = LightningModule.train_dataloader
    val_dataloader = LightningModule.val_dataloader

    def setup(self, stage):
        self.layers.append(nn.Linear(CLASSES, CLASSES))


class WithoutValidation(Autoencoder):
    validation_step = LightningModule.validation_step


class _History(Callback):
    def __init__(self):
        self.epochs = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.epochs.append({name: value.item() for name, value in trainer.callback_metrics.items()})


def fitted(make_module, seed=3, datamodule=None, loaders=(), *, accelerator="cpu", workers=False, **options):
    """Return the weights after `Trainer.fit`, and the values of each epoch.

    Args:
        make_module: builds the module.
        seed: seed of everything.
        datamodule: a datamodule.
        loaders: loaders in place of those.
        accelerator: option of the trainer.
        workers: whether Lightning seeds the workers of loaders.
        options: further options of the trainer.
    """
    history = _History()
    callbacks = copy.deepcopy(options.pop("callbacks", []))
    with torch.random.fork_rng(), warnings.catch_warnings():
        # Hints of Lightning's, such as that loaders have no workers.
        warnings.simplefilter("ignore")
        seed_everything(seed, workers=workers)
        module = make_module()
        trainer = Trainer(
            accelerator=accelerator,
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[history, *callbacks],
            **options,
        )
        trainer.fit(module, *loaders, datamodule=datamodule)
    return {name: value.clone() for name, value in module.state_dict().items()}, history.epochs
