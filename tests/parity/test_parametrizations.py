"""Parametrized weights: trials on several devices that cache the weights of a step have the bits of the plain loop."""

import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal, weight_norm

from hydra_tune import HydraExecutor, TrainTask, train_plain
from tests.parity.exact import differences, without_seconds


class Recurrent(nn.Module):
    """Uses a parametrized weight several times in a forward."""

    def __init__(self, parametrization):
        super().__init__()
        self.cell, self.head = parametrization(nn.Linear(8, 8)), nn.Linear(8, 3)

    def forward(self, inputs):
        for _ in range(3):
            inputs = torch.tanh(self.cell(inputs))
        return self.head(inputs)


def step(model, batch):
    with parametrize.cached():
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


def uncached_step(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def error(model, batch):
    with parametrize.cached():
        return {"error": (model(batch[0]).argmax(dim=1) != batch[1]).float().mean()}


@pytest.fixture(autouse=True)
def _threads_often_change():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.cases(1)
@pytest.mark.parametrize("parametrization", [weight_norm, orthogonal])
def test_trials_on_several_devices_have_their_own_weights(parametrization):
    generator = torch.Generator().manual_seed(1)
    inputs, classes = torch.randn(40, 8, generator=generator), torch.randint(3, (40,), generator=generator)
    data = [*zip(inputs.split(4), classes.split(4), strict=True)]
    tasks = [
        TrainTask(
            model=partial(Recurrent, parametrization),
            optimizer=partial(torch.optim.SGD, lr=0.1),
            train=lambda: data,
            step=uncached_step if seed % 3 == 2 else step,
            validate=lambda: data,
            evaluate=error,
            metric="val_error",
            epochs=4,
            seed=seed,
        )
        for seed in range(6)
    ]
    with HydraExecutor("cpu:2") as pool:
        results = pool.run(tasks)
    for task, result in zip(tasks, results, strict=True):
        plain = train_plain(task)
        assert list(differences(plain.state_dict(), result.state_dict())) == []
        assert without_seconds(plain.history) == without_seconds(result.history)


def test_a_region_ends_with_its_weights():
    layer = weight_norm(nn.Linear(2, 2))
    with parametrize.cached():
        with parametrize.cached():
            first = layer.weight
        assert layer.weight is first
    assert layer.weight is not layer.weight
    with parametrize.cached():
        assert layer.weight is not first
        assert layer.weight is layer.weight
