"""A member of a group ends as its plain loop would, whatever becomes of the others."""

import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, AdamW, NAdam, RMSprop
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from hydra_tune import TrainTask
from hydra_tune.errors import BadLossError, GroupBatchError
from hydra_tune.fusion.compile.batched_plan import is_traced
from tests.unit.fusion.groups import Run, assert_as_plain, double_task

pytestmark = pytest.mark.usefixtures("captured_once")

_GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(24, 8, generator=_GENERATOR, dtype=torch.float64)
Y = torch.randint(4, (24,), generator=_GENERATOR)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Without a bias, whose gradient before a BatchNorm is nothing but rounding, which AdamW makes steps of.
        self.first, self.norm, self.drop = nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Dropout(0.3)
        self.frozen, self.head = nn.Linear(16, 16).requires_grad_(False), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.frozen(self.drop(self.norm(self.first(x)).relu())))


def net():
    return Net().double()


def small(**changes):
    arguments = {
        "model": net,
        "optimizer": partial(AdamW, lr=1e-2),
        "train": TensorDataset(X, Y),
        "validate": TensorDataset(X[:12], Y[:12]),
        "batch_size": 8,
        "loss": functional.cross_entropy,
        "epochs": 3,
    }
    return TrainTask(**(arguments | changes))


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        pytest.param("cnn", marks=pytest.mark.slow),
        pytest.param("vit", marks=pytest.mark.slow),
        pytest.param("gpt2", marks=pytest.mark.slow),
    ],
)
def test_members_of_each_architecture_are_as_alone(name):
    """50 steps, each member with rates, seed, data order and dropout of its own."""
    # The gradient of a key's bias is nothing but rounding, which AdamW makes steps of where eps is as small as by default.
    adamw = partial(AdamW, eps=1e-5)
    tasks = [
        double_task(name, seed=s, optimizer=partial(adamw, lr=3e-3 / (s + 1), weight_decay=0.1 * s)) for s in range(3)
    ]
    run = Run(tasks)
    assert len(set(run.keys)) == 1
    assert set(run.units) <= {"backward", "update", "evaluate"}
    for index, task in enumerate(tasks):
        assert_as_plain(run, index, task)


class Scaled(nn.Module):
    """A parameter of one number, which is (members,) when it is stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.scale = nn.Linear(8, 4), nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.scale * self.head(x)


def scaled():
    return Scaled().double()


@pytest.mark.parametrize(
    "make",
    [small, partial(small, model=scaled), pytest.param(partial(double_task, "cnn"), marks=pytest.mark.slow)],
)
def test_momentum_and_clipping_are_each_members_own(make):
    tasks = [
        make(seed=s, optimizer=partial(SGD, lr=0.05, momentum=0.5 + 0.2 * s), max_grad_norm=0.1 * s or None)
        for s in range(3)
    ]
    run = Run(tasks)
    for index, task in enumerate(tasks):
        assert_as_plain(run, index, task)


@pytest.mark.cases(1)
@pytest.mark.parametrize("num_shards", [None, 2])
@pytest.mark.parametrize("make", [partial(NAdam, lr=0.01), partial(AdamW, lr=0.01, amsgrad=True)])
def test_an_optimizer_without_a_form_for_all_steps_each_member_by_itself(make, num_shards):
    tasks = [small(seed=s, epochs=1 + s, optimizer=make, max_grad_norm=0.5) for s in range(2)]
    run = Run(tasks, num_shards=num_shards)
    for index, task in enumerate(tasks):
        assert_as_plain(run, index, task)


@pytest.mark.parametrize(
    ("make", "num_shards"),
    [(small, 2), *(pytest.param(partial(double_task, "gpt2"), n, marks=pytest.mark.slow) for n in (2, 3))],
)
def test_a_group_in_several_shards_is_as_each_member_alone(make, num_shards):
    tasks = [make(seed=s, epochs=1, optimizer=partial(SGD, lr=0.05, momentum=0.9)) for s in range(2)]
    run = Run(tasks, num_shards=num_shards)
    assert run.trial.num_shards == num_shards
    assert "forward" in run.units
    for index, task in enumerate(tasks):
        assert_as_plain(run, index, task)


@pytest.mark.cases(1 / 3)
def test_members_that_end_apart_and_report_apart_are_as_alone():
    """Other epochs, other reports, other data, another last batch."""
    tasks = [
        small(epochs=1),
        small(epochs=4, seed=1, report_every=2),
        small(epochs=2, seed=2, train=TensorDataset(X[:21], Y[:21])),
        small(epochs=2, seed=3, validate=None),
    ]
    run = Run(tasks)
    assert run.all_ended[0] is run.seats[0]
    for index, task in enumerate(tasks):
        assert_as_plain(run, index, task)


class ForgettingRun(Run):
    """Another thread makes the plans of a larger group ready, and the group forgets its plans before the first is traced."""

    def make_ready(self, size):
        kinds, plans = self.trial._kinds, self.trial._kinds._plans
        stacked, was_asked, has_forgotten = plans.stacked, threading.Event(), threading.Event()

        def slowly_stacked(*arguments, **options):
            plans.stacked = stacked
            was_asked.set()
            assert has_forgotten.wait(60)
            self.made_ready = stacked(*arguments, **options)
            return self.made_ready

        plans.stacked = slowly_stacked
        building = threading.Thread(target=self.trial.make_ready, args=(size,))
        building.start()
        assert was_asked.wait(60)
        kinds.forget()
        has_forgotten.set()
        building.join()
        return True


def test_plans_made_ready_while_the_group_forgets_its_plans_are_traced():
    tasks = [small(seed=seed) for seed in range(3)]
    run = ForgettingRun(tasks[:2], waits=False, most=3, later=[(2, tasks[2])])
    assert run.sizes[-1] == 3
    assert run.made_ready.plan.computing.untraceable == set()
    assert is_traced(run.made_ready.plan)
    for index, task in enumerate(tasks):
        assert_as_plain(run, index, task)


@pytest.mark.cases(1 / 3)
def test_more_trials_than_slots_join_where_all_members_have_ended():
    """The joiners take the slots first, and then the group grows for the others."""
    tasks = [small(seed=seed, epochs=1) for seed in range(2)] + [small(seed=seed) for seed in range(2, 5)]
    num_units = len(Run(tasks[:2], waits=False).units)
    run = Run(tasks[:2], waits=False, most=8, later=[(num_units, task) for task in tasks[2:]])
    assert [seat.status for seat in run.seats] == ["completed"] * 5
    assert run.sizes[num_units] == 2
    assert run.sizes[-1] == 4
    for index, task in enumerate(tasks):
        assert_as_plain(run, index, task)


def test_a_member_that_is_pruned_leaves_the_others_bits():
    tasks = [small(seed=s, optimizer=partial(SGD, lr=0.05, momentum=0.9)) for s in range(3)]
    healthy = Run(tasks)
    pruned = Run(tasks, answer=lambda index, step: "pruned" if (index, step) == (1, 0) else None)
    assert [seat.status for seat in pruned.seats] == ["completed", "pruned", "completed"]
    assert_as_plain(pruned, 1, tasks[1], report=lambda step, metrics: step != 0)
    for index in (0, 2):
        for name, tensor in healthy.weights(index).items():
            assert torch.equal(tensor, pruned.weights(index)[name])


@pytest.mark.cases(1)
@pytest.mark.parametrize("on_bad_loss", ["fail", "prune"])
def test_a_member_that_goes_nan_ends_alone_and_leaves_the_others_bits(on_bad_loss):
    def tasks(rate):
        made = [small(seed=s, on_bad_loss=on_bad_loss, optimizer=partial(RMSprop, lr=0.01)) for s in range(3)]
        made[1] = small(seed=1, on_bad_loss=on_bad_loss, optimizer=partial(RMSprop, lr=rate))
        return made

    healthy, ill = Run(tasks(0.01)), Run(tasks(1e200))
    assert [seat.status for seat in ill.seats] == ["completed", f"{on_bad_loss}ed".replace("eed", "ed"), "completed"]
    if on_bad_loss == "fail":
        assert isinstance(ill.seats[1].error, BadLossError)
    for index in (0, 2):
        for name, tensor in healthy.weights(index).items():
            assert torch.equal(tensor, ill.weights(index)[name])


def test_a_member_whose_own_code_raises_fails_alone():
    class Broken(TensorDataset):
        def __getitem__(self, index):
            raise RuntimeError("unreadable")

    tasks = [small(), small(seed=1, validate=Broken(X[:12], Y[:12])), small(seed=2)]
    run = Run(tasks)
    assert [seat.status for seat in run.seats] == ["completed", "failed", "completed"]
    assert "unreadable" in str(run.seats[1].error)
    assert_as_plain(run, 0, tasks[0])


def test_a_member_is_the_same_in_any_group():
    alone = Run([small(seed=5)])
    among = Run([small(seed=s) for s in (7, 5, 6)])
    for name, tensor in alone.weights(0).items():
        torch.testing.assert_close(among.weights(1)[name], tensor, rtol=1e-9, atol=1e-12)


def test_a_member_that_is_stopped_at_any_time_ends_there():
    def before(run, unit):
        if len(run.units) == 4:
            run.seats[0].stop = "cancelled"

    run = Run([small(), small(seed=1)], before=before)
    assert [seat.status for seat in run.seats] == ["cancelled", "completed"]
    assert run.seats[0].module is None
    assert_as_plain(run, 1, small(seed=1))


def test_a_kind_of_batch_that_cannot_be_stacked_ends_the_group_by_name():
    def step(module, batch):
        x = batch[0]
        y = checkpoint(module, x.clone().requires_grad_(), use_reentrant=True) if len(x) < 8 else module(x)
        return functional.cross_entropy(y, batch[1])

    data = TensorDataset(X[:21], Y[:21])
    with pytest.raises(GroupBatchError, match="a kind of batch that they cannot compute together"):
        Run([small(loss=None, step=step, train=data, seed=s, validate=None) for s in range(2)])
