"""What the user's code does with its tensors' memory: it counts, and nobody else loses a tensor by a trial's end."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hydra_tune import HydraExecutor, TrainTask
from hydra_tune.train.loop import burst
from tests.unit.pool.tasks import against_plain

WIDTH = 32
KIB = 1024


def batches(count=12):
    stream = torch.Generator().manual_seed(1)
    return [(torch.randn(8, WIDTH, generator=stream), torch.randint(4, (8,), generator=stream)) for _ in range(count)]


def described(**changes) -> TrainTask:
    arguments = {
        "model": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)),
        "optimizer": lambda parameters: torch.optim.SGD(
            [p for p in parameters if p.requires_grad], lr=0.1, momentum=0.9
        ),
        "train": batches,
        "loss": functional.cross_entropy,
        "epochs": 2,
    }
    return TrainTask(**(arguments | changes))


def run(tasks, **options):
    with HydraExecutor(**{"devices": "cpu:1", "device_memory": "40MiB", **options}) as pool:
        return pool.run(tasks, on_error="return")


class Fails(nn.Module):
    """A frozen table and a head; the forward raises at its fifth call, if it is to."""

    def __init__(self, table: nn.Module, *, fails: bool) -> None:
        super().__init__()
        self.table, self.head, self.fails, self.calls = table, nn.Linear(WIDTH, 4), fails, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.fails and self.calls == 5:
            raise RuntimeError("mine")
        return self.head(self.table(x))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"device_memory": 28 * KIB, "max_concurrent": 4},
        {"devices": "cpu:2", "max_concurrent": 4},
        {"num_shards": 1, "max_concurrent": 4},
    ],
    ids=["all fit", "tight", "two devices", "captured"],
)
def test_a_trial_that_fails_leaves_what_others_read(options, monkeypatch):
    monkeypatch.setattr(burst, "BURST_SECONDS", 0.0)
    torch.manual_seed(2)
    table = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    before = table.weight.detach().clone()
    tasks = [described(model=lambda fails=i == 1: Fails(table, fails=fails), seed=i) for i in range(4)]
    results = run(tasks, **options)
    assert [result.status for result in results].count("failed") == 1
    assert table.weight.shape == before.shape
    assert torch.equal(table.weight, before)
    for described_task, result in zip(tasks, results, strict=True):
        if result.status == "completed":
            assert against_plain(described_task, result) == []


def test_a_live_module_keeps_its_parameters_when_its_trial_fails():
    module = Fails(nn.Linear(WIDTH, WIDTH), fails=True)
    (result,) = run([described(model=lambda: module)])
    assert result.status == "failed"
    assert [tuple(p.shape) for p in module.parameters()] == [(WIDTH, WIDTH), (WIDTH,), (4, WIDTH), (4,)]


class Assigns(torch.optim.Optimizer):
    """An optimizer that gives parameters other memory at each step."""

    def __init__(self, parameters, dtype: torch.dtype | None = None) -> None:
        super().__init__(parameters, {})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.data = (p.data - 0.1 * p.grad).to(self.dtype or p.dtype)


class Clamps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.calls = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.first.weight.data = self.first.weight.data.clamp(-0.1, 0.1)
        return self.last(self.first(x).tanh())


class Doubles(Clamps):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 9:
            self.double()
        return self.last(self.first(x.to(self.first.weight.dtype)).tanh())


@pytest.mark.parametrize("num_shards", [1, 2])
def test_memory_that_an_optimizer_assigns_is_kept_where_a_trial_is_cut(num_shards):
    task = described(optimizer=Assigns)
    (result,) = run([task], num_shards=num_shards)
    assert against_plain(task, result) == []


def test_another_dtype_is_refused_by_name_where_a_trial_is_cut():
    (result,) = run([described(optimizer=lambda parameters: Assigns(parameters, torch.float64))], num_shards=2)
    assert result.status == "failed"
    assert "another shape or dtype" in str(result.error)


@pytest.mark.parametrize("where", ["tight", "disk"])
@pytest.mark.parametrize("kind", ["optimizer", "clamp", "double"])
def test_memory_that_own_code_assigns_is_kept(kind, where, monkeypatch, tmp_path):
    monkeypatch.setattr(burst, "BURST_SECONDS", 0.0)
    changes = {"optimizer": {"optimizer": Assigns}, "clamp": {"model": Clamps}, "double": {"model": Doubles}}[kind]
    options = {"spill_dir": tmp_path} if where == "disk" else {"device_memory": 30 * KIB}
    tasks = [described(**changes, seed=seed) for seed in range(4)]
    results = run(tasks, max_concurrent=4, policy="round_robin", **options)
    assert [against_plain(task, result) for task, result in zip(tasks, results, strict=True)] == [[]] * 4


class Aliases(nn.Module):
    """A parameter that numpy changes, a detached view of another, and a buffer that becomes one."""

    def __init__(self) -> None:
        super().__init__()
        self.array = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype("float32") * 0.1
        self.weight = nn.Parameter(torch.from_numpy(self.array))
        self.last = nn.Linear(WIDTH, 4)
        self.view = self.last.weight.detach()
        self.register_buffer("late", torch.zeros(4, WIDTH))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 5:
            self.late = self.last.weight.detach()
        self.array *= 0.999
        return self.last((x @ self.weight).relu()) + functional.linear(x, self.view) + functional.linear(x, self.late)


def test_aliases_hold_with_a_spill_dir_and_results_have_memory_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setattr(burst, "BURST_SECONDS", 0.0)
    tasks = [described(model=Aliases, seed=seed) for seed in range(3)]
    results = run(tasks, spill_dir=tmp_path, max_concurrent=3)
    assert [against_plain(task, result) for task, result in zip(tasks, results, strict=True)] == [[]] * 3
    module = results[0].module()
    assert module.late.data_ptr() != module.last.weight.data_ptr()


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(2 * WIDTH * WIDTH) * 0.1
        self.a = nn.Parameter(whole[: WIDTH * WIDTH].view(WIDTH, WIDTH))
        self.b = nn.Parameter(whole[WIDTH * WIDTH :].view(WIDTH, WIDTH))
        self.last = nn.Linear(WIDTH, 4)
        self.tied = self.last

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x @ self.a).relu() @ self.b)


def test_results_have_storages_of_their_own_and_ties_hold():
    task = described(model=Flat)
    (result,) = run([task])
    assert against_plain(task, result) == []
    module = result.module()
    assert module.tied.weight is module.last.weight
    assert all(p.untyped_storage().nbytes() == p.numel() * p.element_size() for p in module.parameters())
