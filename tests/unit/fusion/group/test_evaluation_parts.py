"""A group whose members are not all evaluated at once: each member's metrics are those of its plain loop."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hydra_tune.fusion.compile import group_plan_cache
from hydra_tune.fusion.group import group_trial
from tests.parity.test_changing_numbers import of_a_function_used_twice
from tests.parity.test_python_state import assert_close, trained
from tests.parity.test_stateful import by_hand
from tests.unit.fusion.group.test_group_trial import Net, small
from tests.unit.fusion.groups import Run, assert_as_plain
from tests.unit.fusion.test_padding import X as INPUTS
from tests.unit.fusion.test_padding import Y as LABELS
from tests.unit.fusion.test_padding import small as padded

pytestmark = pytest.mark.usefixtures("captured_once")


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """No more than two members are evaluated at once; also the slots of the parts that were asked for."""
    asked = []

    def of_two(plan, count, budget_bytes):
        del budget_bytes
        if plan.mode == "train":
            return [range(count)]
        asked.append([range(begin, min(begin + 2, count)) for begin in range(0, count, 2)])
        return asked[-1]

    for module in (group_trial, group_plan_cache):
        monkeypatch.setattr(module, "parts_of", of_two)
    return asked


class Drops(Net):
    """Dropout in evaluation too, and a buffer that counts the forwards of both modes."""

    def __init__(self, p=0.3):
        super().__init__()
        self.p = p
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return super().forward(functional.dropout(x, self.p, training=True)) + self.count


def drops(p=0.3):
    return Drops(p).double()


def with_accuracy(module, batch):
    made = module(batch[0])
    return {"loss": functional.cross_entropy(made, batch[1]), "accuracy": (made.argmax(1) == batch[1]).double().mean()}


def with_margin(module, batch):
    made = module(batch[0])
    return {"loss": functional.cross_entropy(made, batch[1]), "margin": made.amax(1).mean()}


def collected(module, batch):
    return {"made": module(batch[0]), "y": batch[1]}


def finished(values):
    return {"accuracy": (values["made"].argmax(1) == values["y"]).double().mean()}


def sets(size):
    train, validate = (TensorDataset(INPUTS[: n * size], LABELS[: n * size]) for n in (4, 2))
    return {"batch_size": size, "train": train, "validate": validate}


KINDS = {
    "BatchNorm and dropout": [{}] * 5,
    "random numbers and buffers that evaluations write": [{"model": drops}] * 4,
    "probabilities of their own": [{"model": partial(drops, p)} for p in (0.1, 0.2, 0.3)],
    "metrics of their own": [{"evaluate": one} for one in (with_accuracy, with_margin, with_margin, with_margin)],
    "metrics of the whole set": [{"evaluate": collected, "finish": finished, "metric": "val_accuracy"}] * 3,
    "evaluations at different steps": [{"report_every": count} for count in (2, 3, 4, 3, 2)],
    "some without evaluation": [{"validate": None, "metric": "train_loss"}] * 2 + [{}] * 2,
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", KINDS)
def test_each_member_has_the_metrics_of_its_plain_loop_whatever_part_it_is_in(kind, parts):
    tasks = [small(seed=seed, **changes) for seed, changes in enumerate(KINDS[kind])]
    run = Run(tasks)
    for index, task in enumerate(tasks):
        assert_as_plain(run, index, task)
    assert len(parts[0]) > 1


def test_smaller_batches_are_padded_to_the_largest_of_all_parts(parts):
    tasks = [padded(seed=seed, **sets(size)) for seed, size in enumerate((8, 8, 12, 8))]
    run = Run(tasks)
    for index, task in enumerate(tasks):
        assert_as_plain(run, index, task)
    assert run.most_kinds == 1
    assert {len(slots) for slots in parts} == {2}


def test_members_that_leave_and_come_are_evaluated_in_the_parts_of_their_slots(parts):
    tasks = [small(seed=seed, epochs=1 if seed == 1 else 3) for seed in range(4)]
    later = small(seed=4, epochs=2)
    run = Run(tasks, later=[(4, later)])
    for index, task in enumerate([*tasks, later]):
        assert_as_plain(run, index, task)
    assert {len(slots) for slots in parts} == {2}
    assert isinstance(run.trial.seats[1].member.built()[0], nn.Module)


@pytest.mark.cases(1 / 3)
def test_members_whose_evaluations_read_numbers_of_their_own_have_the_metrics_of_these_numbers(parts):
    expected = by_hand(of_a_function_used_twice())
    for actual in trained([of_a_function_used_twice() for _ in range(3)], fusion="on"):
        assert_close(expected, actual)
    assert [len(slots) for slots in parts] == [2] * len(parts)
    assert parts
