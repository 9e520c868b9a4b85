"""Batches that are dataclasses train as tuples of the same tensors do: in own code, cut, in pieces and fused."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from hydra_tune import HydraExecutor, TrainTask, train_plain
from hydra_tune.train.data.handles import moved, num_samples
from tests.support.gathered import gather


@dataclass
class Weights:
    scale: float
    of_samples: torch.Tensor


@dataclass(frozen=True)
class Texts:
    """Refuses to be changed, and says so if it is made anew."""

    embedded: torch.Tensor
    labels: torch.Tensor
    weights: Weights

    def __post_init__(self):
        assert len(self.embedded) == len(self.labels), "made of what belongs together"


def draw(make):
    generator = torch.Generator().manual_seed(0)
    for size in (8, 8, 8, 5):
        embedded = torch.randn(size, 16, generator=generator, dtype=torch.float64)
        yield make(embedded, torch.randint(4, (size,), generator=generator), torch.rand(size, 1, generator=generator))


def dataclasses():
    return draw(lambda embedded, labels, weights: Texts(embedded, labels, Weights(0.5, weights)))


def tuples():
    return draw(lambda *parts: parts)


def of_dataclass(module, batch):
    return functional.cross_entropy(
        module(batch.embedded * batch.weights.of_samples * batch.weights.scale), batch.labels
    )


def of_tuple(module, batch):
    return functional.cross_entropy(module(batch[0] * batch[2] * 0.5), batch[1])


def task(train, step, seed=0, **changes):
    def model():
        return nn.Sequential(
            nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
        ).double()

    arguments = {
        "optimizer": partial(torch.optim.AdamW, lr=1e-3),
        "validate": train,
        "epochs": 3,
        "seed": seed,
    } | changes
    return TrainTask(model=model, train=train, step=step, evaluate=lambda *batch: {"loss": step(*batch)}, **arguments)


@pytest.mark.cases(1)
@pytest.mark.parametrize("changes", [{}, {"accumulate": 2}, {"split_batches": 2}], ids=str)
@pytest.mark.parametrize("options", [{}, {"num_shards": 3}, {"num_shards": 3, "device_memory": "240KiB"}], ids=str)
def test_the_bits_are_those_of_tuples(changes, options):
    with HydraExecutor("cpu:1", **options) as pool:
        (result,) = pool.run([task(dataclasses, of_dataclass, **changes)])
    expected = train_plain(task(tuples, of_tuple, **changes))
    assert result.metrics == expected.metrics
    assert all(tensor.equal(expected.state_dict()[name]) for name, tensor in result.state_dict().items())
    assert result.num_shards == options.get("num_shards", 1)


@pytest.mark.cases(1 / 3)
def test_trials_are_fused(monkeypatch):
    gather(monkeypatch, lambda count: count >= 2)
    with HydraExecutor("cpu:1", fusion="on", fusion_size=2) as pool:
        results = pool.run([task(dataclasses, of_dataclass, seed) for seed in range(2)])
    for seed, result in enumerate(results):
        assert result.group_size == 2
        assert result.metrics == pytest.approx(train_plain(task(tuples, of_tuple, seed)).metrics, rel=1e-9)


def test_samples_are_counted_and_moved_inside():
    (batch, *_) = dataclasses()
    assert num_samples(batch) == 8
    there = moved(batch, torch.device("meta"))
    assert {there.embedded.device.type, there.labels.device.type, there.weights.of_samples.device.type} == {"meta"}
    assert there.weights.scale == 0.5
    assert batch.embedded.is_cpu, "the batch itself stays"
