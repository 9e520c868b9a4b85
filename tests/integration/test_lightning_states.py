"""Lists, attributes and metrics that a validation fills: the pool gives the bits of `Trainer.fit()`, or an error by name."""

import logging

import pytest
import torch

pytest.importorskip("lightning", reason="the integration needs Lightning")

from torch.nn.functional import cross_entropy

from hydra_tune import HydraExecutor
from hydra_tune_lightning import task_from_lightning
from tests.support.lightning_modules import Classifier, fitted

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

OPTIONS = {"max_epochs": 2, "num_sanity_val_steps": 0}


def assert_as_lightning(make, values, *, train_logs=(), **pool_options):
    """Assert that a trial has the weights and some values of Lightning, and return the trial's result."""
    weights, epochs = fitted(make, **OPTIONS)
    with HydraExecutor(pool_options.pop("devices", "cpu:1"), **pool_options) as pool:
        (result,) = pool.run([task_from_lightning(make, seed=3, metric=values[0], train_logs=train_logs, **OPTIONS)])
    assert all(torch.equal(value, result.state_dict()[name]) for name, value in weights.items())
    found = [{name: entry[name] for name in values} for entry in result.history]
    assert found == [{name: epoch[name] for name in values} for epoch in epochs]
    return result


class Numbers(Classifier):
    """Keeps numbers of Python, as many as a batch has samples; the last batch is smaller."""

    def __init__(self):
        super().__init__()
        self.classes, self.losses, self.flags = [], [], []

    def validation_step(self, batch, batch_idx):
        inputs, labels = batch
        logits = self(inputs)
        loss = cross_entropy(logits, labels)
        self.classes.extend(logits.argmax(dim=1).tolist())
        self.losses.append((loss.item(), len(labels)))
        self.flags.append(loss.item() > 1.0)

    def on_validation_epoch_end(self):
        size = sum(size for _, size in self.losses)
        self.log("val_loss", sum(loss * size for loss, size in self.losses) / size)
        self.log("val_classes", float(len(set(self.classes))))
        self.log("val_order", float(sum(place * label for place, label in enumerate(self.classes))))
        self.log("val_types", float(len({type(each) for each in (*self.classes, *self.losses[0], *self.flags)})))
        self.log("val_high", float(self.flags.count(True)))
        for each in (self.classes, self.losses, self.flags):
            each.clear()


NUMBERS = ("val_loss", "val_classes", "val_order", "val_types", "val_high")


@pytest.mark.parametrize("options", [{}, {"fusion": "on"}, {"devices": "cpu:2", "num_shards": 2}], ids=str)
def test_numbers_of_a_list_are_those_of_lightning(options):
    assert_as_lightning(Numbers, NUMBERS, **options)


class Forms(Classifier):
    """Appends items of other forms in each batch, tensors in rows, and items without values."""

    def __init__(self):
        super().__init__()
        self.outputs = []

    def validation_step(self, batch, batch_idx):
        inputs, labels = batch
        logits = self(inputs)
        self.outputs.extend(logits)
        self.outputs.append([] if len(labels) % 2 else {"labels": labels, "half": (logits.mean().double(), 0.5)})
        if batch_idx != 1:
            self.outputs.append(labels[labels == 1])

    def on_validation_epoch_end(self):
        rows = [each for each in self.outputs if isinstance(each, torch.Tensor)]
        places = [place for place, each in enumerate(self.outputs) if isinstance(each, list | dict)]
        self.log("val_loss", torch.cat([row.double().reshape(-1) for row in rows]).std())
        self.log("val_place", float(sum(place * (number + 1) for number, place in enumerate(places))))
        self.log("val_count", float(len(self.outputs)))
        self.log("val_shapes", float(sum((row.ndim + len(row)) * place for place, row in enumerate(rows))))
        self.outputs.clear()


def test_items_of_a_list_may_have_another_form_in_each_batch():
    assert_as_lightning(Forms, ("val_loss", "val_place", "val_count", "val_shapes"))
