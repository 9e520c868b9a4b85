"""Members of a group whose steps are of several batches (`accumulate=`) train as their plain loops do."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, AdamW, NAdam
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

from hydra_tune import TrainTask
from hydra_tune.batched.joint_graph import JointTrace
from hydra_tune.errors import BadLossError
from tests.unit.fusion.groups import Run, assert_as_plain, double_task

pytestmark = pytest.mark.usefixtures("captured_once")

_GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(48, 8, generator=_GENERATOR, dtype=torch.float64)
Y = torch.randint(4, (48,), generator=_GENERATOR)
MOMENTUM = partial(SGD, lr=0.05, momentum=0.9)


class Net(nn.Module):
    """Samples depend on each other, so that smaller batches are computed by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Dropout(0.3)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.drop(self.norm(self.first(x)).relu()))


def net():
    return Net().double()


def apart():
    """Samples do not depend on each other, so that smaller batches are padded."""
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4)).double()


def data(count):
    return TensorDataset(X[:count], Y[:count])


def small(**changes):
    """Seven batches each epoch, the last of two samples, in steps of three, the last of one."""
    arguments = {
        "model": net,
        "optimizer": MOMENTUM,
        "train": data(26),
        "validate": DataLoader(data(10), 5),
        "batch_size": 4,
        "accumulate": 3,
        "loss": functional.cross_entropy,
        "epochs": 3,
    }
    return TrainTask(**(arguments | changes))


def assert_all_as_plain(run, tasks):
    for index, task in enumerate(tasks):
        assert_as_plain(run, index, task)


def sgd(seed):
    return partial(SGD, lr=0.05 / (seed + 1), momentum=0.4 + 0.2 * seed)


def adamw(seed):
    return partial(AdamW, lr=0.01 * (seed + 1))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("model", "make"),
    [
        (net, sgd),
        (apart, adamw),
        pytest.param(net, adamw, marks=pytest.mark.slow),
        pytest.param(apart, sgd, marks=pytest.mark.slow),
    ],
)
def test_members_are_as_alone(model, make):
    tasks = [
        small(
            model=model,
            seed=s,
            optimizer=make(s),
            max_grad_norm=0.1 * s or None,
            scheduler=partial(ExponentialLR, gamma=0.9),
            scheduler_interval="step",
            report_every=2,
        )
        for s in range(3)
    ]
    run = Run(tasks)
    assert_all_as_plain(run, tasks)
    assert [seat.member.progress.steps for seat in run.seats] == [9, 9, 9]
    assert run.units.count("update") == 9
    assert run.units.count("backward") == 21


@pytest.mark.parametrize("model", [pytest.param(net, marks=pytest.mark.slow), apart])
def test_members_whose_data_end_at_other_batches_of_a_step_are_as_alone(model):
    """Within one step some want whole batches, some their last, and some no more."""
    counts = (26, 16, 18, 34)
    tasks = [
        small(model=model, seed=s, train=data(n), max_grad_norm=0.3 * s or None, report_every=2 + s)
        for s, n in enumerate(counts)
    ]
    assert_all_as_plain(Run(tasks), tasks)


@pytest.mark.parametrize(
    "make",
    [
        partial(small, model=apart, validate=None, epochs=2),
        pytest.param(partial(double_task, "gpt2", epochs=2, accumulate=2), marks=pytest.mark.slow),
    ],
)
def test_a_group_in_several_shards_is_as_each_member_alone(make):
    tasks = [make(seed=seed, optimizer=MOMENTUM, max_grad_norm=0.5 * seed or None) for seed in range(2)]
    run = Run(tasks, num_shards=2)
    assert run.trial.num_shards == 2
    assert_all_as_plain(run, tasks)


def test_an_optimizer_without_a_form_for_all_steps_each_member_by_itself():
    tasks = [small(seed=s, epochs=1 + s, optimizer=partial(NAdam, lr=0.01), train=data(26 - 4 * s)) for s in range(2)]
    assert_all_as_plain(Run(tasks), tasks)


def penalized(module, batch):
    return functional.cross_entropy(module(batch[0]), batch[1]) + 0.01 * module.head.weight.sum()


def only_sums(module, batch):
    return 0.01 * module.head.weight.sum() + module.first.weight.sum() * batch[0].mean()


@pytest.mark.parametrize(("step", "limit"), [pytest.param(penalized, None, marks=pytest.mark.slow), (only_sums, 0.5)])
def test_gradients_that_are_one_number_everywhere_add_up(step, limit):
    tasks = [small(seed=s, loss=None, step=step, max_grad_norm=limit) for s in range(2)]
    assert_all_as_plain(Run(tasks), tasks)


def test_a_step_that_is_not_traced_is_the_same(monkeypatch):
    monkeypatch.setattr("hydra_tune.fusion.compile.batched_plan_cache.trace_step", lambda *_: False)
    tasks = [small(seed=s, train=data(26 - 8 * s)) for s in range(2)]
    ran = []
    monkeypatch.setattr(JointTrace, "run", lambda *_, **__: ran.append(None))
    assert_all_as_plain(Run(tasks), tasks)
    assert not ran


class Spoilt(TensorDataset):
    """One sample is NaN, or cannot be read."""

    def __init__(self, at, *, raises):
        super().__init__(X[:26], Y[:26])
        self.at, self.raises = at, raises

    def __getitem__(self, index):
        if index == self.at and self.raises:
            raise RuntimeError("unreadable")
        x, y = super().__getitem__(index)
        return (x * torch.nan if index == self.at else x), y


def in_order(at, *, raises):
    return DataLoader(Spoilt(at, raises=raises), 4)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("at", "raises"),
    [
        pytest.param(0, False, marks=pytest.mark.slow),
        (5, True),
        pytest.param(5, False, marks=pytest.mark.slow),
        (9, False),
        pytest.param(9, True, marks=pytest.mark.slow),
        pytest.param(25, False, marks=pytest.mark.slow),  # of a step that is not full
    ],
)
def test_a_member_that_fails_within_a_step_leaves_the_others_bits(at, raises):
    def made(spoilt):
        spoils = (-1, spoilt, -1)
        return [small(seed=s, train=in_order(n, raises=raises), batch_size=None) for s, n in enumerate(spoils)]

    healthy, ill = Run(made(-1)), Run(made(at))
    assert [seat.status for seat in ill.seats] == ["completed", "failed", "completed"]
    assert isinstance(ill.seats[1].error, RuntimeError if raises else BadLossError)
    for index in (0, 2):
        for name, tensor in healthy.weights(index).items():
            assert torch.equal(tensor, ill.weights(index)[name])


def test_members_that_are_stopped_end_and_others_come():
    def before(run, unit):
        if len(run.units) == 5:
            run.seats[0].stop = "cancelled"

    tasks, late = [small(seed=0), small(seed=1)], small(seed=7, train=data(30))
    run = Run(tasks, before=before, later=[(7, late)])
    assert [seat.status for seat in run.seats] == ["cancelled", "completed", "completed"]
    assert_as_plain(run, 1, tasks[1])
    assert_as_plain(run, 2, late)


@pytest.mark.cases(1 / 3)
def test_a_member_that_pauses_leaves_at_the_end_of_a_step_and_comes_back():
    def before(run, unit):
        if len(run.units) == 2:
            run.seats[0].is_paused = True

    tasks = [small(seed=0), small(seed=1)]
    run = Run(tasks, before=before, back=9)
    assert_all_as_plain(run, tasks)
