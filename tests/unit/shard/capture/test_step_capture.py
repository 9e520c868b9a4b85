"""The captured graph holds names for all it needs and no tensor of the trial; what cannot be captured says where and why."""

import contextlib
import io
import json

import pytest
import torch
from torch import nn
from torch.nn import functional

from hydra_tune.errors import CaptureError, TaskError
from hydra_tune.shard.capture.step_capture import capture, describe, named_state, state_specs, user_line
from tests.parity.models import build
from tests.unit.shard.bench import bench, first_batch, task_of, vectors

TWO_LINES = "first\nsecond"


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x):
        return self.norm(self.second(self.first(x))) * self.frozen


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        if y.sum() > 0:
            return y
        return -y


def capture_of(model, batch=None, mode="train", **changes):
    return capture(task_of(model, **changes), model, vectors() if batch is None else batch, mode)


def test_state_is_listed_once_under_its_first_name():
    model = Tied()
    assert [name for name, _ in named_state(model)].count("second.weight") == 0
    specs = state_specs(model)
    assert specs["first.weight"].is_parameter
    assert specs["first.weight"].requires_grad
    assert specs["first.weight"].shape == (8, 8)
    assert specs["first.weight"].stride == (8, 1)
    assert not specs["frozen"].requires_grad
    assert not specs["norm.running_mean"].is_parameter
    assert specs["norm.num_batches_tracked"].dtype == torch.int64


def test_tied_names_are_bound_to_one_parameter():
    captured = capture_of(Tied())
    assert sorted(captured.state.values()).count("first.weight") >= 1
    assert "second.weight" not in captured.state.values()
    used = {captured.state[a.name] for node in captured.nodes for a in node.all_input_nodes if a.name in captured.state}
    assert {"first.weight", "first.bias", "second.bias", "frozen", "norm.weight"} <= used


def test_batch_tensors_are_numbered_in_tree_order():
    def step(module, batch):
        return functional.mse_loss(module(batch["x"]) * batch["scale"], batch["deep"][0])

    x, y = vectors()
    captured = capture_of(nn.Linear(8, 8), {"deep": [y], "scale": 0.5, "x": x}, step=step)
    assert sorted(captured.inputs.values()) == [0, 1]
    by_index = {index: name for name, index in captured.inputs.items()}
    linear = next(node for node in captured.nodes if "linear" in str(node.target))
    assert linear.all_input_nodes[0].name == by_index[1], "the batch's dict is in the order it was written"


def test_what_the_step_closes_over_is_a_constant():
    weight = torch.arange(8.0)
    captured = capture_of(nn.Linear(8, 8), loss=lambda output, target: ((output - target) ** 2 * weight).mean())
    assert [tensor.tolist() for tensor in captured.constants.values()] == [weight.tolist()]


def test_a_closed_over_tensor_that_wants_a_gradient_is_refused():
    weight = torch.ones(8, requires_grad=True)
    with pytest.raises(CaptureError, match="not a parameter of the model; register it as a parameter of the module"):
        capture_of(nn.Linear(8, 8), loss=lambda output, target: ((output - target) * weight).mean())


def test_evaluation_is_captured_in_its_mode_with_all_its_metrics():
    task = build("cnn")
    model = task.model()
    captured = capture(task, model, first_batch(task), "evaluate")
    assert captured.names == ("acc", "loss")
    assert len(captured.outputs) == 2
    assert captured.mode == "evaluate"
    assert not model.training


def test_a_metric_that_is_always_the_same_is_captured_as_it_is():
    captured = capture_of(
        nn.Linear(8, 8),
        mode="evaluate",
        validate=lambda: [vectors()],
        evaluate=lambda module, batch: {"a": module(batch[0]).mean(), "b": 0.1},
    )
    assert captured.names == ("a", "b")
    assert [tensor.item() for tensor in captured.constants.values()] == [0.1]


def test_the_graph_computes_what_the_model_computes():
    made = bench(build("gpt2"))
    state = [made.state[name] for name in made.captured.state.values()]
    inputs = [made.inputs[i] for i in made.captured.inputs.values()]
    torch.manual_seed(3)
    (loss,) = made.captured.module(*state, *made.captured.constants.values(), *inputs)
    torch.manual_seed(3)
    assert loss.equal(made.task.step(made.model.train(), made.batch))


def test_a_capture_that_fails_names_the_line_of_the_model():
    with pytest.raises(CaptureError) as caught:
        capture_of(Branch())
    message = str(caught.value)
    assert message.startswith("torch.export cannot capture this model: ")
    assert "GuardOnDataDependentSymNode" in message
    assert message.endswith("if y.sum() > 0:)")
    assert "test_step_capture.py:" in message


class _ReadsText(nn.Linear):
    def __init__(self, read):
        super().__init__(8, 8)
        self.read = read

    def forward(self, x):
        y = super().forward(x)
        return y * (2 if self.read(y) else 1)


@pytest.mark.parametrize(
    "read",
    [lambda y: "nan" in str(y), lambda y: repr(y) == "0", lambda y: {str(y): 1}],
)
def test_a_step_that_reads_the_text_of_a_tensor_is_refused(read):
    with pytest.raises(CaptureError, match="the step reads the text of a tensor"):
        capture_of(_ReadsText(read))


class _Measuring(io.StringIO):
    """As the streams of notebooks and progress bars."""

    def write(self, text):
        return super().write(text.rstrip() + "\n") if len(text) else 0


def test_a_step_may_print_a_tensor(capsys):
    stream = _Measuring()
    with contextlib.redirect_stdout(stream):
        capture_of(_ReadsText(lambda y: print(y) or True))  # noqa: T201
    assert stream.getvalue()
    capture_of(_ReadsText(lambda y: print(y, f"it is {y}") or True))  # noqa: T201
    assert "it is " in capsys.readouterr().out


def test_errors_of_the_step_itself_come_as_they_are():
    with pytest.raises(TaskError, match="reduce it"):
        capture_of(nn.Linear(8, 8), loss=lambda output, target: output)


def caught(function):
    with pytest.raises(Exception) as found:  # noqa: PT011 - whatever it is
        function()
    return found.value


def test_an_error_is_described_by_its_first_line_and_the_innermost_line_of_the_users_code():
    def fail():
        raise ValueError(TWO_LINES)

    error = caught(fail)
    assert describe(error).startswith("ValueError: first (at ")
    assert "second" not in describe(error)
    assert user_line(error).endswith("raise ValueError(TWO_LINES)")
    assert user_line(ValueError()) is None
    assert describe(KeyError()) == "KeyError: KeyError"


def test_the_line_is_the_users_where_torch_raised():
    error = caught(lambda: nn.Linear(8, 8)(torch.zeros(3)))
    assert user_line(error).endswith("error = caught(lambda: nn.Linear(8, 8)(torch.zeros(3)))")


def test_the_line_is_not_the_standard_librarys():
    """Torch raises through context managers, whose frames are in contextlib."""

    def fail():
        json.loads("{")

    assert user_line(caught(fail)).endswith('json.loads("{")')
