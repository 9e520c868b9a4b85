"""Members with batches of other sizes are computed together where no sample depends on another, and are as alone."""

import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, AdamW
from torch.utils.data import TensorDataset

from hydra_tune import TrainTask
from hydra_tune.fusion.compile.batched_plan import is_traced
from tests.unit.fusion.groups import Run, assert_as_plain

_GENERATOR = torch.Generator().manual_seed(1)
SAMPLES = 72  # 16, 24 and 32 leave last batches of 8, 24 and 8
X = torch.randn(SAMPLES, 5, 8, generator=_GENERATOR, dtype=torch.float64)
Y = torch.randint(4, (SAMPLES,), generator=_GENERATOR)


class Mlp(nn.Module):
    def __init__(self, between=nn.Identity) -> None:
        super().__init__()
        self.first, self.between, self.head = nn.Linear(40, 16, bias=False), between(), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(functional.leaky_relu(self.between(self.first(x.flatten(1)))))


class Transformer(nn.Module):
    """With positions and a class token."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.token, self.positions = nn.Parameter(torch.zeros(1, 1, 8)), nn.Parameter(torch.randn(6, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.encoder(x)[:, 0])


class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.GRU(8, 6, num_layers=2, batch_first=True), nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.inner(x)[0][:, -1])


def of(kind):
    return kind().double()


def small(kind=Mlp, **changes):
    arguments = {
        "model": partial(of, kind),
        "optimizer": partial(SGD, lr=0.05, momentum=0.9),
        "train": TensorDataset(X, Y),
        "validate": TensorDataset(X[:40], Y[:40]),
        "batch_size": 16,
        "loss": functional.cross_entropy,
        "epochs": 3,
    }
    return TrainTask(**(arguments | changes))


def of_sizes(kind, sizes=(16, 24, 32), **changes):
    return [small(kind, batch_size=size, seed=seed, **changes) for seed, size in enumerate(sizes)]


def is_always_one(run):
    return run.most_kinds == 1


def assert_all_as_plain(run, tasks):
    assert len(set(run.keys)) == 1
    for index, task in enumerate(tasks):
        assert_as_plain(run, index, task)


@pytest.mark.parametrize(
    ("kind", "sizes", "optimizer"),
    [
        (Mlp, (16, 24, 32), partial(AdamW, lr=1e-2)),
        pytest.param(Transformer, (16, 24), partial(SGD, lr=0.05, momentum=0.9), marks=pytest.mark.slow),
        pytest.param(Gru, (16, 24, 32), partial(AdamW, lr=1e-2), marks=pytest.mark.slow),
        pytest.param(Gru, (16, 24, 32), partial(SGD, lr=0.05, momentum=0.9), marks=pytest.mark.slow),
    ],
)
def test_members_with_other_batch_sizes_are_as_alone(kind, sizes, optimizer):
    """Also the last, smaller batch of one's epoch beside the whole ones of the others."""
    tasks = of_sizes(kind, sizes, optimizer=optimizer, epochs=2, validate=None, metric="train_loss")
    run = Run(tasks)
    assert_all_as_plain(run, tasks)
    assert is_always_one(run)
    assert all(is_traced(whole.prepared.plan) for (whole,) in run.trial._places.stacked.values())


def test_evaluations_of_other_sizes_are_one_as_well():
    tasks = [
        small(
            batch_size=n,
            seed=n,
            train=TensorDataset(X[: 4 * n], Y[: 4 * n]),
            validate=TensorDataset(X[: 2 * n], Y[: 2 * n]),
        )
        for n in (8, 12)
    ]
    run = Run(tasks)
    assert_all_as_plain(run, tasks)
    assert is_always_one(run)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "loss",
    [
        partial(functional.cross_entropy, reduction="sum"),
        partial(functional.cross_entropy, ignore_index=1),
        lambda made, y: functional.nll_loss(functional.log_softmax(made, 1), y),
        lambda made, y: functional.mse_loss(made[:, 0], y.to(made)),
        lambda made, y: functional.binary_cross_entropy_with_logits(made[:, 0], (y > 1).to(made)),
        lambda made, y: (made.logsumexp(1) - made.gather(1, y[:, None])[:, 0]).mean(),
        lambda made, y: functional.smooth_l1_loss(made[:, 0], y.to(made)) + 1e-3 * made.square().sum(),
    ],
)
def test_each_loss_is_over_the_members_own_samples(loss):
    data = TensorDataset(X[:48], Y[:48])
    tasks = of_sizes(Mlp, (16, 24), train=data, loss=loss, epochs=1, validate=None, metric="train_loss")
    run = Run(tasks)
    assert_all_as_plain(run, tasks)
    assert is_always_one(run)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("between", "why"),
    [
        (partial(nn.BatchNorm1d, 16), "batch normalization looks at all samples"),
        (partial(nn.Dropout, 0.3), "draws random numbers for all samples"),
        (partial(nn.Softmax, 0), "softmax.int may look at several samples"),
    ],
)
def test_models_that_mix_samples_take_turns_with_the_reason(between, why, caplog):
    caplog.set_level(logging.INFO, "hydra_tune.fusion")
    tasks = of_sizes(partial(Mlp, between), (16, 32), epochs=1, validate=None, metric="train_loss")
    run = Run(tasks)
    assert_all_as_plain(run, tasks)
    assert why in caplog.text
    assert not is_always_one(run)


def by_its_size(made, y):
    return functional.cross_entropy(made, y, reduction="sum") / len(y)


def test_a_loss_that_is_divided_by_the_size_takes_turns(caplog):
    caplog.set_level(logging.INFO, "hydra_tune.fusion")
    tasks = of_sizes(Mlp, (16, 32), loss=by_its_size, epochs=1, validate=None, metric="train_loss")
    assert_all_as_plain(Run(tasks), tasks)
    assert "other arguments for other batch sizes" in caplog.text


class Unit(nn.Module):
    """Rows of length one: of zeros, NaN."""

    def forward(self, x):
        return x / x.square().sum(1, keepdim=True).sqrt()


def cut(size):
    return [(x, y, {"note": "hello"}) for x, y in zip(X.split(size), Y.split(size), strict=True)]


def of_noted(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.cases(1)
@pytest.mark.parametrize("is_gathered", [True, False])
def test_what_pads_a_batch_makes_no_nan(is_gathered):
    changes = {"epochs": 1, "validate": None, "metric": "train_loss"}
    tasks = of_sizes(partial(Mlp, Unit), (16, 32), **changes)
    if not is_gathered:
        more = {"loss": None, "step": of_noted, "batch_size": None, **changes}
        tasks = [small(partial(Mlp, Unit), train=partial(cut, size), seed=size, **more) for size in (16, 32)]
    run = Run(tasks)
    assert is_always_one(run)
    assert_all_as_plain(run, tasks)
