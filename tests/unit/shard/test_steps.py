"""What the training step and the evaluation give, and what they refuse."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from hydra_tune.errors import MetricError, TaskError
from hydra_tune.shard.steps import EvaluateStep, TrainStep, step_module
from tests.unit.shard.bench import task_of, vectors


def linear():
    return nn.Linear(8, 8)


def run(mode, batch=None, **changes):
    model = linear()
    changes.setdefault("train", lambda: [vectors()])
    return step_module(task_of(model, **changes), model, mode)(vectors() if batch is None else batch)


def test_loss_and_step_are_two_ways_to_say_one_thing():
    model = linear()
    by_loss = step_module(task_of(model), model, "train")(vectors())
    step = step_module(
        task_of(model, step=lambda module, batch: functional.mse_loss(module(batch[0]), batch[1])), model, "train"
    )(vectors())
    assert list(by_loss) == list(step) == ["loss"]
    assert by_loss["loss"].equal(step["loss"])


def test_the_mode_is_set_on_the_model():
    model = linear()
    assert isinstance(step_module(task_of(model), model, "train"), TrainStep)
    assert model.training
    assert isinstance(step_module(task_of(model), model, "evaluate"), EvaluateStep)
    assert not model.training


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": lambda output, target: 1.0}, "scalar tensor, not float"),
        ({"loss": lambda output, target: (output - target) ** 2}, r"got shape \(4, 8\); reduce it"),
        ({"step": lambda module, batch: None}, "scalar tensor, not NoneType"),
    ],
)
def test_a_loss_that_is_no_scalar_is_refused(changes, message):
    with pytest.raises(TaskError, match=message):
        run("train", **changes)


@pytest.mark.parametrize("batch", [{"x": torch.zeros(1)}, [torch.zeros(1)], 3])
def test_loss_needs_pairs(batch):
    with pytest.raises(TaskError, match=rf"got {type(batch).__name__}; give step= instead"):
        run("train", batch)


def test_the_default_evaluation_is_the_loss():
    assert list(run("evaluate")) == ["loss"]


def test_metrics_are_tensors_by_name_numbers_too():
    metrics = run(
        "evaluate", validate=lambda: [vectors()], evaluate=lambda module, batch: {"a": 0.1, 2: 3, "t": torch.ones(1)}
    )
    assert list(metrics) == ["a", "2", "t"]
    assert metrics["a"].dtype == torch.float64
    assert metrics["a"].item() == 0.1
    assert metrics["2"].item() == 3.0


@pytest.mark.parametrize(
    ("evaluate", "message"),
    [
        (lambda module, batch: 1.0, "must return {name: scalar tensor}, not float"),
        (lambda module, batch: {"a": "high"}, "metric 'a' must be a scalar tensor, not str"),
        (lambda module, batch: {"a": torch.zeros(2)}, r"metric 'a' must be a scalar, got shape \(2,\)"),
    ],
)
def test_metrics_that_are_no_scalars_are_refused(evaluate, message):
    with pytest.raises(MetricError, match=message):
        run("evaluate", validate=lambda: [vectors()], evaluate=evaluate)
