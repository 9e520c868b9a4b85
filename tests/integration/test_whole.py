"""Models that no graph can follow run whole, to the last bit, with their activations kept or spilled."""

import logging
import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from hydra_tune import TrainTask
from hydra_tune.errors import BudgetError, TaskError
from tests.support.tracker import StorageTracker
from tests.unit.pool.tasks import PATIENCE_SECONDS, against_plain, running

pytestmark = pytest.mark.timeout(120)

ROWS, WIDTH, DEPTH = 256, 32, 8
X = torch.randn(2 * ROWS, 8, generator=torch.Generator().manual_seed(1))
Y = X[:, :4].argmax(1)
CALLS = {"steps": 0}


class Deep(nn.Module):
    """Layers with BatchNorm and dropout, whose activations take more than everything else; a trait between any two."""

    depth = DEPTH

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(self.depth))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(self.depth))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        x = self.first(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = self.between(self.drop(functional.gelu(norm(layer(x)))))
        return self.head(x)


def straight_through():
    """A class made in a function, which no graph calls."""

    class StraightThrough(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return torch.where(x.abs() < 1, x.sign(), x)

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return gradient * (x.abs() < 2) * 0.5

    return StraightThrough


STRAIGHT_THROUGH = straight_through()


class OwnBackward(Deep):
    def between(self, x):
        return STRAIGHT_THROUGH.apply(x)


class Branches(Deep):
    def between(self, x):
        return x if x.sum() > 0 else -x.relu()


class PythonLayerDrop(Deep):
    def between(self, x):
        return x if not self.training or random.random() < 0.7 else x.relu() / 0.7


class NumpyNoise(Deep):
    def between(self, x):
        noise = np.random.rand(WIDTH).astype(np.float32)  # noqa: NPY002 - what models use
        return x + 0.1 * torch.from_numpy(noise) if self.training else x


class Counts(Deep):
    calls = 0

    def between(self, x):
        self.calls += self.training
        return x / (1 + 0.1 * self.calls)


class AsksRequiresGrad(Deep):
    """In another place than a graph would: of a parameter that it freezes and frees itself."""

    depth = 4

    def between(self, x):
        weight = self.layers[0].weight
        weight.requires_grad_(not weight.requires_grad or not self.training)
        return x * 1.5 if weight.requires_grad else x


class PenalizesGradients(Deep):
    depth = 4

    def between(self, x):
        if not x.requires_grad:
            return x
        (slope,) = torch.autograd.grad(x.pow(3).mean(), x, create_graph=True)
        return x + slope.square().mean()


class HooksTensors(Deep):
    def between(self, x):
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))
        return x


class PenalizesAndBranches(Deep):
    def between(self, x):
        return PenalizesGradients.between(self, Branches.between(self, x))


class ReadsAttributesOfParameters(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.scale = 0.5

    def between(self, x):
        return x * self.head.weight.scale


class CountsInAnObject(Deep):
    """Where no attribute of a plain type shows it; evaluation reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.state = SimpleNamespace(calls=0)

    def between(self, x):
        self.state.calls += self.training
        return x / (1 + 0.1 * self.state.calls)


class WarmsUp(Deep):
    """Its first steps are all alike."""

    calls = 0

    def between(self, x):
        self.calls += 1
        return x if self.calls < 3 * self.depth else x.tanh()


class RarelyDrops(Deep):
    """Most steps are alike."""

    def between(self, x):
        return x if random.random() < 0.97 and np.random.rand() < 0.97 else x.tanh()  # noqa: NPY002


class CountsEvaluations(Deep):
    """Only evaluation moves it, and training reads it."""

    depth = 4

    def __init__(self) -> None:
        super().__init__()
        self.evaluations = 0

    def between(self, x):
        if not self.training:
            self.evaluations += 1
        return x / (1 + 0.1 * self.evaluations)


class CountsSmallBatches(Deep):
    """Only the second kind of batch moves it, and the first reads it."""

    depth = 4

    def __init__(self) -> None:
        super().__init__()
        self.small = 0

    def between(self, x):
        if self.training and len(x) < ROWS:
            self.small += 1
        return x / (1 + 0.1 * self.small)


WHOLE = (
    OwnBackward,
    Branches,
    PythonLayerDrop,
    NumpyNoise,
    Counts,
    CountsInAnObject,
    WarmsUp,
    RarelyDrops,
    HooksTensors,
    PenalizesAndBranches,
    ReadsAttributesOfParameters,
)
EXACT = {AsksRequiresGrad: (), CountsEvaluations: ()}
EXACT |= dict.fromkeys((PenalizesGradients, CountsSmallBatches), pytest.mark.slow)


def task(model=Branches, **changes):
    """Two epochs of two steps, validated on half a batch so that training is what needs room."""
    arguments = {
        "model": model,
        "optimizer": partial(torch.optim.AdamW, lr=1e-2),
        "train": lambda: [(X[:ROWS], Y[:ROWS]), (X[ROWS:], Y[ROWS:])],
        "validate": lambda: [(X[:64], Y[:64])],
        "loss": functional.cross_entropy,
        "epochs": 2,
        "seed": 3,
    }
    return TrainTask(**(arguments | changes))


def train(described, **options):
    """Result and figures of one task, alone; what a tracker saw is on the ledger and within the budget."""
    tracker = StorageTracker()
    with running(instrument=tracker, **options) as pool:
        result = pool.submit(described).result(PATIENCE_SECONDS)
        device = pool.stats().devices["cpu:0"]
    assert max(tracker.peak_bytes, default=0) <= device.peak_bytes <= device.budget_bytes
    return result, device


@pytest.mark.cases(1)
@pytest.mark.parametrize("trap", WHOLE)
def test_what_a_graph_cannot_follow_runs_whole(monkeypatch, trap):
    """Three shards are asked for, so that one of them means that the model was not cut."""
    monkeypatch.setattr(trap, "depth", 4)
    make = partial(task, trap)
    result, device = train(make(), num_shards=3)
    assert against_plain(make(), result) == []
    assert result.num_shards == 1
    assert "activations" not in device.bytes_out_by_kind, "they fit"


def test_the_log_says_once_why_a_trial_runs_whole(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "hydra_tune")
    monkeypatch.setattr(NumpyNoise, "depth", 4)
    with running(num_shards=3) as pool:
        pool.submit(task(NumpyNoise), name="noisy").result(PATIENCE_SECONDS)
    (line,) = (record.message for record in caplog.records if "runs whole" in record.message)
    assert line.startswith("the step (train) of noisy runs whole and is not cut: ")
    assert "numpy" in line


# Of the others two share devices with sharded trials, below.
SPILLED = {HooksTensors: (), PenalizesAndBranches: ()}
SPILLED |= dict.fromkeys(
    (OwnBackward, Branches, PythonLayerDrop, Counts, ReadsAttributesOfParameters), pytest.mark.slow
)


@pytest.mark.cases(1)
@pytest.mark.parametrize("trap", [pytest.param(trap, marks=marks) for trap, marks in SPILLED.items()])
def test_activations_that_do_not_fit_are_spilled(trap):
    make = partial(task, trap)
    result, device = train(make(), device_memory="400KiB")
    assert against_plain(make(), result) == []
    assert result.num_shards == 1
    activations = device.bytes_out_by_kind["activations"]
    assert activations > 10 * device.budget_bytes
    assert device.bytes_in_by_kind["activations"] >= activations / 2


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize("trap", [pytest.param(trap, marks=marks) for trap, marks in EXACT.items()])
def test_what_a_graph_may_follow_for_a_while_is_exact(trap):
    batches = [(X[:rows], Y[:rows]) for rows in (ROWS, ROWS, ROWS // 2, ROWS)]
    make = partial(task, trap, train=lambda: batches)
    result, _ = train(make(), num_shards=3)
    assert against_plain(make(), result) == []


@pytest.mark.cases(1 / 3)
def test_spilled_activations_need_host_memory():
    kept, _ = train(task(), host_memory="600KiB")
    assert kept.status == "completed"
    spilled, device = train(task(), host_memory="600KiB", device_memory="400KiB")
    assert isinstance(spilled.error, BudgetError)
    assert "of host memory" in str(spilled.error)
    assert device.units == 0
    need = device.budget_bytes + 4 * WIDTH * ROWS * 4 * DEPTH  # four results of each layer's operators are saved
    assert train(task(), host_memory=need, device_memory="400KiB")[0].status == "completed"


@pytest.mark.cases(1 / 3)
def test_a_step_that_needs_more_than_its_pilot_saw_and_than_there_is_fails_by_name():
    class Grows(Branches):
        def forward(self, x):
            x = super().forward(x)
            return x if x[0, 0] != 12345 and CALLS["steps"] < 2 else (x.repeat(100, 1) * 2)[: len(x)]

    def batches():
        for CALLS["steps"] in range(3):
            yield X[:ROWS], Y[:ROWS]

    described = task(Grows, train=batches, validate=None)
    grown, device = train(described, device_memory="2MiB")
    assert against_plain(described, grown) == []
    assert device.peak_bytes > 1500 * 1024
    with running(device_memory="1400KiB") as pool:
        refused = pool.submit(described).result(PATIENCE_SECONDS)
        assert pool.stats().devices["cpu:0"].peak_bytes < device.peak_bytes
    assert isinstance(refused.error, BudgetError)
    assert "the trial needs" in str(refused.error)
    assert refused.units_run == 4


class ReplacesBuffer(Deep):
    """A buffer of which the backward needs the values of before."""

    depth = 1

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def read(self):
        return self.scale

    def between(self, x):
        scaled = x * self.read()
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * x.detach().abs().mean(0)
        return scaled


class ReadsCopyOfBuffer(ReplacesBuffer):
    def read(self):
        return self.scale.clone()


@pytest.mark.cases(1 / 3)
def test_a_replaced_buffer_that_the_backward_reads_is_refused_by_name():
    refused, _ = train(task(ReplacesBuffer), num_shards=2)
    assert isinstance(refused.error, TaskError)
    assert "reads the buffer 'scale' and then replaces the buffer" in str(refused.error)
    copied = task(ReadsCopyOfBuffer)
    assert against_plain(copied, train(copied, num_shards=2)[0]) == []


class Straight(Deep):
    """Nothing that a graph could not follow."""

    def between(self, x):
        return x


@pytest.mark.cases(1 / 3)
def test_spilled_trials_and_sharded_ones_share_devices():
    tasks = [task(model, seed=seed) for seed, model in enumerate((Branches, Straight, PythonLayerDrop), start=1)]
    tracker = StorageTracker()
    with running(devices="cpu:2", device_memory="400KiB", max_concurrent=3, instrument=tracker) as pool:
        jobs = [pool.submit(described) for described in tasks]
        results = [job.result(4 * PATIENCE_SECONDS) for job in jobs]
        devices = pool.stats().devices.values()
    for described, result in zip(tasks, results, strict=True):
        assert against_plain(described, result) == []
    assert [result.num_shards > 1 for result in results] == [False, True, False]
    assert max(tracker.peak_bytes) <= max(device.peak_bytes for device in devices) <= 400 * 1024
