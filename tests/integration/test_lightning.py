"""A `LightningModule` in the pool gives the bits of `Trainer.fit()`, whole and cut; what would not is refused by name."""

import dataclasses
import logging
import math
import re

import pytest
import torch

pytest.importorskip("lightning", reason="the integration needs Lightning")

from lightning.pytorch import LightningModule, seed_everything
from torch import nn
from torch.utils.data import DataLoader

from hydra_tune import HydraExecutor, train_plain
from hydra_tune.errors import TaskError
from hydra_tune_lightning import RefusedModuleError, module_from_result, save_checkpoint, task_from_lightning
from tests.support.lightning_modules import (
    Autoencoder,
    Classifier,
    Metrics,
    NumberedSteps,
    Plain,
    SplitSamples,
    WithoutValidation,
    fitted,
    samples,
)

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def classifier(**arguments):
    return lambda: Classifier(**arguments)


CASES = {
    "an autoencoder": {"make": Autoencoder},
    "a classifier with metrics": {"make": Classifier},
    "dropout": {"make": classifier(dropout=0.3)},
    "a schedule of epochs": {"make": classifier(scheduling="epoch")},
    "a schedule of steps": {"make": classifier(scheduling="step"), "accumulate_grad_batches": 3},
    "a schedule by the validation loss": {"make": classifier(scheduling="plateau"), "max_epochs": 4},
    "accumulated, the last step of an epoch shorter": {"make": classifier(dropout=0.2), "accumulate_grad_batches": 3},
    "clipped by norm": {"make": Classifier, "gradient_clip_val": 0.1},
    "clipped by value": {
        "make": classifier(scheduling="step"),
        "gradient_clip_val": 0.01,
        "gradient_clip_algorithm": "value",
    },
    "bfloat16": {"make": classifier(dropout=0.1), "precision": "bf16-mixed"},
    "metrics of lists and sums": {"make": Metrics, "metric": "val_mse"},
    "steps that read their number": {"make": NumberedSteps},
    "a datamodule that splits": {"make": Plain, "datamodule": SplitSamples},
    "loaders as arguments": {
        "make": Plain,
        "loaders": lambda: (DataLoader(samples(20, 1), 6, shuffle=True), DataLoader(samples(9, 2), 4, shuffle=True)),
    },
    "no validation": {"make": WithoutValidation},
    "sanity steps": {"make": classifier(dropout=0.3), "num_sanity_val_steps": 2},
}
SEED = 3


class Case:
    """A case: `fit` gives what Lightning does, `task` describes the same training."""

    def __init__(self, make, datamodule=None, loaders=tuple, metric=None, **options):
        self.make, self.datamodule, self.loaders, self.metric = make, datamodule, loaders, metric
        self.options = {"max_epochs": 2, "num_sanity_val_steps": 0, **options}

    def fit(self):
        datamodule = None if self.datamodule is None else self.datamodule()
        return fitted(self.make, SEED, datamodule, self.loaders(), **self.options)

    def task(self):
        loaders = dict(zip(("train_dataloaders", "val_dataloaders"), self.loaders(), strict=False))
        datamodule = None if self.datamodule is None else self.datamodule()
        return task_from_lightning(
            self.make, datamodule=datamodule, **loaders, seed=SEED, metric=self.metric, **self.options
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


def assert_same(result, weights, epochs):
    state = result.state_dict()
    assert list(state) == list(weights)
    assert [name for name, value in weights.items() if not torch.equal(value, state[name])] == []
    assert len(result.history) == len(epochs)
    for entry, values in zip(result.history, epochs, strict=True):
        reported = {name: value for name, value in entry.items() if name.startswith("val_")}
        logged = {name: value for name, value in values.items() if not name.startswith(("train_", "twice"))}
        assert reported == {"val_" + name.removeprefix("val_"): value for name, value in logged.items()}


def some(*fast):
    """All cases, those not named among the slow tests."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize("name", CASES)
def test_the_task_is_the_training_of_lightning(stock, name):
    case, weights, epochs = stock(name)
    task = case.task()
    assert_same(train_plain(task), weights, epochs)
    with HydraExecutor("cpu:1") as pool:
        (result,) = pool.run([task])
    assert_same(result, weights, epochs)


@pytest.mark.parametrize("name", some("an autoencoder", "clipped by value"))
def test_a_model_that_is_cut_has_the_same_bits(stock, name):
    case, weights, epochs = stock(name)
    with HydraExecutor("cpu:2", num_shards=2) as pool:
        (result,) = pool.run([case.task()])
    assert result.num_shards == 2
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
