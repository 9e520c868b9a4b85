"""A number that a step reads and that changes at every step becomes an input of the graph: one capture serves all values.

The plain loop is `by_hand` of `test_stateful.py`, which shares nothing with the package.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import exp
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from hydra_tune import HydraExecutor, train_plain
from hydra_tune.shard.python_state import number_inputs
from tests.parity.exact import differences
from tests.parity.stateful import Program, Reads, batches, error, task
from tests.parity.test_python_state import assert_close, captures, trained
from tests.parity.test_stateful import by_hand

Setter = Callable[[int], None]
Step = Callable[[nn.Module, Any], Tensor]


@dataclass
class Schedule:
    """Numbers of a script's own: `count` goes 1, 2, 3 ..., `weight` 0.07, 0.14, 0.21 ..."""

    count: int = 0
    weight: float = 0.0

    def advance(self) -> None:
        self.count += 1
        self.weight = 0.07 * self.count


def advancing(advance: Callable[[], None], **arguments: Any) -> Program:
    """A program whose data call a function before each batch."""

    def train() -> Iterator[Any]:
        for batch in batches():
            advance()
            yield batch

    return Program(task=task(train=train, validate=batches, **arguments))


def size(module: nn.Module, batch: Any) -> Tensor:
    return module(batch[0]).square().mean()


def scaled_in_place(scores: Tensor, s: Schedule) -> Tensor:
    scores = scores * 1.0
    scores *= s.weight + 0.5
    scores += s.count
    return scores


def logarithm(s: Schedule) -> float:
    try:
        return math.log(s.count - 5)
    except ValueError:
        return 0.0


def chaotic(s: Schedule) -> float:
    """A result that each of many operations uses twice."""
    share = 0.3 + s.weight / 10
    for _ in range(40):
        share = 3.5 * share * (1 - share)
    return share


# One capture serves all values.
FOLLOWED: dict[str, Callable[[Schedule, nn.Module, Any], Tensor]] = {
    "a_weight": lambda s, module, batch: error(module, batch) + s.weight * size(module, batch),
    "a_temperature": lambda s, module, batch: functional.cross_entropy(module(batch[0]) / (1 + s.weight), batch[1]),
    "a_share": lambda s, module, batch: (1 - s.weight) * error(module, batch) + s.weight * size(module, batch),
    "a_number_less_a_tensor": lambda s, module, batch: (
        error(module, batch) + (s.weight - module(batch[0])).square().mean()
    ),
    "a_number_over_a_tensor": lambda s, module, batch: error(module, batch) + s.weight / (1 + size(module, batch)),
    "a_ramp": lambda s, module, batch: error(module, batch) * (s.count / 100),
    "a_decay": lambda s, module, batch: error(module, batch) * 0.97**s.count,
    "an_exponential": lambda s, module, batch: error(module, batch) * math.exp(-0.1 * s.count),
    "a_cosine": lambda s, module, batch: error(module, batch) * (0.5 * (1 + math.cos(math.pi * s.count / 20))),
    "a_sum_of_parts": lambda s, module, batch: sum([error(module, batch), s.weight * size(module, batch)]),
    "in_place": lambda s, module, batch: functional.cross_entropy(scaled_in_place(module(batch[0]), s), batch[1]),
    "a_tensor_made_of_it": lambda s, module, batch: error(module, batch) * torch.tensor(s.weight),
    "in_double_precision": lambda s, module, batch: error(lambda x: module(x).double() * s.weight, batch).float(),
    "a_whole_part": lambda s, module, batch: (
        error(module, batch) * (1 + s.count // 100) + s.weight * size(module, batch)
    ),
    "a_result_used_many_times": lambda s, module, batch: error(module, batch) * chaotic(s),
}
# Python takes the number itself, and each value has a capture; the numbers are right.
TAKEN: dict[str, Callable[[Schedule, nn.Module, Any], Tensor]] = {
    "a_branch": lambda s, module, batch: error(module, batch) * (2.0 if s.count % 3 == 0 else 1.0),
    "a_minimum": lambda s, module, batch: error(module, batch) * min(0.3, s.weight),
    "a_probability": lambda s, module, batch: error(lambda x: functional.dropout(module(x), s.weight / 2), batch),
    "an_argument_of_an_operator": lambda s, module, batch: error(module, batch).add(
        size(module, batch), alpha=s.weight
    ),
    "a_smoothing": lambda s, module, batch: functional.cross_entropy(
        module(batch[0]), batch[1], label_smoothing=s.weight / 4
    ),
    "a_place_in_a_tensor": lambda s, module, batch: error(module, batch) + module(batch[0])[:, s.count % 4].mean(),
    "a_size": lambda s, module, batch: error(module, batch) + module(batch[0])[: 1 + s.count % 3].mean(),
    "a_text": lambda s, module, batch: error(module, batch) * float(f"{s.weight:.1f}"),
    "a_key": lambda s, module, batch: error(module, batch) * {0: 1.0, 1: 2.0}[s.count % 2],
    "of_numpy": lambda s, module, batch: error(module, batch) * float(np.exp(-s.weight)),
    "a_function_imported_by_name": lambda s, module, batch: error(module, batch) * exp(-s.weight),
    "in_low_precision": lambda s, module, batch: error(lambda x: (module(x).bfloat16() * s.weight).float(), batch),
    "a_choice": lambda s, module, batch: torch.where(module(batch[0]) > 0, s.weight, 0.0).mean() + error(module, batch),
    "a_list_of_numbers": lambda s, module, batch: error(module, batch) * torch.tensor([s.weight, 1.0]).sum(),
    "an_error_that_is_caught": lambda s, module, batch: error(module, batch) + logarithm(s) * size(module, batch),
    "a_complex_power": lambda s, module, batch: (
        error(module, batch) + ((0.3 - s.weight) ** 0.5 * size(module, batch)).real
    ),
    "a_value_of_the_batch": lambda s, module, batch: (
        error(module, batch) + (size(module, batch) if bool(batch[0].mean() * s.weight > 0.02) else 0.0)
    ),
    "the_exact_class": lambda s, module, batch: (
        error(module, batch) * (1 + (s.count // 4 if type(s.count // 4) is int else 0))
    ),
    "the_class": lambda s, module, batch: error(module, batch) * (s.weight if isinstance(s.weight, float) else 0.0),
}
QUICK = {"a_weight", "a_temperature", "a_decay", "a_cosine", "a_ramp", "a_branch", "a_minimum", "a_size"} | {
    "a_result_used_many_times",
    "an_error_that_is_caught",
    "a_value_of_the_batch",
    "the_exact_class",
}


def program_of(name: str) -> Program:
    schedule, step = Schedule(), (FOLLOWED | TAKEN)[name]
    return advancing(schedule.advance, step=lambda module, batch: step(schedule, module, batch))


NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FOLLOWED | TAKEN]


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", NAMES)
def test_a_cut_trial_follows_a_number_that_changes_at_every_step(name, caplog):
    caplog.set_level(logging.INFO, "hydra_tune")
    expected = by_hand(program_of(name))
    (actual,) = trained([program_of(name)], num_shards="layer")
    assert list(differences(expected, actual)) == []
    assert captures(caplog) == 1 if name in FOLLOWED else captures(caplog) >= 1


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", NAMES)
def test_fused_trials_follow_a_number_that_changes_at_every_step(name, caplog):
    caplog.set_level(logging.INFO, "hydra_tune")
    expected = by_hand(program_of(name))
    for actual in trained([program_of(name) for _ in range(3)], fusion="on"):
        assert_close(expected, actual)
    assert any("are fused" in record.message for record in caplog.records)
    if name in FOLLOWED:
        assert captures(caplog) == 1
        assert not any("go on alone" in record.message for record in caplog.records)


# Where the number lies


WEIGHT = 0.0


class Settings:
    weight = 0.0


def in_a_global() -> Program:
    def put() -> None:
        global WEIGHT  # noqa: PLW0603 - as scripts do
        WEIGHT += 0.1

    globals()["WEIGHT"] = 0.0
    return advancing(put, step=lambda module, batch: error(module, batch) + WEIGHT * size(module, batch))


def in_a_class() -> Program:
    Settings.weight = 0.0

    def put() -> None:
        Settings.weight += 0.1

    return advancing(put, step=lambda module, batch: error(module, batch) + Settings.weight * size(module, batch))


def in_a_list() -> Program:
    weights = [0.0, 1.0]

    def put() -> None:
        weights[0] += 0.1

    return advancing(put, step=lambda module, batch: error(module, batch) + weights[0] * size(module, batch))


def in_a_variable() -> Program:
    weight = 0.0

    def put() -> None:
        nonlocal weight
        weight += 0.1

    return advancing(put, step=lambda module, batch: error(module, batch) + weight * size(module, batch))


def in_nested_settings() -> Program:
    settings = {"loss": {"weights": [Schedule()]}}

    def step(module: nn.Module, batch: Any) -> Tensor:
        return error(module, batch) + settings["loss"]["weights"][0].weight * size(module, batch)

    return advancing(settings["loss"]["weights"][0].advance, step=step)


def of_a_function_used_twice() -> Program:
    schedule = Schedule()

    def penalty(module: nn.Module, batch: Any) -> Tensor:
        return schedule.weight * size(module, batch)

    def evaluate(module: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"penalty": penalty(module, batch), "loss": error(module, batch)}

    return advancing(
        schedule.advance, step=lambda module, batch: error(module, batch) + penalty(module, batch), evaluate=evaluate
    )


class Weight:
    def __init__(self) -> None:
        self.value = 0.0


def in_a_key() -> Program:
    weights = {Weight(): 1.0, Weight(): 0.5}

    def advance() -> None:
        for number, weight in enumerate(weights):
            weight.value += 0.1 * (number + 1)

    def step(module: nn.Module, batch: Any) -> Tensor:
        return error(module, batch) + sum(
            share * weight.value * size(module, batch) for weight, share in weights.items()
        )

    return advancing(advance, step=step)


PLACES = [in_a_global, in_a_class, in_a_list, in_a_variable, in_nested_settings, of_a_function_used_twice, in_a_key]


@pytest.mark.cases(1)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_a_number_is_followed_wherever_it_lies(place, caplog):
    caplog.set_level(logging.INFO, "hydra_tune")
    expected = by_hand(place())
    (actual,) = trained([place()], num_shards="layer")
    assert list(differences(expected, actual)) == []
    assert captures(caplog) <= 2  # one for each mode


READINGS: dict[str, Callable[[LRScheduler], float]] = {
    "its rate": lambda schedule: 10 * schedule.get_last_lr()[0],
    "its count": lambda schedule: 0.1 * schedule.last_epoch,
    "both": lambda schedule: schedule.get_last_lr()[0] + 0.1 * schedule.last_epoch,
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("reading", READINGS)
def test_a_number_of_a_scheduler_of_torch_is_followed(reading, caplog):
    """The scheduler makes a new list of rates at each step, and changes the options of its optimizer."""
    caplog.set_level(logging.INFO, "hydra_tune")

    def made() -> Program:
        held: dict[str, LRScheduler] = {}

        def scheduler(optimizer: torch.optim.Optimizer) -> LRScheduler:
            held["schedule"] = CosineAnnealingLR(optimizer, 30)
            return held["schedule"]

        def step(module: nn.Module, batch: Any) -> Tensor:
            return error(module, batch) + READINGS[reading](held["schedule"]) * size(module, batch)

        return Program(task=task(train=batches, step=step, scheduler=scheduler, scheduler_interval="step"))

    expected = by_hand(made())
    (actual,) = trained([made()], num_shards="layer")
    assert list(differences(expected, actual)) == []
    assert captures(caplog) == 1


@pytest.mark.cases(1)
@pytest.mark.parametrize("is_in_dict", [False, True])
def test_a_number_of_the_model_is_followed(is_in_dict, caplog):
    """Export puts copies in the place of a model's containers while it captures."""
    caplog.set_level(logging.INFO, "hydra_tune")

    def made() -> Program:
        held: list[Reads] = []

        def model() -> Reads:
            state: dict[str, Any] = {"settings": {"scale": 1.0}} if is_in_dict else {"scale": 1.0}
            held[:] = [
                Reads(lambda self, x: self.base(x) * (self.settings["scale"] if is_in_dict else self.scale), **state)
            ]
            return held[0]

        def advance() -> None:
            if is_in_dict:
                held[0].settings["scale"] *= 0.9
            else:
                held[0].scale *= 0.9

        return advancing(advance, model=model, step=error)

    expected = by_hand(made())
    (actual,) = trained([made()], num_shards="layer")
    assert list(differences(expected, actual)) == []
    assert captures(caplog) <= 2  # one for each mode


# What the tracer does not follow


@pytest.mark.slow
def test_many_captures_are_told(caplog):
    """An argument of an operator needs a capture for each value."""
    trained([program_of("a_smoothing")], num_shards="layer")
    assert sum("(register_buffer)" in record.message for record in caplog.records) == 1


def cached() -> Callable[[float], float]:
    @functools.cache
    def scaled(weight: float) -> float:
        return 1 + weight * weight

    return scaled


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize("is_shared", [True, False])
def test_a_number_that_a_cache_keeps_from_a_capture_is_refused(is_shared, caplog):
    """A check of the step leaves results in the cache, so a later capture of the same step is another graph."""
    caplog.set_level(logging.INFO, "hydra_tune")
    shared = cached()

    def made() -> Program:
        schedule, scaled = Schedule(), shared if is_shared else cached()
        return advancing(schedule.advance, step=lambda module, batch: error(module, batch) * scaled(schedule.weight))

    expected = by_hand(made())
    shared.cache_clear()
    for actual in trained([made() for _ in range(3)], fusion="on"):
        assert_close(expected, actual)


@pytest.mark.parametrize(
    ("in_step", "options"), [(True, {"num_shards": "layer"}), (False, {"fusion": "on"}), (False, {"fusion": "auto"})]
)
def test_a_number_that_a_cache_has_drawn_is_drawn_once(in_step, options):
    """Not while the pool tries the step, or looks at the first batch; the data draw after the function."""

    def made() -> Program:
        @functools.cache
        def scale(size: int) -> Tensor:
            return torch.rand(size).sum()

        def train() -> Iterator[Any]:
            for inputs, labels in batches():
                yield inputs * (1 if in_step else scale(3)) + 0.1 * torch.randn(inputs.shape), labels

        step = (lambda module, batch: error(module, batch) * scale(3)) if in_step else error
        return Program(task=task(train=train, step=step))

    expected = by_hand(made())
    for actual in trained([made() for _ in range(1 if in_step else 3)], **options):
        assert_close(expected, actual)


@pytest.mark.cases(1 / 3)
def test_a_number_that_the_tracer_misses_is_noticed_at_its_next_value(monkeypatch, caplog):
    """A graph with the number as a constant passes the check of its capture, and no later one."""
    caplog.set_level(logging.INFO, "hydra_tune")
    monkeypatch.setattr(number_inputs.NumberInputTracer, "input_of", lambda self, number, dtype: number.value)
    expected = by_hand(program_of("a_weight"))
    (actual,) = trained([program_of("a_weight")], num_shards="layer")
    assert list(differences(expected, actual)) == []
    assert any("cannot be an input of the graph" in record.message for record in caplog.records)


@pytest.mark.slow
def test_a_number_that_the_tracer_misses_is_noticed_in_a_group(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "hydra_tune")
    monkeypatch.setattr(number_inputs.NumberInputTracer, "input_of", lambda self, number, dtype: number.value)
    expected = by_hand(program_of("a_weight"))
    for actual in trained([program_of("a_weight") for _ in range(3)], fusion="on"):
        assert_close(expected, actual)
    assert any("cannot be an input of the graph" in record.message for record in caplog.records)


@pytest.mark.cases(1 / 3)
def test_members_have_numbers_of_their_own():
    """A group's members read other numbers at the same step; one of them reads the same number throughout."""

    def made(pace: float) -> Program:
        schedule = Schedule()

        def advance() -> None:
            schedule.weight += pace

        return advancing(
            advance, step=lambda module, batch: error(module, batch) + schedule.weight * size(module, batch)
        )

    paces = [0.05, 0.1, 0.0, 0.2]
    with HydraExecutor(devices="cpu:1", fusion="on") as pool:
        results = pool.run([made(pace).task for pace in paces])
    for pace, result in zip(paces, results, strict=True):
        for name, tensor in by_hand(made(pace))["state"].items():
            torch.testing.assert_close(result.state_dict()[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_members_that_evaluate_at_different_steps_have_the_metrics_of_their_own_numbers():
    """The evaluation takes the number itself, while the training has it as an input."""

    def made(report_every: int, pace: float) -> Program:
        schedule = Schedule()

        def train() -> Iterator[Any]:
            for batch in [*batches(), *batches()]:
                schedule.weight += pace
                yield batch

        def evaluate(module: nn.Module, batch: Any) -> dict[str, Tensor]:
            smoothing = min(0.9, schedule.weight / 4)
            return {"loss": functional.cross_entropy(module(batch[0]), batch[1], label_smoothing=smoothing)}

        def step(module: nn.Module, batch: Any) -> Tensor:
            return error(module, batch) + schedule.weight * size(module, batch)

        data = {"train": train, "validate": lambda: batches()[:2]}
        return Program(task=task(**data, step=step, evaluate=evaluate, report_every=report_every, epochs=2))

    members = [(3, 0.05), (2, 0.1), (1, 0.05)]
    with HydraExecutor(devices="cpu:1", fusion="on") as pool:
        results = pool.run([made(*member).task for member in members])
    for member, result in zip(members, results, strict=True):
        losses = [report["val_loss"] for report in result.history]
        expected = [report["val_loss"] for report in train_plain(made(*member).task).history]
        assert losses == pytest.approx(expected, rel=1e-4)
