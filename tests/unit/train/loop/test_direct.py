"""Trials that fit their device run the user's own code: uncaptured, in bursts, with the plain loop's bits."""

import threading
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from hydra_tune import HydraExecutor, Reported, TrainTask
from hydra_tune.errors import BudgetError, TaskError
from hydra_tune.shard.execute.eager_plan import uncaptured
from hydra_tune.shard.partition.budget import ShardPlanConstraints
from hydra_tune.shard.partition.plan import ShardPlan
from hydra_tune.train.data.handles import moved
from hydra_tune.train.loop import burst
from tests.parity.observe import watched_ways
from tests.unit.pool.tasks import PATIENCE_SECONDS, against_plain, mlp, running, task

pytestmark = pytest.mark.timeout(120)

_GENERATOR = torch.Generator().manual_seed(4)
X = torch.randn(96, 64, generator=_GENERATOR)
Y = torch.randint(4, (96,), generator=_GENERATOR)
SAMPLES = TensorDataset(X, Y)


class Net(nn.Module):
    """Layers with statistics and dropout, and a counter of the module's own that no graph could follow."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(depth))
        self.norm, self.drop, self.head = nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Linear(64, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for layer in self.layers:
            x = self.drop(self.norm(layer(x)).relu())
        return self.head(x) * (1 + 0.01 * self.calls)


class Plain(nn.Sequential):
    """Without a counter, and with statistics for each layer, so that the rest of a trial can be cut."""

    def __init__(self, depth: int) -> None:
        layers = [(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2)) for _ in range(depth)]
        super().__init__(*(layer for block in layers for layer in block), nn.Linear(64, 4))


class Averaged(Plain):
    """Replaces a buffer in each forward, and may count its calls."""

    def __init__(self, depth: int, *, counts: bool) -> None:
        super().__init__(depth)
        self.register_buffer("mean", torch.zeros(64))
        self.counts, self.calls = counts, 0

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.calls += self.counts
        return super().forward(x - self.mean)


class OneNorm(Net):
    """All layers share statistics that the forward changes, so that no cut is possible."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.drop(self.norm(layer(x)).relu())
        return self.head(x)


class CountsSteps(torch.optim.SGD):
    """Keeps the number of its steps among the state of the parameters, and lets the rate fall by the number."""

    def step(self, closure: Any = None) -> Any:
        self.state["steps"] = self.state.get("steps", 0) + 1
        self.param_groups[0]["lr"] = 0.1 / self.state["steps"]
        return super().step(closure)


def described(**changes: Any) -> TrainTask:
    arguments: dict[str, Any] = {
        "model": Net,
        "optimizer": partial(torch.optim.AdamW, lr=1e-3),
        "train": SAMPLES,
        "validate": SAMPLES,
        "batch_size": 32,
        "loss": functional.cross_entropy,
        "epochs": 3,
    }
    return TrainTask(**(arguments | changes))


def direct(**options: Any) -> Any:
    return running(**({"num_shards": None} | options))


FEATURES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "accumulate and clip": {"accumulate": 2, "max_grad_norm": 0.1},
    "bfloat16": {"precision": "bfloat16"},
    "float16": {"precision": "float16", "max_grad_norm": 0.5},
    "scheduler by step": {
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        "scheduler_interval": "step",
        "report_every": 2,
    },
    "no state": {"optimizer": partial(torch.optim.SGD, lr=0.1)},
    "a number in the state": {"optimizer": CountsSteps},
    "loader": {"train": DataLoader(SAMPLES, 20, shuffle=True), "validate": None, "batch_size": None},
    "callable": {"train": lambda: [(X[:40], Y[:40]), (X[40:], Y[40:])]},
    "pieces": {"split_batches": 2, "model": lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))},
}


@pytest.mark.parametrize("name", FEATURES)
def test_the_bits_are_the_plain_loops(name):
    tasks = [described(seed=seed, **FEATURES[name]) for seed in range(2)]
    with direct() as pool:
        results = pool.run(tasks)
    for one, result in zip(tasks, results, strict=True):
        assert not against_plain(one, result)
        assert result.num_shards == 1


def test_nothing_is_captured_and_no_operator_is_followed_after_the_first_step(monkeypatch):
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("captured")

    monkeypatch.setattr("hydra_tune.shard.partition.trial_step.capture", refuse)
    followed = []

    class Seen(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            followed.append(bool(torch.utils._python_dispatch._get_current_dispatch_mode_stack()))
            return super().forward(x)

    with direct() as pool:
        pool.run(described(model=lambda: Seen(64, 4), validate=None))
    assert followed == [True] + [False] * 8


@pytest.mark.cases(1 / 3)
def test_a_step_that_runs_out_of_room_completes_and_the_rest_is_cut():
    """With its activations on the host, once; the step before and the steps after make the plain loop's bits."""
    one = described(model=partial(Plain, 6), batch_size=96)
    with watched_ways() as ways, direct(device_memory="500KiB") as pool:
        result = pool.run(one)
        device = pool.stats().devices["cpu:0"]
    assert device.peak_bytes <= device.budget_bytes == 500 * 1024
    assert ways[id(one)].own_batches == 1
    assert result.num_shards > 1
    assert not against_plain(one, result)


@pytest.mark.parametrize("counts", [False, True])
def test_a_step_that_does_not_fit_whole_is_put_back_and_taken_cut(counts):
    """Its state and a single operator's values are too much; a step that counts in Python cannot be cut."""
    models = []

    def model() -> nn.Module:
        models.append(Averaged(6, counts=counts))
        return models[-1]

    one = described(model=model, optimizer=partial(torch.optim.SGD, lr=0.1), batch_size=96, validate=None)
    with direct(device_memory="282KiB") as pool:
        (result,) = pool.run([one], on_error="return")
    if counts:
        assert isinstance(result.error, BudgetError)
        assert models[0].calls == 0
        return
    assert result.num_shards > 1
    assert not against_plain(one, result)


def test_a_trial_that_cannot_be_cut_keeps_its_activations_on_the_host():
    one = described(model=partial(OneNorm, 6), batch_size=96)
    with direct(device_memory="520KiB") as pool:
        result = pool.run(one)
        device = pool.stats().devices["cpu:0"]
    assert device.peak_bytes <= device.budget_bytes == 520 * 1024
    assert device.bytes_out_by_kind["activations"] > 0
    assert result.num_shards == 1
    assert not against_plain(one, result)


@pytest.mark.cases(1 / 3)
def test_a_validation_batch_that_does_not_fit_whole_is_evaluated_in_shards():
    one = described(
        model=partial(Plain, 12),
        train=lambda: [(X[:4], Y[:4])],
        validate=lambda: [(X.repeat(8, 1), Y.repeat(8))],
        batch_size=None,
    )
    with direct(device_memory="800KiB") as pool:
        result = pool.run(one)
    assert result.num_shards > 1
    assert not against_plain(one, result)


@pytest.mark.cases(1 / 3)
def test_trials_that_do_not_fit_together_make_room_for_each_other():
    """Their tensors leave the device as blocks do, and come back."""
    tasks = [described(seed=seed, epochs=60) for seed in range(4)]
    with direct(devices="cpu:2", device_memory="300KiB", policy="round_robin", max_concurrent=4) as pool:
        results = pool.run(tasks)
        devices = pool.stats().devices.values()
    assert all(device.peak_bytes <= device.budget_bytes for device in devices)
    assert sum(sum(device.bytes_out_by_kind.values()) for device in devices) > 0
    for one, result in zip(tasks, results, strict=True):
        assert not against_plain(one, result)


class Aliased(nn.Module):
    """Reads its weights through an array that shares their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 4)
        self.seen = self.linear.weight.detach().numpy()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * float(1 + abs(self.seen).sum())


@pytest.mark.cases(1 / 3)
def test_memory_that_something_else_shares_is_not_torn_apart_when_room_is_made():
    tasks = [described(model=Aliased, seed=seed, epochs=60) for seed in range(3)]
    tasks += [described(seed=seed, epochs=60) for seed in range(3)]
    with direct(device_memory="300KiB", policy="round_robin", max_concurrent=6) as pool:
        results = pool.run(tasks)
    for one, result in zip(tasks, results, strict=True):
        assert not against_plain(one, result)


def test_the_users_tensors_are_left_where_they_are_while_there_is_room():
    places: list[tuple[int, int]] = []

    def step(module: nn.Module, batch: Any) -> Tensor:
        places.append((module.weight.data_ptr(), id(module.weight)))
        return functional.cross_entropy(module(batch[0]), batch[1])

    built = []

    def model() -> nn.Module:
        module = nn.Linear(64, 4)
        built.append((module.weight.data_ptr(), id(module.weight)))
        return module

    with direct() as pool:
        pool.run(described(model=model, loss=None, step=step, validate=None))
    assert set(places) == set(built)


def budget(nbytes: int, **options: Any) -> ShardPlanConstraints:
    return ShardPlanConstraints(budget_bytes=nbytes, buffer_fraction=0.15, alignment=64, **options)


@pytest.mark.parametrize(
    ("options", "changes", "why"),
    [
        ({"num_shards": "layer"}, {}, "num_shards='layer' asks for a cut"),
        ({"optimizer_placement": "host"}, {}, "optimizer_placement='host' asks for updates on the host"),
        ({}, {"compile": "eager"}, "compile='eager' asks for a captured step"),
        ({}, {"parallel": "data", "accumulate": 2}, "parallel='data' runs the batches of a captured step"),
        ({}, {"split_batches": "auto"}, "split_batches='auto'"),
    ],
)
def test_what_asks_for_a_cut_is_named(options, changes, why):
    module = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(module.parameters())
    found = uncaptured(described(**changes), module, optimizer, budget(1 << 30, **options))
    assert isinstance(found, str)
    assert why in found


@pytest.mark.parametrize(("kilobytes", "fits"), [(200, True), (70, False), (60, False)])
def test_what_does_not_fit_by_its_state_alone_is_cut_at_once(kilobytes, fits):
    """16.3 KB of parameters, as much of gradients, twice as much of optimizer state, and what the update works in."""
    module = nn.Linear(64, 64)
    found = uncaptured(described(), module, torch.optim.AdamW(module.parameters()), budget(kilobytes * 1024))
    assert isinstance(found, ShardPlan) == fits


class OwnAdamW(torch.optim.AdamW):
    """A class of the user's, with the steps of torch's."""


@pytest.mark.parametrize(
    ("kind", "uses_foreach", "kilobytes", "fits"),
    [
        (partial(torch.optim.AdamW, foreach=True), False, 80, False),
        (partial(torch.optim.AdamW, foreach=True), False, 96, True),
        (torch.optim.AdamW, True, 80, False),
        (partial(torch.optim.AdamW, foreach=False), True, 80, True),
        (OwnAdamW, True, 80, False),
        (OwnAdamW, False, 80, True),
        (partial(OwnAdamW, foreach=True), False, 80, False),
    ],
)
def test_all_that_an_update_takes_decides_whether_a_trial_runs_as_it_is(kind, uses_foreach, kilobytes, fits):
    """Of four layers with 16.5 KB of parameters, as much of gradients, and state and temporaries by the kind of optimizer."""
    module = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    optimizer = kind(module.parameters())
    found = uncaptured(described(), module, optimizer, budget(kilobytes * 1024, uses_foreach=uses_foreach))
    assert isinstance(found, ShardPlan) == fits


@pytest.mark.cases(1 / 3)
def test_an_optimizer_of_the_users_own_whose_update_does_not_fit_is_cut_at_once():
    """Its steps are torch's, and an update of all parameters at once takes as much memory as all of them."""
    one = described(model=partial(Plain, 8), optimizer=partial(OwnAdamW, foreach=True), batch_size=4)
    parameter_bytes = sum(p.nbytes for p in Plain(8).parameters())
    with watched_ways() as ways, direct(device_memory=int(4.8 * parameter_bytes)) as pool:
        result = pool.run(one)
    assert ways[id(one)].own_batches == 0
    assert not against_plain(one, result)


def test_an_optimizer_of_the_users_own_is_not_stepped_to_be_measured():
    class Counting(torch.optim.SGD):
        steps: list[int] = []  # noqa: RUF012 - shared on purpose

        def step(self, closure: Any = None) -> None:
            self.steps.append(len(self.steps))
            super().step(closure)

    with direct() as pool:
        pool.run(described(optimizer=partial(Counting, lr=0.1), validate=None))
    assert len(Counting.steps) == 9


def test_a_prune_ends_a_burst_at_the_next_step(monkeypatch):
    monkeypatch.setattr(burst, "BURST_SECONDS", 3600.0)
    stopped, steps = threading.Event(), []

    def batches() -> Iterator[Any]:
        for number in range(1000):
            steps.append(number)
            if number == 20:
                waiting.set()
                stopped.wait(PATIENCE_SECONDS)
            yield X[:8], Y[:8]

    waiting = threading.Event()
    with direct() as pool:
        job = pool.submit(described(train=batches, validate=None, batch_size=None, epochs=1))
        assert waiting.wait(PATIENCE_SECONDS)
        job.cancel()
        stopped.set()
        assert job.result(PATIENCE_SECONDS).status == "cancelled"
    assert len(steps) == 21


def test_a_trial_that_begins_to_wait_ends_the_burst_of_another(monkeypatch):
    monkeypatch.setattr(burst, "BURST_SECONDS", 3600.0)
    begun, steps = threading.Event(), []

    def other() -> list[Any]:
        begun.set()
        return [(X[:8], Y[:8])]

    def batches() -> Iterator[Any]:
        while not begun.is_set():
            steps.append(0)
            if len(steps) == 5:
                second.append(pool.submit(described(train=other, validate=None, batch_size=None, epochs=1)))
            yield X[:8], Y[:8]

    second: list[Any] = []
    with direct(policy="round_robin") as pool:
        first = pool.submit(described(train=batches, validate=None, batch_size=None, epochs=1))
        assert first.result(PATIENCE_SECONDS).status == "completed"
        assert second[0].result(PATIENCE_SECONDS).status == "completed"


def test_a_report_is_told_when_it_is_made(monkeypatch):
    monkeypatch.setattr(burst, "BURST_SECONDS", 3600.0)
    with direct() as pool:
        events = pool.events()
        job = pool.submit(described(), events=events)
        seen = []
        while isinstance(event := events.get(PATIENCE_SECONDS), Reported):
            seen.append(event.step)
            event.job.proceed()
        assert job.result(PATIENCE_SECONDS).status == "completed"
    assert seen == [0, 1, 2]


def test_what_does_not_fit_even_with_its_activations_on_the_host_fails_by_name():
    one = described(
        model=lambda: nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 4)),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        batch_size=96,
        validate=None,
    )
    with direct(device_memory="2400KiB") as pool:
        (result,) = pool.run([one], on_error="return")
    assert result.status == "failed"
    assert isinstance(result.error, BudgetError)


def test_small_models_of_the_pools_own_tests_fit(tmp_path):
    """A checkpoint of a trial that runs its own code is one that a trial goes on from."""
    one = task(epochs=4)
    with direct(checkpoint_dir=tmp_path, checkpoint_every=1) as pool:
        job = pool.submit(one, name="a")
        result = job.result(PATIENCE_SECONDS)
    assert not against_plain(one, result)
    with HydraExecutor(devices="cpu:1", checkpoint_dir=tmp_path) as pool:
        again = pool.submit(one, resume_from=result.checkpoint).result(PATIENCE_SECONDS)
    assert not against_plain(one, again)


Pair = namedtuple("Pair", ["inputs", "labels"])  # noqa: PYI024 - as users' collate functions make them


def test_a_batch_that_moves_to_another_device_keeps_the_classes_of_its_containers():
    tensor, place = torch.zeros(2), torch.device("meta")
    batch = [
        defaultdict(list, inputs=tensor),
        OrderedDict(inputs=tensor, name="a"),
        Pair(tensor, (tensor, 3)),
        {"nested": [tensor]},
    ]
    found = moved(batch, place)
    assert [type(item) for item in found] == [defaultdict, OrderedDict, Pair, dict]
    assert found[0].default_factory is list
    assert found[1]["name"] == "a"
    assert found[2].labels[1] == 3
    tensors = [found[0]["inputs"], found[1]["inputs"], *found[2][:1], found[2].labels[0], found[3]["nested"][0]]
    assert {each.device.type for each in tensors} == {"meta"}
    assert batch[0]["inputs"] is tensor, "the batch that was given is as it was"


def test_state_that_a_step_makes_is_on_the_device_for_the_next_step_of_the_burst(tmp_path, monkeypatch):
    """Where tensors do not lie where the device computes, as with a disk behind the host, or on a GPU."""
    monkeypatch.setattr(burst, "BURST_SECONDS", PATIENCE_SECONDS)
    resident = []

    def step(module, batch):
        resident.append(pool.stats().devices["cpu:0"].resident_bytes)
        return functional.cross_entropy(module(batch[0]), batch[1])

    described = task(step=step, loss=None)
    with running(num_shards=None, host_memory="64MiB", spill_dir=tmp_path) as pool:
        result = pool.submit(described).result(PATIENCE_SECONDS)
    parameters, *later = resident
    assert parameters >= sum(p.nbytes for p in mlp().parameters())
    assert min(later) >= 3 * parameters, "AdamW has two tensors for each parameter"
    assert against_plain(described, result) == []


@pytest.mark.cases(1 / 3)
def test_in_mixed_precision_too_the_optimizers_state_needs_room_beside_activations():
    """Parameters of 2 MiB, 15 MiB that autograd saves, and 4 MiB of state that the first step of AdamW makes."""

    def model():
        return nn.Sequential(
            *(layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU())), nn.Linear(256, 4)
        )

    generator = torch.Generator().manual_seed(5)
    batches = [(torch.randn(2048, 256, generator=generator), torch.zeros(2048, dtype=torch.long)) for _ in range(3)]
    described = task(model=model, train=lambda: batches, precision="bfloat16", epochs=1)
    with running(num_shards=None, device_memory="24MiB") as pool:
        result = pool.submit(described).result(PATIENCE_SECONDS)
        statistics = pool.stats().devices["cpu:0"]
    assert against_plain(described, result) == []
    assert statistics.peak_bytes <= statistics.budget_bytes


class Multiplied(nn.Sequential):
    """Multiplies numbers, whose gradient torch takes in another way where a mode is active."""

    def forward(self, x: Tensor) -> Tensor:
        hidden, head = self
        return head(torch.sigmoid(hidden(x)).unflatten(1, (8, 8)).prod(2))


class Filled(nn.Sequential):
    """Fills in a learned number, whose gradient torch takes in another way where a mode is active."""

    def forward(self, x: Tensor) -> Tensor:
        hidden, head = self
        return head(torch.tanh(hidden(x).masked_fill(x < 0.5, head.bias.sum())))


class Uncapturable(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        x.detach().numpy().sum()
        return super().forward(x)


@pytest.mark.parametrize(
    "model",
    [lambda: Multiplied(nn.Linear(64, 64), nn.Linear(8, 4)), lambda: Filled(nn.Linear(64, 64), nn.Linear(64, 4))],
    ids=["prod", "masked_fill"],
)
@pytest.mark.parametrize("way", ["followed", "whole"])
def test_gradients_that_modes_would_change_are_the_plain_loops(model, way):
    changed = described(model=model if way == "followed" else lambda: Uncapturable(model()))
    with direct() if way == "followed" else HydraExecutor("cpu:1", num_shards=1) as pool:
        assert not against_plain(changed, pool.run(changed))


def ragged(layout: torch.layout) -> Any:
    return lambda: [(torch.nested.nested_tensor([X[:1], X[1:3]], layout=layout), Y[:2])]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_batches_are_refused_with_the_remedy(layout):
    changes = {"train": ragged(layout), "validate": None, "batch_size": None}
    padded = described(
        step=lambda module, batch: module(batch[0].to_padded_tensor(0.0)[:, 0]).sum(), loss=None, **changes
    )
    with direct() as pool, pytest.raises(TaskError, match=r"dense tensors only, .* nested.* pad the tensor"):
        raise pool.submit(padded).result(PATIENCE_SECONDS).error
