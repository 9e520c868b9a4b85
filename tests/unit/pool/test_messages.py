"""Mistakes that strangers made: each is answered with the cause and the remedy, by the pool and by the plain loop."""

import logging
import sqlite3
import traceback
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from hydra_tune import HydraExecutor, train_plain
from hydra_tune.errors import ConfigError, MetricError, TaskError
from tests.unit.pool.tasks import SAMPLES, against_plain, mlp, running, task

pytestmark = pytest.mark.timeout(120)
WAYS = {"own code": {"num_shards": None}, "one shard": {"num_shards": 1}, "fused": {"fusion": "on"}, "plain": None}


def error_of(way, described):
    """The error that a task ends with."""
    if WAYS[way] is None:
        with pytest.raises(Exception) as raised:  # noqa: PT011 - the caller looks at it
            train_plain(described)
        return raised.value
    with running(**WAYS[way]) as pool:
        return pool.run([described, described], on_error="return")[0].error


def metrics_of(way, described):
    if WAYS[way] is None:
        return train_plain(described).metrics
    with running(**WAYS[way]) as pool:
        return pool.run([described, described])[0].metrics


def step_with_backward(module, batch, *, retain):
    loss = functional.cross_entropy(module(batch[0]), batch[1])
    loss.backward(retain_graph=retain)
    return loss


def step_that_updates(module, batch, *, detaches):
    """All that a plain loop does for one batch."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loss = functional.cross_entropy(module(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach() if detaches else loss


def frozen():
    return mlp().requires_grad_(False)


def step_on_a_gpu(module, batch):
    return functional.cross_entropy(module(batch[0].to("cuda")), batch[1])


MISTAKES = {
    "an optimizer of the module": (
        {"optimizer": lambda module: torch.optim.SGD(module.parameters(), lr=0.1)},
        r"asks for \.parameters, but is given list\(module\.parameters\(\)\); pass the argument on, as in optimizer=",
    ),
    "backward in step": (
        {"loss": None, "step": partial(step_with_backward, retain=False)},
        r"calls backward\(\) itself, so that every gradient would be added up twice; return the loss",
    ),
    "backward in step that keeps the graph": (
        {"loss": None, "step": partial(step_with_backward, retain=True)},
        r"calls backward\(\) itself",
    ),
    "an update in step": (
        {"loss": None, "step": partial(step_that_updates, detaches=False)},
        r"calls backward\(\) itself; return the loss, and leave backward\(\), optimizer\.step\(\) and zero_grad\(\) to",
    ),
    "an update in step, and a loss without a gradient": (
        {"loss": None, "step": partial(step_that_updates, detaches=True)},
        r"the training loss has no gradient, .* or because step= calls backward\(\) itself; return the loss as the tensor",
    ),
    "a model without a parameter that trains": (
        {"model": frozen},
        r"the training loss has no gradient, .* with every parameter frozen",
    ),
    "a loss without a gradient": (
        {"loss": lambda output, target: functional.cross_entropy(output, target).detach()},
        r"the training loss has no gradient, for example after \.detach\(\)",
    ),
    "item in loss": (
        {"loss": lambda output, target: functional.cross_entropy(output, target).item()},
        r"loss= must return a scalar tensor, not a plain number, as \.item\(\) and float\(\) make one",
    ),
    "a loss that is not reduced": (
        {"loss": partial(functional.cross_entropy, reduction="none")},
        r"loss= must return a scalar tensor, not a tensor of shape \(8,\); reduce it, e\.g\. with \.mean\(\)",
    ),
}
ON_A_GPU = {
    "a model on a GPU": {"model": lambda: nn.Linear(8, 4).to("cuda")},
    "a step on a GPU": {"loss": None, "step": step_on_a_gpu},
}


@pytest.mark.cases(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_remedy(mistake, way):
    changes, message = MISTAKES[mistake]
    error = error_of(way, task(**changes))
    assert isinstance(error, TaskError)
    with pytest.raises(TaskError, match=message):
        raise error


class GoesBackLater(nn.Sequential):
    """Says when its step is to call backward() itself: in the second batch, where the plain loop looks no more."""

    def __init__(self) -> None:
        super().__init__(mlp())
        self.calls = 0


def step_that_goes_back_later(module, batch):
    module.calls += 1
    loss = functional.cross_entropy(module(batch[0]), batch[1])
    if module.calls == 2:
        loss.backward(retain_graph=True)
    return loss


def test_own_code_that_calls_backward_in_a_later_batch_gives_the_plain_loops_numbers():
    described = task(model=GoesBackLater, loss=None, step=step_that_goes_back_later)
    with running(num_shards=None) as pool:
        (result,) = pool.run([described])
    assert against_plain(described, result) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is wrong then")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mistake", ON_A_GPU)
def test_a_device_that_is_not_there_is_explained(mistake, way):
    error = error_of(way, task(**ON_A_GPU[mistake]))
    assert isinstance(error, TaskError)
    assert str(error).startswith("the task asks for a GPU, and torch finds none here; leave .to('cuda'), .cuda() and")
    assert "test_messages.py:" in str(error)
    assert error.__cause__ is not None


class Rows(Dataset[Any]):
    """Reads from a connection that belongs to the thread which opened it."""

    def __init__(self) -> None:
        self.connection = sqlite3.connect(":memory:")

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        (label,) = self.connection.execute("select ?", (index % 4,)).fetchone()
        return torch.ones(8), label


@pytest.mark.parametrize("way", [way for way in WAYS if way != "plain"])
def test_a_connection_of_another_thread_is_explained(way):
    error = error_of(way, task(train=DataLoader(Rows(), 4)))
    assert isinstance(error, TaskError)
    assert "sqlite3.connect(..., check_same_thread=False)" in str(error)


def correct(module, batch):
    return (module(batch[0]).argmax(1) == batch[1]).float()


NUMBERS = {
    "item": lambda module, batch: {"acc": correct(module, batch).mean().item()},
    "float": lambda module, batch: {"acc": float(correct(module, batch).mean())},
    "numpy's array": lambda module, batch: {"acc": correct(module, batch).mean().numpy()},
    "numpy's number": lambda module, batch: {"acc": np.float32(correct(module, batch).numpy().mean())},
    "named as it is reported": lambda module, batch: {"val_acc": correct(module, batch).mean()},
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", NUMBERS)
def test_evaluate_may_return_numbers_of_any_kind(kind, way):
    wanted = {"validate": SAMPLES, "metric": "val_acc", "epochs": 1}
    expected = train_plain(task(evaluate=lambda m, b: {"acc": correct(m, b).mean()}, **wanted)).metrics["val_acc"]
    found = metrics_of(way, task(evaluate=NUMBERS[kind], **wanted))
    assert found.keys() == {"train_loss", "val_acc"}
    assert found["val_acc"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.cases(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("evaluate", "metric", "message"),
    [
        (correct, "val_acc", "must return {name: scalar}, not a tensor; name the value, as in {'acc': value}"),
        (lambda m, b: {"acc": correct(m, b)}, "val_acc", "returned 'acc' as a tensor of shape (8,), not as a scalar"),
        (
            lambda m, b: {"acc": correct(m, b).mean()},
            "val_accuracy",
            "reported are train_loss, val_acc; give metric= one of these; did you mean 'val_acc'?",
        ),
        (
            lambda m, b: {"acc": correct(m, b).mean(), "val_acc": correct(m, b).sum()},
            "val_acc",
            "evaluate returned both 'acc' and 'val_acc', which are both reported as 'val_acc'; rename one",
        ),
    ],
)
def test_an_evaluation_that_cannot_be_reported_is_named(way, evaluate, metric, message):
    error = error_of(way, task(validate=SAMPLES, evaluate=evaluate, metric=metric))
    assert isinstance(error, MetricError)
    assert message in str(error)


@pytest.mark.parametrize(
    ("metric", "hint"),
    [("acc", "did you mean 'val_acc'?"), ("f1", "did you mean 'val_f1'?"), ("trainloss", "did you mean 'train_loss'?")],
)
def test_a_metric_without_its_prefix_has_a_guess(metric, hint):
    with pytest.raises(TaskError) as raised:
        task(validate=SAMPLES, evaluate=lambda m, b: {"acc": correct(m, b).mean()}, metric=metric)
    assert str(raised.value).endswith(hint)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fuse": "on"}, "HydraExecutor has no option 'fuse'; did you mean 'fusion'?"),
        ({"device_memmory": "1GiB"}, "HydraExecutor has no option 'device_memmory'; did you mean 'device_memory'?"),
        ({"gpu": 1}, "HydraExecutor has no option 'gpu'; known are devices, device_memory,"),
    ],
)
def test_an_unknown_option_has_a_guess(given, message):
    with pytest.raises(ConfigError) as raised:
        HydraExecutor(**given)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("fusion", ["off", "on"])
def test_a_wrong_layer_size_is_the_first_thing_that_is_said(caplog, fusion):
    torch_logs = logging.getLogger("torch")
    torch_logs.addHandler(caplog.handler)  # torch's own lines do not come to the root
    try:
        with running(fusion=fusion) as pool:
            model = partial(nn.Sequential, nn.Linear(8, 16), nn.Linear(8, 4))
            result = pool.run(task(model=model), on_error="return")
    finally:
        torch_logs.removeHandler(caplog.handler)
    assert "mat1 and mat2 shapes cannot be multiplied (8x16 and 8x4)" in str(result.error)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "trial 'job 0' failed"
    ]


def test_a_misspelt_cut_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="at least 1, 'layer' or 'tuned', not 'layers'; did you mean 'layer'"):
        HydraExecutor(devices="cpu:1", num_shards="layers")
    with pytest.raises(ConfigError, match=r"num_shards must be a whole number of at least 1, not 1\.5"):
        HydraExecutor(devices="cpu:1", num_shards=1.5)


@pytest.mark.parametrize("fusion", ["off", "on"])
@pytest.mark.parametrize("call", ["run", "checkpoint"])
def test_a_trials_own_code_does_not_wait_for_its_own_pool(call, fusion, tmp_path):
    def build():
        if call == "run":
            pool.run(task())
        else:
            waiting.checkpoint()
        return mlp()

    with running(fusion=fusion, max_concurrent=1, checkpoint_dir=tmp_path) as pool:
        waiting = pool.submit(task())
        waiting.pause()
        error = pool.submit(task(model=build)).result(60).error
    assert f"{call}() " in str(error)
    assert "was called by a trial's own code" in str(error)
    assert "train_plain" in str(error)


def test_a_trials_own_code_may_search_in_another_pool_that_captures():
    def build():
        with HydraExecutor(devices="cpu:1", num_shards=2) as other:
            return other.run(task()).module()

    described = task(model=build)
    with running() as pool:
        assert against_plain(described, pool.submit(described).result(100)) == []


def broken_step(module, batch):
    raise RuntimeError("broken")


@pytest.mark.parametrize("way", ["own code", "one shard", "plain"])
def test_a_traceback_begins_at_the_users_own_code(way):
    """The frames of a pool above the user's hid the user's own lines."""
    error = error_of(way, task(step=broken_step, loss=None))
    while error.__cause__ is not None:
        error = error.__cause__
    assert str(error) == "broken"
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    assert files[-1] == __file__
    assert not any("/hydra_tune/" in path for path in files)
