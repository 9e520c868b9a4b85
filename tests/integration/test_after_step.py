"""`after_step=` runs after each optimizer step and may write weights, as in a loop by hand."""

import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from hydra_tune import HydraExecutor, Reported, TrainTask, train_plain
from hydra_tune.pool.job import OVER
from tests.support.gathered import gather

PATIENCE_SECONDS = 60
BATCHES = 6
WAYS = {
    "own code": {},
    "own code, spilled": {"device_memory": "500KiB"},
    "cut": {"num_shards": 3},
    "cut, spilled": {"num_shards": 3, "device_memory": "160KiB"},
}


class WithAverage(nn.Module):
    """Evaluates with the average of its weights."""

    def __init__(self):
        super().__init__()
        layers = [nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)]
        self.net = nn.Sequential(*layers)
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9)).requires_grad_(False)

    def forward(self, x):
        return self.net(x) if self.training else self.average(x)


def average(module, _optimizer, _steps):
    module.average.update_parameters(module.net)


def clamp(module, optimizer, steps):
    """Keeps weights small, as a critic's are, and lowers the rate."""
    with torch.no_grad():
        for parameter in module.net.parameters():
            parameter.clamp_(-0.1, 0.1)
    optimizer.param_groups[0]["lr"] = 0.01 / steps


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(BATCHES):
        yield torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)


def trained(module):
    return list(module.net.parameters())


def task(after_step, seed=0, **changes):
    arguments = {
        "model": WithAverage,
        "param_groups": trained,
        "optimizer": partial(torch.optim.AdamW, lr=0.01),
        "loss": functional.cross_entropy,
        "train": batches,
        "validate": batches,
        "epochs": 3,
        "seed": seed,
    }
    return TrainTask(after_step=after_step, **(arguments | changes))


def by_hand(described):
    """What anyone would write."""
    torch.manual_seed(described.seed)
    module = WithAverage()
    optimizer, steps = described.optimizer(trained(module)), 0
    for _ in range(described.epochs):
        module.train()
        for number, (x, y) in enumerate(batches(), start=1):
            (functional.cross_entropy(module(x), y) / described.accumulate).backward()
            if number % described.accumulate and number < BATCHES:
                continue
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            described.after_step(module, optimizer, steps)
        module.eval()
        with torch.no_grad():
            losses = [functional.cross_entropy(module(x), y).item() for x, y in batches()]
    return module.state_dict(), sum(losses) / len(losses)


def assert_same(result, described):
    state, loss = by_hand(described)
    assert result.error is None
    assert result.metrics["val_loss"] == pytest.approx(loss, rel=1e-12)
    assert [name for name, tensor in result.state_dict().items() if not tensor.equal(state[name])] == []


@pytest.mark.cases(2)
@pytest.mark.parametrize("after_step", [average, clamp])
@pytest.mark.parametrize("changes", [{}, pytest.param({"accumulate": 4}, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_the_bits_are_those_of_a_loop_by_hand(way, changes, after_step):
    described = task(after_step, **changes)
    with HydraExecutor("cpu:1", max_concurrent=2, **WAYS[way]) as pool:
        results = pool.run([described, task(after_step, 1, **changes)])
    assert_same(results[0], described)
    assert_same(results[1], task(after_step, 1, **changes))
    assert (results[0].num_shards > 1) == way.startswith("cut")


def test_the_plain_loop_calls_the_function_too():
    assert_same(train_plain(task(average)), task(average))


@pytest.mark.parametrize("way", ["own code", "cut, spilled"])
def test_a_resumed_trial_goes_on_with_what_the_function_has_written(way, tmp_path):
    with HydraExecutor("cpu:1", checkpoint_dir=tmp_path, **WAYS[way]) as pool:
        events = pool.events()
        job = pool.submit(task(average), "trial", events)
        while job.state not in OVER:
            event = events.get(PATIENCE_SECONDS)
            if isinstance(event, Reported) and event.step == 1:
                pool.suspend([job])
                break
            event.job.proceed()
    with HydraExecutor("cpu:1", checkpoint_dir=tmp_path, **WAYS[way]) as pool:
        path = pool.find_checkpoint("trial").path
        result = pool.submit(task(average), "trial", resume_from=path).result(PATIENCE_SECONDS)
    assert_same(result, task(average))


def test_such_trials_are_not_fused(monkeypatch, caplog):
    gather(monkeypatch, lambda count: count >= 2)
    tasks = [task(average, seed) for seed in range(2)]
    with HydraExecutor("cpu:1", fusion="on") as pool, caplog.at_level(logging.INFO, "hydra_tune.fusion"):
        results = pool.run(tasks)
    for result, described in zip(results, tasks, strict=True):
        assert_same(result, described)
    assert "its after_step= gets the model after each step" in caplog.text


@pytest.mark.parametrize("way", ["own code", "cut"])
def test_its_error_is_the_trials_own(way):
    def fails(_module, _optimizer, steps):
        if steps == 4:
            raise ValueError("of the user's own")

    with HydraExecutor("cpu:1", **WAYS[way]) as pool:
        failed, other = pool.run([task(fails), task(average)], on_error="return")
    assert "of the user's own" in str(failed.error)
    assert_same(other, task(average))


def test_a_function_that_replaces_a_parameter_of_a_cut_model_is_refused():
    def replaces(module, _optimizer, _steps):
        module.net[0].weight = nn.Parameter(module.net[0].weight.detach().clone())

    with HydraExecutor("cpu:1", **WAYS["cut"]) as pool:
        (failed,) = pool.run([task(replaces)], on_error="return")
    assert failed.error is not None


class Annealed(nn.Module):
    """Weighs its outputs by a number of Python, or by a buffer."""

    def __init__(self, *, is_buffer):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
        if is_buffer:
            self.register_buffer("weight", torch.zeros(()))
        else:
            self.weight = 0.0

    def forward(self, x):
        return self.net(x) * (1 + self.weight)


def anneal_number(module, _optimizer, steps):
    module.weight = steps / 100


def anneal_buffer(module, _optimizer, steps):
    module.weight.fill_(steps / 100)


@pytest.mark.parametrize("after_step", [anneal_number, anneal_buffer])
def test_a_number_or_a_buffer_that_is_annealed_is_followed_by_a_cut_model(after_step, caplog):
    is_buffer = after_step is anneal_buffer
    described = task(after_step, model=partial(Annealed, is_buffer=is_buffer), param_groups=None)
    with HydraExecutor("cpu:1", **WAYS["cut"]) as pool, caplog.at_level(logging.INFO, "hydra_tune.train"):
        (result,) = pool.run([described])
    expected = train_plain(described)
    assert result.metrics == expected.metrics
    assert all(tensor.equal(expected.state_dict()[name]) for name, tensor in result.state_dict().items())
    assert caplog.text.count("is captured again") == (0 if is_buffer else 2)  # once for each mode


class Shrinking(torch.optim.lr_scheduler.LRScheduler):
    """Decays all weights, at each step of the schedule."""

    def get_lr(self):
        with torch.no_grad():
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.9)
        return [group["lr"] for group in self.optimizer.param_groups]


class ShrinkingAlone:
    """Decays all weights, and derives from no class of torch's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        Shrinking.get_lr(self)


def wide():
    return nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(128, 128), nn.Tanh())), nn.Linear(128, 3))


@pytest.mark.cases(1)
@pytest.mark.parametrize("scheduler", [Shrinking, ShrinkingAlone])
@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_a_scheduler_that_writes_weights_writes_those_of_a_cut_model(interval, scheduler):
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(96, 128, generator=generator)
    described = TrainTask(
        model=wide,
        optimizer=partial(torch.optim.AdamW, lr=0.003),
        loss=functional.cross_entropy,
        train=TensorDataset(rows, rows[:, :3].argmax(1)),
        validate=TensorDataset(rows[:40], rows[:40, :3].argmax(1)),
        batch_size=16,
        epochs=3,
        scheduler=scheduler,
        scheduler_interval=interval,
    )
    with HydraExecutor("cpu:1", device_memory="700KiB") as pool:
        (result,) = pool.run([described])
    expected = train_plain(described).state_dict()
    assert result.num_shards > 1
    assert [name for name, tensor in result.state_dict().items() if not tensor.equal(expected[name])] == []
