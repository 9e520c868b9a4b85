"""A few samples are checked in place of a large batch where both are provably one step; otherwise the batch is."""

import dataclasses
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional

from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.shard.capture.guards import BatchValueGuard
from hydra_tune.shard.partition import plan_cache as library_module
from hydra_tune.shard.partition.plan_cache import PlanLibrary, ShardPlanConstraints
from hydra_tune.shard.verify.step_outcome import UnitSeconds
from tests.parity.models import build
from tests.unit.shard.bench import first_batch, task_of

SIZE = 12


class Blocks(nn.Module):
    """Sizes of the batch stand in its graph: views, an expanded mask, a slice of half the samples."""

    def __init__(self, way=lambda x: x, width=8):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.way = [way]

    def forward(self, x):
        y = self.norm(functional.gelu(self.first(x))).reshape(-1, 2, 4).flatten(1)
        return self.way[0](self.second(functional.dropout(y, 0.2)))[: len(x) // 2]


def vectors(size=SIZE):
    return torch.randn(size, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def values_decide(monkeypatch):
    """Numbers would decide most of these steps, before there is a sample."""

    def refuse():
        raise library_module.ValuesNeededError

    monkeypatch.setattr(library_module, "ValueNumbering", refuse)


@pytest.fixture
def checked(monkeypatch):
    """The batch sizes of the checks that ran, and whether they found the plan right."""
    found = []
    real = library_module.verify

    def noted(task, twin, plan, batch, *rest, **options):
        leaf = batch if isinstance(batch, torch.Tensor) else next(iter(batch))
        found.append(len(leaf))
        return real(task, twin, plan, batch, *rest, **options)

    monkeypatch.setattr(library_module, "verify", noted)
    return found


def prepare(task, batch, **changes):
    budget = ShardPlanConstraints(
        budget_bytes=1 << 30, buffer_fraction=0.15, alignment=64, num_shards=3, checks_sample=True
    )
    model = task.model()
    optimizer = task.optimizer(list(model.parameters()))
    plans = PlanLibrary(dataclasses.replace(budget, **changes))
    return plans.prepare(task, model, optimizer, batch, "train")


def trained(model, **changes):
    return task_of(model, step=lambda module, x: module(x).square().mean(), **changes)


@pytest.mark.parametrize("size", [SIZE, 7])
def test_two_samples_stand_for_a_batch(checked, size):
    model = Blocks() if size % 2 == 0 else nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    found = prepare(trained(model), vectors(size))
    assert checked == [2]
    assert not found.plan.eager
    assert len(found.plan.shards) == 3
    alone = prepare(trained(model), vectors(size), checks_sample=False)
    assert checked == [2, size]
    assert found.plan.cuts == alone.plan.cuts
    assert [s.cost for s in found.plan.shards] == [s.cost for s in alone.plan.shards], "what runs is the whole batch's"


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize("name", ["cnn", pytest.param("vit", marks=pytest.mark.slow)])
def test_the_models_of_the_registry_are_alike_for_few_and_many(checked, name):
    task = build(name)
    batch = first_batch(task)
    found = prepare(task, batch)
    assert checked == [2]
    assert not found.plan.eager


@pytest.mark.parametrize("activations", ["keep", "spill"])
def test_what_is_kept_is_checked_as_well(checked, activations):
    task = trained(Blocks(), activations=activations)
    found = prepare(task, vectors())
    assert checked == [2]
    assert [shard.activations for shard in found.plan.shards[:-1]] == [activations] * 2


@pytest.mark.parametrize("size", [1, 3])
def test_a_small_batch_is_checked_itself(checked, size):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    prepare(trained(model), vectors(size))
    assert checked == [size]


@pytest.mark.parametrize(
    "way",
    [
        lambda y: y * 2 if len(y) > 4 else y * 3,
        lambda y: y.relu() if len(y) > 4 else y.tanh(),
        lambda y: y * (1 / len(y)),
        lambda y: y * torch.tensor([[1.0 + i] for i in range(len(y))]),
        lambda y: y[: 5 if len(y) > 4 else 2],
    ],
    ids=["another number", "another operator", "a fraction", "a constant of the size", "a size of its own"],
)
def test_a_step_that_may_be_another_for_many_samples_is_checked_with_all(checked, way):
    found = prepare(trained(Blocks(way)), vectors())
    assert checked[-1] == SIZE
    assert not found.plan.eager


@pytest.mark.parametrize(
    "way",
    [lambda y: y / len(y), lambda y: y * torch.ones(len(y), 1), lambda y: torch.cat([y[:1], y[1:]])],
    ids=["the size as a number", "made of the size", "split"],
)
def test_sizes_in_the_ratio_of_the_batches_are_the_same_way(checked, way):
    prepare(trained(Blocks(way)), vectors())
    assert checked == [2]


class Counting(Blocks):
    """Bakes a count of calls into its graph."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


def test_what_is_wrong_with_few_samples_is_wrong_with_all(checked):
    assert prepare(trained(Counting()), vectors()).plan.eager
    assert checked == [2, SIZE]


class Asks(nn.Module):
    """Asks whether its samples are padded; the first ones are not."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        y = self.first(x).relu()
        y = self.second(y) if bool((x == 0).any()) else self.second(y).tanh()
        return self.third(y.relu())


def test_the_answers_of_all_samples_decide(checked):
    """The graph of the batch took the way of padding; the first two samples alone would take the other."""
    batch = vectors()
    batch[-1] = 0
    found = prepare(trained(Asks()), batch)
    assert checked[-1] == SIZE
    assert found.guard is None or found.guard.holds((batch,))
    if found.guard is not None:
        assert not found.guard.holds((vectors(),))


def test_the_answers_are_asked_for_while_nobody_captures(checked, monkeypatch):
    """A capture switches kernels for the whole process, and a question could have another answer."""
    entered = []
    real, shared = BatchValueGuard.holds, GATE.shared

    @contextmanager
    def noted():
        with shared():
            entered.append(True)
            yield
            entered.pop()

    def holds(self, tensors):
        assert entered, "outside of the gate"
        return real(self, tensors)

    monkeypatch.setattr(GATE, "shared", noted)
    monkeypatch.setattr(BatchValueGuard, "holds", holds)
    prepare(trained(Asks()), vectors())
    assert checked == [2]


def test_seconds_are_those_of_all_samples():
    seconds = UnitSeconds(forward=(1.0, 0.0), backward=(2.0, 3.0))
    sample = library_module.SampledStep(batch=None, plan=None, kept=None, size=10)
    assert sample.for_all(seconds) == UnitSeconds(forward=(5.0, 0.0), backward=(10.0, 15.0))


def test_the_host_computes_with_more_threads_only_meanwhile(monkeypatch):
    seen = []
    real = library_module.verify
    monkeypatch.setattr(
        library_module, "verify", lambda *a, **k: (seen.append(torch.get_num_threads()), real(*a, **k))[1]
    )
    before = torch.get_num_threads()
    prepare(trained(Blocks()), vectors(), host_threads=3)
    assert seen == [3]
    assert torch.get_num_threads() == before
