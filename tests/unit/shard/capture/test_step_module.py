"""What the training step and the evaluation give, and what they refuse."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from hydra_tune.errors import MetricError, TaskError
from hydra_tune.shard.capture.step_module import EvaluateStep, TrainStep, step_module
from hydra_tune.shard.verify.plan_check import verify
from tests.unit.shard.bench import bench, task_of, vectors


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
        ({"loss": lambda output, target: 1.0}, "scalar tensor, not a plain number, as .item"),
        ({"loss": lambda output, target: (output - target) ** 2}, r"not a tensor of shape \(4, 8\); reduce it"),
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
        (lambda module, batch: 1.0, "must return {name: scalar}, not float"),
        (lambda module, batch: {"a": "high"}, "returned 'a' as str, not as a scalar"),
        (lambda module, batch: {"a": torch.zeros(2)}, r"returned 'a' as a tensor of shape \(2,\), not as a scalar"),
    ],
)
def test_metrics_that_are_no_scalars_are_refused(evaluate, message):
    with pytest.raises(MetricError, match=message):
        run("evaluate", validate=lambda: [vectors()], evaluate=evaluate)


class Follows(nn.Module):
    """Replaces its buffers instead of writing into them."""

    def __init__(self, replace):
        super().__init__()
        self.linear, self.replace = nn.Linear(8, 8), replace
        self.register_buffer("first", torch.ones(8))
        self.register_buffer("second", torch.zeros(8))

    def forward(self, x):
        y = self.linear(x) + self.first
        self.replace(self, x)
        return y


def exchanged(self, x):
    self.first, self.second = self.second, self.first + x.mean(0)


def test_replaced_buffers_are_the_same_tensors_with_the_new_values():
    model = Follows(exchanged)
    first, second = model.first, model.second
    x, y = vectors()
    step_module(task_of(model), model, "train")((x, y))
    assert model.first is first
    assert model.second is second
    assert first.equal(torch.zeros(8))
    assert second.equal(1 + x.mean(0))


def test_a_captured_step_replaces_buffers_too():
    made = bench(task_of(Follows(exchanged)))
    assert made.analysis.written_state == {"first", "second"}
    verify(made.task, made.model, made.plan(*made.spread(2)), made.batch)


@pytest.mark.parametrize(
    "replace",
    [
        lambda self, x: setattr(self, "first", torch.ones(9)),
        lambda self, x: setattr(self, "first", self.first.double()),
        lambda self, x: setattr(self, "first", None),
        lambda self, x: setattr(self, "first", self.linear(x).mean(0)),
    ],
)
def test_a_buffer_of_another_kind_stays_replaced_for_others_to_refuse(replace):
    model = Follows(replace)
    first = model.first
    step_module(task_of(model), model, "train")(vectors())
    assert model.first is not first
    assert first.equal(torch.ones(8))
