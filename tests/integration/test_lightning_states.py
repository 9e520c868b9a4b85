"""Lists, attributes and metrics that a validation fills: the pool gives the bits of `Trainer.fit()`, or an error by name."""

import logging
from functools import partial
from typing import ClassVar

import pytest
import torch

pytest.importorskip("lightning", reason="the integration needs Lightning")

import torchmetrics
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from hydra_tune import HydraExecutor, train_plain
from hydra_tune.errors import MetricError
from hydra_tune_lightning import task_from_lightning
from tests.support.lightning_modules import CLASSES, Classifier, fitted, samples

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


class ListOfClass(Classifier):
    """Keeps values in a list of the class, as many modules of notebooks do."""

    outputs: ClassVar[list] = []
    names: ClassVar[list] = ["a", "b"]

    def validation_step(self, batch, batch_idx):
        self.outputs.append(cross_entropy(self(batch[0]), batch[1]))

    def on_validation_epoch_end(self):
        self.log("val_loss", torch.stack(self.outputs).mean())
        self.log("val_count", float(len(self.outputs) * len(self.names)))
        self.outputs.clear()

    def val_dataloader(self):
        return DataLoader(samples(80, 2), 1)


def test_trials_at_once_do_not_share_a_list_of_their_class():
    weights, epochs = fitted(ListOfClass, **OPTIONS)
    tasks = [task_from_lightning(ListOfClass, seed=3, **OPTIONS) for _ in range(2)]
    with HydraExecutor("cpu:2") as pool:
        results = pool.run(tasks)
    for result in results:
        assert [entry["val_loss"] for entry in result.history] == [epoch["val_loss"] for epoch in epochs]
        assert [entry["val_count"] for entry in result.history] == [160.0, 160.0]
        assert all(torch.equal(value, result.state_dict()[name]) for name, value in weights.items())
    assert ListOfClass.outputs == []


def counts(self, batch):
    self.count += len(batch)


def keeps(self, batch):
    self.sums["count"].append(len(batch))


def counts_in_the_class(self, batch):
    type(self).total += len(batch)


@pytest.mark.parametrize(
    ("step", "value", "name"),
    [
        (counts, lambda self: self.count, "count"),
        (keeps, lambda self: len(self.sums["count"]), "sums"),
        (counts_in_the_class, lambda self: self.total, "total"),
    ],
)
def test_a_hook_that_reads_a_changed_value_of_the_class_fails_by_name(step, value, name):
    class OfClass(Classifier):
        count, total = 0, 0
        sums: ClassVar[dict] = {"count": []}
        setting = 3

        def validation_step(self, batch, batch_idx):
            step(self, batch)

        def on_validation_epoch_end(self):
            self.log("val_loss", float(self.setting * value(self)))

    with pytest.raises(MetricError, match=f"'OfClass' object has no attribute '{name}'"):
        train_plain(task_from_lightning(OfClass, max_epochs=1))


class Evaluator(nn.Module):
    """Holds a metric and a list, and may count."""

    scores_of_class: ClassVar[list] = []

    def __init__(self):
        super().__init__()
        self.accuracy, self.scores, self.count = MulticlassAccuracy(CLASSES, average="micro"), [], 0

    def update(self, logits, labels):
        self.accuracy.update(logits, labels)
        self.scores.append(cross_entropy(logits, labels).item())
        self.scores_of_class.append(len(labels))
        self.count += 1


class Evaluated(Classifier):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"evaluator": Evaluator()})
        self.alias = self.parts["evaluator"]
        self.rates = MetricCollection({"top2": MulticlassAccuracy(CLASSES, top_k=2)}, compute_groups=False)

    def validation_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.parts["evaluator"].update(logits, batch[1])
        self.rates.update(logits, batch[1])

    def on_validation_epoch_end(self):
        evaluator = self.alias
        self.log("val_loss", sum(evaluator.scores) / sum(evaluator.scores_of_class))
        self.log("val_acc", evaluator.accuracy.compute())
        self.log_dict(self.rates.compute())
        self.rates.reset()
        evaluator.accuracy.reset()
        evaluator.scores.clear()
        evaluator.scores_of_class.clear()


def test_lists_of_a_part_with_a_metric_are_those_of_lightning():
    assert_as_lightning(Evaluated, ("val_loss", "val_acc"))


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (lambda self: self.log("val_loss", float(self.alias.count)), "'Evaluator' object has no attribute 'count'"),
        (
            lambda self: (self.alias.accuracy.reset(), self.rates.reset()),
            "leaves values in self.parts.evaluator.scores",
        ),
    ],
)
def test_a_hook_that_reads_a_count_of_a_part_or_leaves_its_list_fails_by_name(hook, message):
    make = type("Own", (Evaluated,), {"on_validation_epoch_end": hook})
    with pytest.raises(MetricError, match=message):
        train_plain(task_from_lightning(make, max_epochs=1))


class Total(torchmetrics.Metric):
    """A sum of losses, from which subclasses compute otherwise."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.values, self.count = [], 0

    def update(self, logits, labels):
        self.total += cross_entropy(logits, labels).detach()

    def compute(self):
        return self.total


class ByUpdates(Total):
    def compute(self):
        return self.total / self._update_count


class WithMetric(Classifier):
    def __init__(self, kind):
        super().__init__()
        self.own = kind()

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.train_accuracy.update(logits, batch[1])
        return cross_entropy(logits, batch[1])

    def validation_step(self, batch, batch_idx):
        self.own.update(self(batch[0]), batch[1])
        self.log("val_loss", self.own)


class AtEnd(WithMetric):
    def validation_step(self, batch, batch_idx):
        self.own.update(self(batch[0]), batch[1])

    def on_validation_epoch_end(self):
        self.log("val_loss", self.own.compute())
        self.own.reset()


@pytest.mark.parametrize("make", [WithMetric, AtEnd])
def test_a_metric_may_compute_from_the_number_of_its_updates(make):
    assert_as_lightning(partial(make, ByUpdates), ("val_loss",))


def test_a_training_log_that_computes_from_the_number_of_updates_fails_by_name():
    class Logged(WithMetric):
        def training_step(self, batch, batch_idx):
            logits = self(batch[0])
            self.own.update(logits, batch[1])
            self.log("train_own", self.own, on_epoch=True)
            return cross_entropy(logits, batch[1])

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", cross_entropy(self(batch[0]), batch[1]))

    task = task_from_lightning(partial(Logged, ByUpdates), max_epochs=1, train_logs=["train_own"])
    with pytest.raises(MetricError, match="'train_own' computes from the number of its updates"):
        train_plain(task)


class Listing(Total):
    def update(self, logits, labels):
        self.values.append(cross_entropy(logits, labels))


class Counting(Total):
    def update(self, logits, labels):
        super().update(logits, labels)
        self.count += 1


@pytest.mark.parametrize("make", [WithMetric, AtEnd])
@pytest.mark.parametrize(("kind", "name"), [(Listing, "values"), (Counting, "count")])
def test_a_metric_that_keeps_more_than_states_fails_by_name(make, kind, name):
    message = rf"metric 'own' \({kind.__name__}\) changes self.{name}, which is no state"
    with pytest.raises(MetricError, match=message):
        train_plain(task_from_lightning(partial(make, kind), max_epochs=1))


class Averaging(Total):
    def update(self, logits, labels):
        self.total = 0.9 * self.total + 0.1 * cross_entropy(logits, labels).detach()


class Last(Total):
    def __init__(self):
        super().__init__()
        self.add_state("last", torch.tensor(0.0), dist_reduce_fx="max")

    def update(self, logits, labels):
        self.last = cross_entropy(logits, labels).detach()


class Replacing(Total):
    def __init__(self):
        super().__init__()
        self.add_state("parts", [], dist_reduce_fx="cat")

    def update(self, logits, labels):
        self.parts = [logits]


class FromOne(Total):
    def __init__(self):
        super().__init__()
        self.add_state("total", torch.tensor(1.0), dist_reduce_fx="sum")


@pytest.mark.parametrize("make", [WithMetric, AtEnd])
@pytest.mark.parametrize(
    ("kind", "state"), [(Averaging, "total"), (Last, "last"), (Replacing, "parts"), (FromOne, "total")]
)
@pytest.mark.parametrize("options", [{}, {"devices": "cpu:2", "num_shards": 2}], ids=str)
def test_a_metric_whose_update_does_not_add_fails_by_name(make, kind, state, options):
    options = dict(options)
    with HydraExecutor(options.pop("devices", "cpu:1"), **options) as pool:
        task = task_from_lightning(partial(make, kind), max_epochs=1)
        errors = [pool.submit(task).result().error for _ in range(2)]
    for error in errors:
        assert isinstance(error, MetricError)
        assert f"the metric 'own' ({kind.__name__}) does not add a batch to the state {state!r}" in str(error)
