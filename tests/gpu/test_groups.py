"""Groups on a GPU: each member's numbers are those of the trial alone there, drawn, traced, recorded and placed."""

import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, AdamW, lr_scheduler
from torch.utils.data import TensorDataset

from hydra_tune import HydraExecutor, Reported, TrainTask, train_plain
from hydra_tune.batched.batched_random import HoistedDraw, TurnTakingGenerator, draw_all, dropout_mask
from hydra_tune.devices.cuda import CudaGenerator
from hydra_tune.fusion.compile import group_plan_cache
from hydra_tune.fusion.group import group_trial
from hydra_tune.pool.job import OVER

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PATIENCE_SECONDS = 300.0
GENERATOR = torch.Generator().manual_seed(4)
X = torch.randn(48, 6, 8, generator=GENERATOR, dtype=torch.float64)
Y = torch.randint(4, (48,), generator=GENERATOR)


class Plain(nn.Module):
    """Draws nothing."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.norm(self.first(x).mean(1)).relu())


class Drops(nn.Module):
    """Dropout of elements and of whole channels."""

    def __init__(self, p=0.3):
        super().__init__()
        self.first, self.drop, self.channels, self.head = (
            nn.Linear(8, 16),
            nn.Dropout(p),
            nn.Dropout1d(0.2),
            nn.Linear(16, 4),
        )

    def forward(self, x):
        return self.head(self.channels(self.drop(self.first(x).relu())).mean(1))


class Makes(nn.Module):
    """Makes tensors where its input is, moves and converts them: the capture, which is made on the host, names the CPU."""

    def __init__(self):
        super().__init__()
        self.table, self.linear = nn.Embedding(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        places = torch.arange(x.size(1), device=x.device)
        with torch.no_grad():
            shift = torch.ones(8, device=x.device) + torch.zeros(8).to(x.device)
        h = x + self.table(places) + shift + torch.tensor([1.0] * 8, device=x.device)
        return self.linear(h.to(torch.float64)).mean(1)


def task(seed, kind=Plain, **changes):
    arguments = {
        "model": lambda: kind().double(),
        "optimizer": partial(SGD, lr=0.1 / (seed + 1), momentum=0.9),
        "train": TensorDataset(X, Y),
        "batch_size": 8,
        "loss": functional.cross_entropy,
        "epochs": 4,
        "seed": seed,
        "scheduler": partial(lr_scheduler.ExponentialLR, gamma=0.9),
        "scheduler_interval": "step",
    }
    return TrainTask(**(arguments | changes))


def run(tasks, **options):
    with HydraExecutor("cuda:0", "512MiB", max_concurrent=len(tasks), **options) as pool:
        results = pool.run(tasks, on_error="return")
    for result in results:
        if result.error is not None:
            raise result.error
    return results


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        losses = [torch.tensor([entry["train_loss"] for entry in result.history]) for result in (one, other)]
        torch.testing.assert_close(*losses, rtol=1e-7, atol=0)
        state = other.state_dict()
        for name, tensor in one.state_dict().items():
            torch.testing.assert_close(tensor.cpu(), state[name].cpu(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("compiles", [None, "cudagraphs"])
@pytest.mark.parametrize("optimizer", [partial(SGD, momentum=0.9), AdamW])
@pytest.mark.parametrize("kind", [Plain, Makes])
def test_members_train_as_in_a_plain_loop_on_the_host(kind, optimizer, compiles):
    tasks = [task(seed, kind, optimizer=partial(optimizer, lr=0.01 * (seed + 1))) for seed in range(3)]
    found = run(tasks, fusion="on", fusion_compile=compiles)
    assert [result.group_size for result in found] == [3, 3, 3]
    assert_same(found, [train_plain(one) for one in tasks])


@pytest.mark.parametrize("compiles", [None, "cudagraphs"])
@pytest.mark.parametrize(("precision", "near"), [("bfloat16", 2**-5), ("float16", 2**-8)])
def test_members_in_mixed_precision_are_near_the_trial_alone_on_the_gpu(precision, near, compiles):
    """In float32 and not in float64, which autocast would leave; scaled gradients of a batch overflow in float16."""
    inputs = X.float()
    inputs[9] *= 100
    changes = {"train": TensorDataset(inputs, Y), "precision": precision, "epochs": 2}
    tasks = [task(seed, model=Drops, **changes) for seed in range(3)]
    alone = [run([one])[0] for one in tasks]
    found = run(tasks, fusion="on", fusion_compile=compiles)
    assert [result.group_size for result in found] == [3, 3, 3]
    for one, other in zip(found, alone, strict=True):
        for name, tensor in other.state_dict().items():
            torch.testing.assert_close(one.state_dict()[name].cpu(), tensor.cpu(), rtol=near, atol=near)


def test_members_are_evaluated_in_parts(monkeypatch):
    def halves(plan, count, budget_bytes):
        del budget_bytes
        middle = (count + 1) // 2
        return [range(count)] if plan.mode == "train" else [range(middle), range(middle, count)]

    for module in (group_trial, group_plan_cache):
        monkeypatch.setattr(module, "parts_of", halves)
    tasks = [task(seed, validate=TensorDataset(X[:20], Y[:20])) for seed in range(3)]
    alone = [run([one])[0] for one in tasks]
    found = run(tasks, fusion="on")
    assert [result.group_size for result in found] == [3, 3, 3]
    assert_same(found, alone)
    for one, other in zip(found, alone, strict=True):
        losses = [[entry["val_loss"] for entry in result.history] for result in (one, other)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-7)


def test_what_makes_tensors_runs_unfused_too():
    tasks = [task(seed, Makes) for seed in range(2)]
    assert_same(run(tasks), [train_plain(one) for one in tasks])


@pytest.mark.parametrize("compiles", [None, "cudagraphs"])
@pytest.mark.parametrize("probabilities", [(0.3, 0.3, 0.3), (0.1, 0.0, 0.6)])
def test_masks_are_those_of_the_trial_alone_on_the_gpu(probabilities, compiles):
    tasks = [task(seed, partial(Drops, p)) for seed, p in enumerate(probabilities)]
    alone = [run([one])[0] for one in tasks]
    assert_same(run(tasks, fusion="on", fusion_compile=compiles), alone)
    assert_same(run(tasks[::-1][:2], fusion="on", fusion_compile=compiles), alone[::-1][:2])


def test_a_second_device_on_the_gpu_draws_meanwhile():
    tasks = [task(seed, Drops) for seed in range(4)]
    alone = [run([one])[0] for one in tasks]
    with HydraExecutor("cuda:0,0", "512MiB", fusion="on", fusion_size=2, fusion_compile="cudagraphs") as pool:
        assert_same(pool.run(tasks), alone)


def test_steps_are_recorded_and_replayed(caplog):
    with caplog.at_level(logging.INFO, "hydra_tune.fusion"):
        run([task(seed, Drops) for seed in range(3)], fusion="on", fusion_compile="cudagraphs")
    assert "the step of a group of 3 is replayed as a CUDA graph" in caplog.text
    assert "not replayed" not in caplog.text


class Asks(nn.Module):
    """Waits for the GPU in its forward: the inverse of a matrix says whether there is one."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        h = self.first(x)
        near = torch.linalg.inv(h.transpose(1, 2) @ h + 8 * torch.eye(8, dtype=h.dtype, device=h.device))
        return self.head((h @ near).mean(1))


def test_what_may_not_be_recorded_trains_all_the_same():
    """Whether it is recorded or not is torch's affair; with dropout, whose generator a failed recording must not spoil."""
    tasks = [task(seed, lambda: nn.Sequential(Asks(), nn.Dropout(0.2))) for seed in range(2)]
    alone = [run([one])[0] for one in tasks]
    assert_same(run(tasks, fusion="on", fusion_compile="cudagraphs"), alone)


def test_groups_that_have_not_all_room_at_once_are_spilled_and_recorded_anew():
    """Two kinds, whose state together is more than the budget: what comes back lies elsewhere."""

    def wide(width):
        return nn.Sequential(nn.Flatten(), nn.Linear(48, width), nn.ReLU(), nn.Linear(width, 512), nn.Linear(512, 4))

    tasks = [task(seed, partial(wide, 1024 + 256 * (seed % 2)), epochs=2) for seed in range(4)]
    with HydraExecutor("cuda:0", "44MiB", fusion="on", fusion_compile="cudagraphs", max_concurrent=4) as pool:
        events = pool.events()
        jobs = [pool.submit(one, None, events) for one in tasks]
        first = [events.get(PATIENCE_SECONDS) for _ in jobs]  # neither kind is over before the other has begun
        assert all(isinstance(event, Reported) for event in first)
        for event in first:
            event.job.proceed()
        while not all(job.state in OVER for job in jobs):
            event = events.get(PATIENCE_SECONDS)
            if isinstance(event, Reported):
                event.job.proceed()
        found = [job.result() for job in jobs]
        stats = pool.stats().devices["cuda:0"]
    assert_same(found, [train_plain(one) for one in tasks])
    assert stats.bytes_out > 0, "they have not fitted together"
    assert stats.peak_bytes <= 44 << 20


def turns(seeds):
    device = torch.device("cuda", 0)
    states = [torch.Generator(device).manual_seed(seed).get_state() for seed in seeds]
    return TurnTakingGenerator(states, CudaGenerator(device), [True] * len(seeds), {})


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
    wanted, device = [noise(is_dropout=True), noise()], torch.device("cuda", 0)
    group = turns([3, 4, 5])
    together = draw_all(wanted, group, device)
    for index, seed in enumerate((3, 4, 5)):
        alone = turns([seed])
        for found, own in zip(together, draw_all(wanted, alone, device), strict=True):
            assert torch.equal(found[index], own[0])
        assert torch.equal(group.states[index], alone.states[0])


@pytest.mark.parametrize("shape", [(5, 7), (64, 513)])
def test_masks_are_what_the_kernel_for_dropout_draws(shape):
    x = torch.randn(shape, device="cuda").t()
    torch.cuda.manual_seed(11)
    mask = dropout_mask(torch.empty_like(x), 0.6)
    torch.cuda.manual_seed(11)
    torch.testing.assert_close(x * mask / 0.6, functional.dropout(x, 0.4))
