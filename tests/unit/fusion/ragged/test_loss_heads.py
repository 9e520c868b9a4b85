"""Members with losses and metrics of their own are as alone; trials that differ in more than these are told apart."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import AdamW
from torch.utils.data import TensorDataset

from hydra_tune import TrainTask
from hydra_tune.errors import UnfusableError
from hydra_tune.fusion.matching.plan_diff import likeness
from tests.unit.fusion.groups import Run, assert_as_plain
from tests.unit.shard.bench import bench, task_of

_GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(18, 8, generator=_GENERATOR, dtype=torch.float64)
Y = torch.randint(4, (18,), generator=_GENERATOR)
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)


class Net(nn.Module):
    """Draws, and has buffers that a step overwrites."""

    def __init__(self, p=0.1):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(p)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.drop(self.norm(self.first(x)).relu()))


class Heads(Net):
    """Of which a loss may use one result or both."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(8, 4)

    def forward(self, x):
        return super().forward(x), self.other(x)


def focal(outputs, targets):
    own = functional.log_softmax(outputs, -1).gather(1, targets[:, None]).squeeze(1)
    return (-((1 - own.exp()) ** 2) * own).mean()


def beside_softmax(outputs, targets):
    """Begins as `focal` does, and goes on with what that does not use."""
    return functional.nll_loss(functional.log_softmax(outputs, -1), targets) + 0.01 * outputs.square().mean()


def weighted(outputs, targets):
    return functional.cross_entropy(outputs, targets, WEIGHTS)


def constant_scale(outputs, targets):
    """Has a region without gradients."""
    with torch.no_grad():
        scale = 1.0 / outputs.square().mean().sqrt()
    return functional.cross_entropy(outputs, targets) * scale


def noisy(outputs, targets):
    return functional.cross_entropy(functional.dropout(outputs, 0.5), targets)


def accuracy(module, batch):
    outputs = module(batch[0])
    return {"accuracy": (outputs.argmax(1) == batch[1]).float().mean(), "focal": focal(outputs, batch[1])}


def errors(module, batch):
    return {"errors": (module(batch[0]).argmax(1) != batch[1]).sum()}


SMOOTHED = partial(functional.cross_entropy, label_smoothing=0.1)


def double(kind, *arguments):
    return kind(*arguments).double()


def task(loss, seed=0, p=0.1, **changes):
    arguments = {
        "model": partial(double, Net, p),
        "optimizer": partial(AdamW, lr=0.05, weight_decay=0.1),
        "train": TensorDataset(X, Y),
        "validate": TensorDataset(X[:8], Y[:8]),
        "batch_size": 8,
        "loss": loss,
        "epochs": 2,
        "seed": seed,
    }
    return TrainTask(**(arguments | changes))


@pytest.mark.slow
def test_members_with_losses_of_their_own_are_as_alone(caplog):
    """Another probability of dropout, a last batch that is smaller, and who comes late to the place of another loss."""
    tasks = [
        task(functional.cross_entropy, epochs=1),
        task(SMOOTHED, 1),
        task(focal, 2, p=0.4),
        task(weighted, 3, max_grad_norm=0.1),
    ]
    late = task(focal, 4)
    caplog.set_level("INFO")
    run = Run(tasks, later=[(1, late)])
    assert "not traced" not in caplog.text
    assert len(set(run.keys)) == 1
    for index, one in enumerate([*tasks, late]):
        assert_as_plain(run, index, one)


@pytest.mark.cases(1 / 3)
def test_members_with_metrics_of_their_own_have_these():
    """Of other names and kinds of numbers than the others', and none but these."""
    tasks = [
        task(SMOOTHED, evaluate=accuracy, metric="val_focal"),
        task(focal, 1, evaluate=errors, metric="val_errors"),
        task(focal, 2),
    ]
    run = Run(tasks)
    for index, one in enumerate(tasks):
        assert_as_plain(run, index, one)
    found = [{name for name in seat.member.history[-1] if name.startswith("val_")} for seat in run.seats]
    assert found == [{"val_accuracy", "val_focal"}, {"val_errors"}, {"val_loss"}]


@pytest.mark.cases(1 / 3)
def test_members_whose_losses_begin_alike_are_as_alone():
    """And go on with other values than the others: what these take from is common to all."""
    tasks = [task(focal, validate=None, epochs=1), task(beside_softmax, 1), task(constant_scale, 2)]
    run = Run(tasks)
    for index, one in enumerate(tasks):
        assert_as_plain(run, index, one)


def plan(loss, kind=Net):
    return bench(task_of(kind().double(), train=lambda: [(X, Y)], loss=loss)).plan()


def test_the_plan_of_a_loss_is_told_from_others_once():
    one, other = plan(focal), plan(SMOOTHED)
    found = likeness([one, other, plan(focal), other])
    assert found.rows.of == (0, 1, 0, 1)
    assert len(found.rows.tails.tails) == 2
    assert likeness([one, one]).rows is None


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (focal, noisy, "draws random numbers"),
        (focal, lambda outputs, targets: focal(outputs.clone().mul_(2.0), targets), "overwrites a tensor"),
    ],
)
def test_a_loss_that_cannot_be_for_some_only_is_told_why(one, other, told):
    with pytest.raises(UnfusableError, match=told):
        likeness([plan(one), plan(other)])


def test_losses_that_train_other_parameters_are_told_apart():
    """Or a member's weights would decay that its own loop leaves alone."""
    both = plan(lambda outputs, targets: focal(outputs[0] + outputs[1], targets), Heads)
    detached = plan(lambda outputs, targets: focal(outputs[0] + outputs[1].detach(), targets), Heads)
    with pytest.raises(UnfusableError, match="its graph has"):
        likeness([both, detached])
