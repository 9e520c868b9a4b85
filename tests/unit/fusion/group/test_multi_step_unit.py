"""Several steps of a group in one unit: the numbers are those of steps that are units of their own."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

from hydra_tune import HydraExecutor, TrainTask
from hydra_tune.batched.joint_graph import JointTrace
from hydra_tune.fusion.group import multi_step_unit
from tests.support.gathered import gather
from tests.unit.fusion.groups import Run, assert_as_plain

pytestmark = pytest.mark.usefixtures("captured_once")

_GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(30, 8, generator=_GENERATOR, dtype=torch.float64)
Y = torch.randint(4, (30,), generator=_GENERATOR)
STEPS = 16  # of two epochs, the last of each on fewer samples


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4)).double()


def small(**changes):
    arguments = {
        "model": net,
        "optimizer": partial(SGD, lr=0.05, momentum=0.9),
        "train": TensorDataset(X, Y),
        "validate": DataLoader(TensorDataset(X[:10], Y[:10]), 5),
        "batch_size": 4,
        "loss": functional.cross_entropy,
        "epochs": 2,
    }
    return TrainTask(**(arguments | changes))


@pytest.fixture
def unhurried(monkeypatch):
    """Rounds end only where they have to, however slow the machine."""
    monkeypatch.setattr(multi_step_unit, "SECONDS", 60.0)


@pytest.mark.cases(1)
@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize(
    ("changes", "units"),
    [
        # The first round ends where the optimizer has made its state; then all full batches and the last, each epoch.
        ({}, 3),
        ({"max_grad_norm": 0.5}, 3),
        ({"optimizer": partial(SGD, lr=0.05)}, 2),
        ({"report_every": 3, "metric": "train_loss", "validate": None}, 7),
        ({"scheduler": partial(ExponentialLR, gamma=0.9), "scheduler_interval": "step"}, 3),
    ],
    ids=["momentum", "clipped", "no state", "reports", "a schedule by steps"],
)
def test_a_round_goes_on_to_the_next_question(changes, units):
    tasks = [small(seed=seed, **changes) for seed in range(3)]
    run = Run(tasks)
    for index, task in enumerate(tasks):
        assert_as_plain(run, index, task)
        assert run.seats[index].member.progress.steps == STEPS
    assert "update" not in run.units
    assert run.units.count("backward") <= units + 2


@pytest.mark.usefixtures("unhurried")
def test_a_member_that_is_stopped_within_a_round_takes_no_further_step(monkeypatch):
    run_one, stopped, found = JointTrace.run, [], []

    def stop(self, operands, noise=None, **how):
        found.append(None)
        if len(found) == 5:
            stopped[0].stop = "pruned"
        return run_one(self, operands, noise, **how)

    monkeypatch.setattr(JointTrace, "run", stop)
    tasks = [
        small(seed=seed, scheduler=partial(ExponentialLR, gamma=0.9), scheduler_interval="step") for seed in range(2)
    ]
    run = Run(tasks, before=lambda run, _: stopped or stopped.append(run.seats[0]))
    assert run.seats[0].status == "pruned"
    assert run.seats[0].member.progress.steps == 4
    assert_as_plain(run, 1, tasks[1])


def test_many_steps_are_no_longer_than_a_round(monkeypatch):
    monkeypatch.setattr(multi_step_unit, "SECONDS", 0.0)
    run = Run([small(seed=seed) for seed in range(2)])
    assert run.units.count("backward") == STEPS


def test_members_come_and_go_between_rounds(monkeypatch):
    monkeypatch.setattr(multi_step_unit, "SECONDS", 0.001)
    tasks = [small(seed=0), small(seed=1, epochs=4)]
    late = small(seed=7, epochs=3)
    run = Run(tasks, later=[(4, late)])
    for index, task in enumerate([*tasks, late]):
        assert_as_plain(run, index, task)


def weights(results):
    return [tensor for result in results for tensor in result.module().state_dict().values()]


@pytest.mark.cases(1 / 3)
def test_a_round_under_which_memory_runs_out_goes_on_with_the_step_that_failed(monkeypatch):
    """The bits are the same: what it had drawn is kept, and buffers it had overwritten are put back."""
    tasks = [small(seed=seed) for seed in range(3)]
    gather(monkeypatch, lambda count: count % len(tasks) == 0)
    run_one, found = JointTrace.run, []

    def fail(self, operands, noise=None, **how):
        made = run_one(self, operands, noise, **how)
        found.append(None)
        if len(found) == 7:
            raise torch.OutOfMemoryError("out of memory, of a test")
        return made

    with HydraExecutor("cpu:1", "1GiB", fusion="on") as pool:
        expected = weights(pool.run(tasks))
    monkeypatch.setattr(JointTrace, "run", fail)
    with HydraExecutor("cpu:1", "1GiB", fusion="on") as pool:
        results = pool.run(tasks)
        (device,) = pool.stats().devices.values()
    assert device.units_repeated == 1
    assert all(torch.equal(one, other) for one, other in zip(weights(results), expected, strict=True))
