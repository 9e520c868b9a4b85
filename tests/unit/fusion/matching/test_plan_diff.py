"""Members that drop with probabilities of their own are as alone; trials that differ in more are told apart."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD
from torch.utils.data import TensorDataset

from hydra_tune import TrainTask
from hydra_tune.errors import UnfusableError
from hydra_tune.fusion.compile.batched_plan import stacked_plan
from hydra_tune.fusion.matching.plan_diff import likeness
from tests.unit.fusion.groups import Run, assert_as_plain
from tests.unit.shard.bench import bench, task_of

_GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(18, 2, 8, generator=_GENERATOR, dtype=torch.float64)
Y = torch.randint(4, (18,), generator=_GENERATOR)


class Net(nn.Module):
    """Every operator whose probability may be a member's own."""

    def __init__(self, p, scale=1.0):
        super().__init__()
        self.p, self.scale = p, scale
        self.first, self.drop, self.channels = nn.Linear(8, 8), nn.Dropout(p), nn.Dropout1d(p)
        self.recurrent, self.head = nn.GRU(8, 8, 2, batch_first=True, dropout=p), nn.Linear(8, 4)

    def forward(self, x):
        y = self.channels(self.drop(self.first(x).transpose(1, 2)).transpose(1, 2))
        y = functional.scaled_dot_product_attention(y, y, y, dropout_p=self.p if self.training else 0.0)
        return self.head(self.recurrent(y * self.scale)[0][:, -1])


class Leaves(nn.Module):
    """Leaves its dropout out where there is nothing to drop."""

    def __init__(self, p):
        super().__init__()
        self.p, self.head = p, nn.Linear(8, 4)

    def forward(self, x):
        return self.head(functional.dropout(x, self.p, self.training) if self.p else x).mean(1)


def made(kind, *arguments):
    return kind(*arguments).double()


def task(p, seed=0, kind=Net, **changes):
    arguments = {
        "model": partial(made, kind, p),
        "optimizer": partial(SGD, lr=0.1, momentum=0.9),
        "train": TensorDataset(X, Y),
        "validate": TensorDataset(X[:8], Y[:8]),
        "batch_size": 8,
        "loss": functional.cross_entropy,
        "epochs": 2,
        "seed": seed,
    }
    return TrainTask(**(arguments | changes))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:dropout option adds dropout")
def test_each_member_drops_with_its_own_probability():
    """None of it and all of it included, and a last batch that is a smaller one."""
    tasks = [task(p, seed) for seed, p in enumerate([0.0, 0.3, 1.0, 0.7, 0])]
    run = Run(tasks)
    assert len(set(run.keys)) == 1
    for index, one in enumerate(tasks):
        assert_as_plain(run, index, one)


def plan(module):
    return bench(task_of(module.double(), train=lambda: [(X, Y)], loss=functional.cross_entropy)).plan()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Net(0.1), Net(0.1, scale=2.0)),
        (Leaves(0.1), Leaves(0.0)),
        (nn.Sequential(nn.AlphaDropout(0.1), nn.Flatten(), nn.Linear(16, 4)),) * 2,
    ],
    ids=["another number", "no dropout", "a kind whose masks depend on it"],
)
def test_what_differs_in_more_is_told_apart(one, other):
    if one is other:
        other = nn.Sequential(nn.AlphaDropout(0.2), nn.Flatten(), nn.Linear(16, 4))
    with pytest.raises(UnfusableError, match="its graph has"):
        likeness([plan(one), plan(other)])


@pytest.mark.cases(1 / 3)
def test_equal_plans_have_no_probabilities_of_their_own():
    assert likeness([plan(Net(0.1)), plan(Net(0.1))]).drops == {}
    found = likeness([plan(Net(0.1)), plan(Net(0.3))]).drops
    assert set(map(tuple, found.values())) == {(0.1, 0.3)}
    assert len(found) == 4
    assert stacked_plan(plan(Net(0.0)), 2, slots=frozenset(found)).is_stochastic
