"""Functions that read the trial's own model between steps read what it has learned: such trials are not fused."""

import importlib
import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hydra_tune import HydraExecutor, TrainTask, train_plain
from tests.support.gathered import gather

GENERATOR = torch.Generator().manual_seed(1)
DATA = TensorDataset(torch.randn(64, 8, generator=GENERATOR), torch.randint(4, (64,), generator=GENERATOR))
POOLS = [{}, {"num_shards": 2}, {"fusion": "on", "fusion_size": 2}]


def outputs(module, batch):
    return {"outputs": module(batch[0])}


class Held:
    """Holds the trial's model and looks at it."""

    def __init__(self):
        self.seen = []

    def build(self):
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        return self.model

    def norm(self):
        self.seen.append(float(sum(parameter.detach().norm() for parameter in self.model.parameters())))
        return self.seen[-1]

    def finish(self, _collected):
        return {"norm": self.norm()}

    def stop(self, _history):
        self.norm()
        return False


def task(held, way, seed):
    of_way = {
        "finish": {"evaluate": outputs, "finish": held.finish, "metric": "val_norm"},
        "stop": {"stop": held.stop},
    }
    return TrainTask(
        model=held.build,
        optimizer=partial(torch.optim.SGD, lr=0.1 * (seed + 1)),
        loss=functional.cross_entropy,
        train=DATA,
        validate=DATA,
        batch_size=8,
        epochs=2,
        seed=seed,
        **of_way[way],
    )


@pytest.mark.parametrize("way", ["finish", "stop"])
@pytest.mark.parametrize("options", POOLS, ids=str)
def test_they_read_what_a_plain_loop_has_learned(way, options, monkeypatch, caplog):
    gather(monkeypatch, lambda count: count >= 2)
    held, plain = [Held(), Held()], [Held(), Held()]
    with HydraExecutor("cpu:1", **options) as pool, caplog.at_level(logging.INFO, "hydra_tune.fusion"):
        results = pool.run([task(each, way, seed) for seed, each in enumerate(held)])
    for seed, each in enumerate(plain):
        train_plain(task(each, way, seed))
    assert [each.seen for each in held] == [each.seen for each in plain]
    assert len(held[0].seen) == 2
    assert {result.group_size for result in results} == {1}
    assert ("fusion" in options) == (f"its {way}= holds the model or the optimizer" in caplog.text)


def patched(double):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    double(model[0])
    return model


@pytest.mark.parametrize("options", POOLS, ids=str)
def test_a_package_that_replaces_a_forward(options, monkeypatch, tmp_path):
    """A copy of the model has a function of its own, which calls the part of the copy; fused trials round otherwise."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "package_that_doubles.py").write_text(
        "def double(part):\n    forward = part.forward\n    part.forward = lambda x: 2 * forward(x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    double = importlib.import_module("package_that_doubles").double
    tasks = [
        TrainTask(
            model=partial(patched, double),
            optimizer=partial(torch.optim.SGD, lr=0.1),
            loss=functional.cross_entropy,
            train=DATA,
            batch_size=8,
            seed=seed,
        )
        for seed in range(2)
    ]
    with HydraExecutor("cpu:1", **options) as pool:
        results = pool.run(tasks)
    tolerance = 1e-6 if "fusion" in options else 0.0
    for result, each in zip(results, tasks, strict=True):
        assert result.metrics == pytest.approx(train_plain(each).metrics, rel=tolerance, abs=0.0)
