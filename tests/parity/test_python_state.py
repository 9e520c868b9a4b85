"""A captured step sees every change of the Python state that it reads: cut and fused trials end as a plain loop does.

The plain loop is `by_hand` of `test_stateful.py`, which shares nothing with the package.
"""

import logging
import re
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hydra_tune import HydraExecutor, train_plain
from hydra_tune.errors import HydraTuneError
from hydra_tune.shard.partition.plan_cache import PlanLibrary
from hydra_tune.train.loop import step_comparison
from tests.parity.changed_outside import KINDS, SHARED, reading
from tests.parity.exact import differences, without_seconds
from tests.parity.stateful import PROGRAMS, Program, batches, error, net, task
from tests.parity.test_stateful import by_hand, outcome

pytestmark = [
    pytest.mark.filterwarnings("ignore:Lazy modules are a new feature"),
    pytest.mark.filterwarnings("ignore:.*non-writable"),
]

WHENS = ["pass", pytest.param("batch", marks=pytest.mark.slow), pytest.param("scheduler", marks=pytest.mark.slow)]
NOT_FUSED = {
    "a_slot_of_an_object",  # each trial makes its own class
    "an_attrgetter",  # no key
    "what_an_object_made_in_the_step_reads",
    "a_property_of_a_metaclass",
    "an_array_of_the_standard_library",
    "a_number_that_processes_share",
    "an_event",
    "a_view_of_a_dict",
    "a_private_attribute_of_a_pydantic_model",
    "a_field_of_a_pydantic_model",
    "an_activation_of_the_model",  # the code that changes the model holds the model
    "a_part_of_the_model",
    "the_mode_of_a_part",
    "a_hook_of_the_model",
    "the_forward_of_a_part",
    "a_frozen_part",
    "a_method_by_the_class_of_its_argument",  # each trial has a class of its own
    "an_attribute_of_a_thread",
    "an_attribute_of_a_loader",
    "an_attribute_of_a_set",
    "a_slot_by_a_made_up_name",
    "a_context_manager_as_a_decorator",
    "a_generator_as_a_decorator",
}
UNSEEN = {
    ("a_threshold_of_evaluate", "batch"),  # undone before the evaluation
    ("the_mode_of_a_part", "scheduler"),  # undone by the next pass
}
NOT_CUT = {
    "the_forward_of_a_part": "is the model or a part of it",
}
_OF_THE_PROCESS = {"a_global_epoch_counter_read_in_step", "an_environment_variable_set_in_each_pass"}


def trained(programs: list[Program], devices: str = "cpu:1", **options: Any) -> list[Any]:
    """Train programs in a pool; the outcome of each, or its error."""
    with HydraExecutor(devices=devices, **options) as pool:
        results = pool.run([made.task for made in programs], on_error="return")
    return [
        result.error or outcome(made, without_seconds(result.history), result.state_dict())
        for made, result in zip(programs, results, strict=True)
    ]


def captures(caplog: pytest.LogCaptureFixture) -> int:
    return sum("captured again" in record.message for record in caplog.records)


def assert_close(expected: Any, actual: Any) -> None:
    """To the rounding of stacked kernels: a frozen value would differ by percents."""
    assert not isinstance(actual, Exception), actual
    for name, tensor in expected["state"].items():
        torch.testing.assert_close(actual["state"][name], tensor, rtol=1e-3, atol=1e-5)
    for before, now in zip(expected["history"], actual["history"], strict=True):
        assert now == pytest.approx(before, rel=1e-3)


@pytest.mark.cases(4)
@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("name", KINDS)
def test_a_cut_trial_follows_what_its_step_reads(name, when, caplog):
    caplog.set_level(logging.INFO, "hydra_tune")
    expected = by_hand(reading(name, when))
    (actual,) = trained([reading(name, when)], num_shards="layer")
    if name in NOT_CUT:
        assert NOT_CUT[name] in str(actual)
        return
    assert list(differences(expected, actual)) == []
    assert (captures(caplog) > 0) == ((name, when) not in UNSEEN)


@pytest.mark.cases(3)
@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("name", [name for name in KINDS if name not in SHARED])
def test_fused_trials_follow_what_their_steps_read(name, when, caplog):
    caplog.set_level(logging.INFO, "hydra_tune")
    expected = by_hand(reading(name, when))
    for actual in trained([reading(name, when) for _ in range(3)], fusion="on"):
        assert_close(expected, actual)
    assert any("are fused" in record.message for record in caplog.records) == (name not in NOT_FUSED)


class Clips(torch.optim.lr_scheduler.LambdaLR):
    """Clips the weights after each step, as some generative models do."""

    def step(self, *given: Any) -> None:
        super().step(*given)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.clamp_(-0.1, 0.1)


def test_trials_whose_scheduler_writes_parameters_run_by_themselves(caplog):
    caplog.set_level(logging.INFO, "hydra_tune")

    def described() -> Any:
        return task(scheduler=partial(Clips, lr_lambda=lambda _: 1.0), scheduler_interval="step")

    plain = train_plain(described())
    with HydraExecutor("cpu:1", fusion="on") as pool:
        results = pool.run([described() for _ in range(2)])
    assert max(value.abs().max() for value in plain.state_dict().values()) <= 0.1
    for result in results:
        assert list(differences(dict(plain.state_dict()), dict(result.state_dict()))) == []
    assert "its scheduler= may write parameters" in caplog.text


@pytest.mark.cases(11)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_step_that_changes_its_state_is_never_silently_wrong_cut(name):
    """It runs whole where the capture is refused, or the trial fails by name before its first step."""
    expected = by_hand(PROGRAMS[name]())
    (actual,) = trained([PROGRAMS[name]()], num_shards="layer")
    if isinstance(actual, Exception):
        assert isinstance(actual, HydraTuneError)
    else:
        assert list(differences(expected, actual)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in _OF_THE_PROCESS])
def test_steps_that_change_their_state_are_never_silently_wrong_fused(name):
    expected = by_hand(PROGRAMS[name]())
    for actual in trained([PROGRAMS[name]() for _ in range(3)], fusion="on"):
        if isinstance(actual, Exception):
            assert isinstance(actual, HydraTuneError)
        else:
            assert_close(expected, actual)


@pytest.mark.parametrize("reader", ["evaluate", "train"])
def test_a_tensor_that_a_step_keeps_for_other_code_is_refused_by_name(reader):
    """A graph sets no attribute. A model in which other code reads such an attribute is neither cut nor fused."""

    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.mean = net(), torch.zeros(4)

        def forward(self, inputs: Any) -> Any:
            outputs = self.net(inputs)
            if self.training:
                self.mean = outputs.detach().mean(0)
            return outputs

    def evaluate(module: nn.Module, batch: Any) -> Any:
        return {"loss": error(module, batch) + module.mean.sum()}

    def program() -> Program:
        held: list[nn.Module] = []

        def model() -> nn.Module:
            held[:] = [Keeping()]
            return held[0]

        def train() -> Any:
            return [(inputs + held[0].mean.sum(), targets) for inputs, targets in batches()]

        return Program(task=task(model=model, **({"evaluate": evaluate} if reader == "evaluate" else {"train": train})))

    (cut,) = trained([program()], num_shards="layer")
    assert re.search("keeps a tensor in the model's attribute 'mean', which other code reads", str(cut))
    expected = by_hand(program())
    for actual in trained([program(), program()], fusion="on"):
        assert list(differences(expected, actual)) == []


def test_a_value_for_each_thread_is_refused_by_name():
    local = threading.local()
    local.weight = 1.0

    def step(module: nn.Module, batch: Any) -> Any:
        return error(module, batch) * getattr(local, "weight", 0.5)

    (cut,) = trained([Program(task=task(step=step))], num_shards="layer")
    assert "'local' of step= is a _local, which holds a value for each thread" in str(cut)


def test_one_capture_for_each_value(caplog):
    """A value that comes back finds its plan: two values, each for one batch of every pass, are captured once."""
    caplog.set_level(logging.INFO, "hydra_tune")
    trained([reading("a_variable", "batch")], num_shards="layer")
    assert captures(caplog) == 1


def reading_a_database(path: Path) -> Program:
    """A step that reads a number from a database, where the data change the number in the second epoch."""

    def asked(statement: str) -> list[Any]:
        with closing(sqlite3.connect(path)) as database, database:
            return database.execute(statement).fetchall()

    asked("CREATE TABLE IF NOT EXISTS numbers AS SELECT 1.0 AS weight")
    epochs = 0

    def train() -> Iterator[Any]:
        nonlocal epochs
        epochs += 1
        if epochs == 2:
            asked("UPDATE numbers SET weight = 3.0")
        yield from batches()

    def step(module: nn.Module, batch: Any) -> Any:
        ((weight,),) = asked("SELECT weight FROM numbers")
        return error(module, batch) * weight

    return Program(task=task(train=train, validate=batches, step=step))


def test_a_change_that_no_guard_sees_fails_the_trial_at_its_next_report(tmp_path, monkeypatch):
    monkeypatch.setattr(step_comparison, "SHARE", 1e9)
    (cut,) = trained([reading_a_database(tmp_path / "weight")], num_shards="layer")
    assert "is no longer the step that the Python code makes" in str(cut)


@pytest.mark.parametrize("share", [1e9, 0.0])
def test_a_change_that_no_guard_sees_fails_every_member_of_a_group(tmp_path, monkeypatch, caplog, share):
    """One member's difference has all others compared; without a comparison, all go on with the old number."""
    caplog.set_level(logging.INFO, "hydra_tune")
    monkeypatch.setattr(step_comparison, "SHARE", share)
    outcomes = trained([reading_a_database(tmp_path / "weight") for _ in range(3)], fusion="on")
    assert "are fused" in caplog.text
    for actual in outcomes:
        assert ("is no longer the step that the Python code makes" in str(actual)) == (share > 0)


@pytest.mark.cases(1 / 3)
def test_comparisons_before_reports_take_a_share_of_the_time(tmp_path, monkeypatch):
    compared = []
    check_again = PlanLibrary.check_again

    def counted(library: PlanLibrary, *arguments: Any) -> None:
        compared.append(arguments)
        check_again(library, *arguments)

    monkeypatch.setattr(PlanLibrary, "check_again", counted)
    for share in (0.0, 1e9):
        monkeypatch.setattr(step_comparison, "SHARE", share)
        expected = by_hand(Program(task=task(step=error)))
        (actual,) = trained([Program(task=task(step=error))], num_shards="layer")
        assert list(differences(expected, actual)) == []
        assert len(compared) == (0 if share == 0.0 else 3)  # one for each report
    compared.clear()
    fused = trained([Program(task=task(step=error)) for _ in range(4)], fusion="on")
    for actual in fused:
        assert_close(by_hand(Program(task=task(step=error))), actual)
    assert len(compared) == 3  # one for each report of the group
