"""Groups on devices whose members have a default generator in turn, as on a GPU: each member's masks are its own there too."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD
from torch.utils.data import TensorDataset

from hydra_tune import TrainTask
from hydra_tune.batched.batched_random import HoistedDraw, TurnTakingGenerator, draw_all, dropout_mask
from hydra_tune.memory.pager import Pager
from hydra_tune.shard.partition.budget import ShardPlanConstraints
from hydra_tune.shard.partition.plan_cache import PlanLibrary
from hydra_tune.train.loop.batch_units import PendingUnit, run_unit
from hydra_tune.train.single_trial import SingleTrial
from tests.support.turns import OneGenerator, TurnsDevice
from tests.unit.fusion.groups import Run

pytestmark = pytest.mark.usefixtures("captured_once")

GENERATOR = torch.Generator().manual_seed(4)
X = torch.randn(24, 6, 8, generator=GENERATOR, dtype=torch.float64)
Y = torch.randint(4, (24,), generator=GENERATOR)


class Drops(nn.Module):
    """Dropout of elements, of whole channels and of attention weights."""

    def __init__(self, p=0.3):
        super().__init__()
        self.first, self.drop, self.channels = nn.Linear(8, 8), nn.Dropout(p), nn.Dropout1d(0.2)
        self.head, self.attention_p = nn.Linear(8, 4), 0.1

    def forward(self, x):
        h = self.channels(self.drop(self.first(x).relu()))
        h = h + functional.scaled_dot_product_attention(h, h, h, dropout_p=self.attention_p if self.training else 0.0)
        return self.head(h.mean(1))


class Noisy(nn.Module):
    """Draws in ways that have no stacked form, and so member by member."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        h, _ = torch.native_dropout(self.first(x), 0.25, self.training)
        return self.head(functional.rrelu(h, training=self.training).mean(1))


def task(seed, kind=Drops, **changes):
    arguments = {
        "model": lambda: kind().double(),
        "optimizer": partial(SGD, lr=0.1 / (seed + 1), momentum=0.9),
        "train": TensorDataset(X, Y),
        "batch_size": 8,
        "loss": functional.cross_entropy,
        "epochs": 2,
        "seed": seed,
    }
    return TrainTask(**(arguments | changes))


def alone(described, num_shards=None):
    """The trial by itself on such a device: its losses and weights."""
    device = TurnsDevice(0, 1 << 30)
    budget = ShardPlanConstraints(
        budget_bytes=1 << 30, buffer_fraction=0.0, alignment=device.alignment, num_shards=num_shards
    )
    trial, pager = SingleTrial(described, PlanLibrary(budget), device, may_run_own_code=False), Pager(device)
    with torch.random.fork_rng(devices=[]), device.worker():
        while (unit := trial.advance()) is not None:
            if isinstance(unit, PendingUnit):
                trial.finished(unit, run_unit(unit, device, pager, None))
    module = trial.module
    trial.close(keep=True)
    device.close()
    return [entry["train_loss"] for entry in trial.history], module.state_dict()


def assert_as_alone(run, index, described):
    losses, weights = alone(described)
    seat = run.seats[index]
    assert seat.status == "completed"
    found = [entry["train_loss"] for entry in seat.member.history]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-9, atol=0)
    for name, tensor in weights.items():
        torch.testing.assert_close(run.weights(index)[name], tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.cases(1)
@pytest.mark.parametrize("num_shards", [None, 2])
@pytest.mark.parametrize("kind", [Drops, Noisy])
def test_masks_are_those_of_the_trial_alone(kind, num_shards):
    """Of two shards, the first is computed a second time for its backward, with the same masks."""
    device = TurnsDevice(0, 1 << 30)
    tasks = [task(seed, kind) for seed in range(3)]
    run = Run(tasks, num_shards=num_shards, device=device)
    assert device.generator.num_turns >= 3 * 6
    assert not device.generator.lock.locked()
    for index, one in enumerate(tasks):
        assert_as_alone(run, index, one)


@pytest.mark.cases(1 / 3)
def test_members_may_drop_with_probabilities_of_their_own():
    tasks = [task(seed, partial(Drops, p)) for seed, p in enumerate((0.1, 0.0, 1.0, 0.6))]
    run = Run(tasks, device=TurnsDevice(0, 1 << 30))
    for index, one in enumerate(tasks):
        assert_as_alone(run, index, one)


def test_one_that_ends_draws_no_more_and_leaves_the_others_masks_alone():
    tasks = [task(seed, epochs=1 + seed) for seed in range(3)]
    run = Run(tasks, device=TurnsDevice(0, 1 << 30))
    for index, one in enumerate(tasks):
        assert_as_alone(run, index, one)


def turns(seeds, active=None, probabilities=None):
    states = [torch.Generator().manual_seed(seed).get_state() for seed in seeds]
    return TurnTakingGenerator(states, OneGenerator(), active or [True] * len(seeds), probabilities or {})


def noise(**changes):
    arguments = {
        "target": torch.ops.aten.bernoulli_.float,
        "shape": torch.Size((4, 3)),
        "strides": (1, 4),
        "dtype": torch.float32,
        "arguments": (0.7,),
    }
    return HoistedDraw(**(arguments | changes))


def test_numbers_do_not_depend_on_who_else_is_in_the_group():
    wanted = [noise(is_dropout=True), noise(), noise(slot="a", arguments=(), is_dropout=True)]
    probabilities = {"a": [0.5, 0.2, 0.9]}
    group = turns([3, 4, 5], probabilities=probabilities)
    with torch.random.fork_rng(devices=[]):
        together = draw_all(wanted, group, torch.device("cpu"))
    for index, seed in enumerate((3, 4, 5)):
        alone = turns([seed], probabilities={"a": [probabilities["a"][index]]})
        with torch.random.fork_rng(devices=[]):
            for found, own in zip(together, draw_all(wanted, alone, torch.device("cpu")), strict=True):
                assert torch.equal(found[index], own[0])
                assert found[index].stride() == (1, 4)
        assert torch.equal(group.states[index], alone.states[0])


def test_who_rests_draws_nothing():
    group = turns([3, 4], active=[True, False])
    before = [state.clone() for state in group.states]
    with torch.random.fork_rng(devices=[]):
        (made,) = draw_all([noise(is_dropout=True)], group, torch.device("cpu"))
    assert made[0].any()
    assert not made[1].any()
    assert torch.equal(group.states[1], before[1])
    assert not torch.equal(group.states[0], before[0])


def test_streams_are_set_back_together():
    group = turns([3, 4])
    before = group.get_state()
    with torch.random.fork_rng(devices=[]):
        first = draw_all([noise()], group, torch.device("cpu"))
        group.set_state(before)
        again = draw_all([noise()], group, torch.device("cpu"))
    assert torch.equal(first[0], again[0])


def test_masks_are_what_the_kernel_for_dropout_draws():
    x = torch.randn(5, 7, generator=GENERATOR).t()
    torch.manual_seed(11)
    mask = dropout_mask(torch.empty_like(x), 0.6)
    torch.manual_seed(11)
    dropped, _ = torch.native_dropout(x, 0.4, True)
    torch.testing.assert_close(x * mask / 0.6, dropped)
