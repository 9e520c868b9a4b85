"""`train_plain` is the meaning of a task: it equals the loop one would write by hand, and names what cannot work."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from hydra_tune.errors import MetricError, TaskError
from hydra_tune.loop_task import LoopTask
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.task import TrainTask
from hydra_tune.train.loop.reference_loop import train_plain

X = torch.randn(22, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(dim=1, keepdim=True)
PAIR = [(X, Y)]
RAGGED = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(2, 4)], layout=torch.jagged)


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))


def task(**changes):
    arguments = {
        "model": net,
        "optimizer": partial(torch.optim.AdamW, lr=0.01),
        "train": TensorDataset(X, Y),
        "batch_size": 8,
        "loss": nn.MSELoss(),
        "epochs": 3,
        "seed": 7,
    }
    return TrainTask(**(arguments | changes))


def on_batches(**changes):
    return task(train=lambda: PAIR, batch_size=None, **changes)


def test_equals_a_loop_written_by_hand():
    torch.manual_seed(7)
    module = net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    losses, validation = [], []
    for _ in range(3):
        module.train()
        for x, y in DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True):
            loss = nn.functional.mse_loss(module(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        module.eval()
        with torch.no_grad():
            parts = [
                (nn.functional.mse_loss(module(x), y).item() * len(x), len(x))
                for x, y in DataLoader(TensorDataset(X, Y), batch_size=8)
            ]
        validation.append(sum(total for total, _ in parts) / sum(count for _, count in parts))

    result = train_plain(task(validate=TensorDataset(X, Y)))

    assert result.losses == losses
    assert [entry["val_loss"] for entry in result.history] == validation
    for name, value in module.state_dict().items():
        assert torch.equal(value, result.state_dict()[name])


@pytest.mark.parametrize("order", ["module", "groups"])
def test_clips_as_a_loop_over_parameters_in_an_order(order):
    def deep():
        return nn.Sequential(*[nn.Linear(8, 8) for _ in range(12)], nn.Linear(8, 1))

    def groups(module):
        named = dict(module.named_parameters())
        return [{"params": [p for n, p in named.items() if n.endswith(end)]} for end in ("bias", "weight")]

    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(7)
    module = deep()
    optimizer = torch.optim.SGD(groups(module), lr=0.1)
    for _ in range(20):
        nn.functional.mse_loss(module(x), x[:, :1]).backward()
        in_groups = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(in_groups if order == "groups" else module.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()

    sgd = partial(torch.optim.SGD, lr=0.1)
    clipped = on_batches(model=deep, param_groups=groups, optimizer=sgd, max_grad_norm=0.1, clip_order=order, epochs=20)
    result = train_plain(replace(clipped, train=lambda: [(x, x[:, :1])]))
    assert all(torch.equal(value, result.state_dict()[name]) for name, value in module.state_dict().items())


def test_all_three_random_streams_are_seeded():
    drawn = []

    def model():
        drawn.append((torch.rand(()).item(), np.random.rand(), random.random()))  # noqa: NPY002 - the global stream
        return net()

    train_plain(task(model=model))
    train_plain(task(model=model))
    train_plain(task(model=model, seed=8))
    assert drawn[0] == drawn[1]
    assert all(one != other for one, other in zip(drawn[0], drawn[2], strict=True))


def test_train_loss_is_weighted_by_samples_and_starts_anew_at_each_report():
    history = train_plain(task(optimizer=partial(torch.optim.SGD, lr=0.0), model=lambda: nn.Linear(4, 1))).history
    module = train_plain(task(optimizer=partial(torch.optim.SGD, lr=0.0), model=lambda: nn.Linear(4, 1))).module()
    whole = nn.functional.mse_loss(module(X), Y).item()
    assert [entry["train_loss"] for entry in history] == pytest.approx([whole] * 3)


def test_the_step_of_a_report_is_the_epoch_or_the_number_of_optimizer_steps():
    assert [entry["step"] for entry in train_plain(task()).history] == [0, 1, 2]
    history = train_plain(task(report_every=2)).history
    assert [(entry["step"], entry["epoch"]) for entry in history] == [(2, 0), (4, 1), (6, 1), (8, 2)]


def test_false_from_report_prunes_there():
    seen = []

    def report(step, metrics):
        seen.append((step, metrics))
        return len(seen) < 2

    result = train_plain(task(), report)
    assert result.status == "pruned"
    assert [step for step, _ in seen] == [0, 1]
    assert result.metrics == seen[-1][1]
    assert len(result.losses) == 6


def test_a_report_without_an_answer_goes_on():
    assert train_plain(task(), lambda step, metrics: None).status == "completed"


def test_schedulers_step_per_step_per_epoch_or_by_metric():
    def rate(**changes):
        return train_plain(task(**changes)).optimizer_state_dict()["param_groups"][0]["lr"]

    halve = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    assert rate(scheduler=halve) == pytest.approx(0.01 / 2**3)
    assert rate(scheduler=halve, scheduler_interval="step") == pytest.approx(0.01 / 2**9)
    one_cycle = partial(OneCycleLR, max_lr=0.1, total_steps=10)
    assert rate(scheduler=one_cycle, scheduler_interval="step") == pytest.approx(0.1 / 25 / 1e4)
    plateau = partial(ReduceLROnPlateau, patience=0, factor=0.5, mode="max")
    assert rate(scheduler=plateau) < 0.01


def test_a_plateau_before_any_report_is_named():
    with pytest.raises(MetricError, match="ReduceLROnPlateau needs 'train_loss' after step 1"):
        train_plain(task(scheduler=ReduceLROnPlateau, scheduler_interval="step"))


def test_validation_runs_in_evaluation_mode_and_training_goes_on_in_training_mode():
    modes = []

    def evaluate(module, batch):
        modes.append((module.training, torch.is_grad_enabled()))
        return {"zero": 0}

    result = train_plain(task(validate=lambda: PAIR, evaluate=evaluate, metric="val_zero", report_every=1))
    assert set(modes) == {(False, False)}
    assert result.module().training


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"train": list}, TaskError, "train yielded no batch in epoch 0"),
        ({"validate": list}, TaskError, "validate yielded no batch"),
        (
            {"train": lambda: [*PAIR, (X[:0], Y[:0])]},
            TaskError,
            r"train .* 0 samples \(number 1 in epoch 0.*; leave such",
        ),
        (
            {"validate": lambda: [(X[:0], Y[:0])]},
            TaskError,
            r"validate .* 0 samples \(number 0 of the pass.*; leave such",
        ),
        (
            {"train": lambda: [(RAGGED, Y[:2])], "loss": lambda out, y: out.mean(), "split_batches": 2},
            TaskError,
            r"split_batches cuts dense tensors, .* nested; pad it",
        ),
        ({"train": lambda: 3}, TaskError, "returned int, which cannot be iterated"),
        ({"train": lambda: [X]}, TaskError, r"needs batches \(input, target\), got Tensor"),
        (
            {"loss": lambda out, y: out - y},
            TaskError,
            r"loss= must return a scalar tensor, not .* \(22, 1\); reduce it",
        ),
        (
            {"validate": lambda: PAIR, "evaluate": lambda m, b: {"out": m(b[0])}, "metric": "val_out"},
            MetricError,
            r"evaluate= returned 'out' as a tensor of shape \(22, 1\), not as a scalar",
        ),
        (
            {"validate": lambda: PAIR, "evaluate": lambda m, b: 1.0, "metric": "val_acc"},
            MetricError,
            "evaluate= must return {name: scalar}, not float",
        ),
        (
            {"validate": lambda: PAIR, "evaluate": lambda m, b: {"acc": 1.0}, "metric": "val_f1"},
            MetricError,
            "metric 'val_f1' is not reported; reported are train_loss, val_acc; give metric= one of these",
        ),
    ],
)
def test_what_cannot_work_is_named(bad, error, message):
    with pytest.raises(error, match=message):
        train_plain(task(**({"train": lambda: PAIR, "batch_size": None} | bad)))


def own_loop():
    def fn(loop):
        model = nn.Linear(4, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        loop.register(model, optimizer)
        for _ in range(3):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            loop.step()

    return LoopTask(fn)


@pytest.mark.parametrize("task", [task, own_loop])
def test_the_loop_waits_while_a_pool_captures(task, monkeypatch):
    """`torch.export` makes optimizers of all threads compute their bias corrections in float32."""
    waits = threading.Event()

    class Announcing(threading.Condition):
        def wait_for(self, predicate, timeout=None):
            waits.set()
            return super().wait_for(predicate, timeout)

    monkeypatch.setattr(GATE, "_condition", Announcing())
    with ThreadPoolExecutor(1) as threads:
        with GATE.exclusive(), monkeypatch.context() as capture:
            capture.setattr(torch.compiler, "_is_compiling_flag", True)
            waits.clear()
            beside = threads.submit(train_plain, task())
            beside.add_done_callback(lambda _: waits.set())
            assert waits.wait(60.0)
        weights = beside.result(60.0).state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in train_plain(task()).state_dict().items())


def test_all_that_builds_a_trial_is_inside_the_capture_gate():
    """`torch.export` tells code of all threads that asks, such as optimizers, that it is being compiled."""

    def inside(factory):
        def called(*arguments):
            if not GATE._sharing:
                pytest.fail("a capture may run meanwhile")
            return factory(*arguments)

        return called

    class Inside(torch.optim.SGD):
        """Also stepped by the check of `split_operators`."""

        step = inside(torch.optim.SGD.step)

    train_plain(
        on_batches(
            model=inside(net),
            param_groups=inside(lambda model: list(model.parameters())),
            optimizer=inside(partial(Inside, lr=0.1)),
            scheduler=inside(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)),
            split_operators={"0": 2},
            epochs=1,
        )
    )
