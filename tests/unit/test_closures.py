"""Variables around a task's functions: which of them are seen to change, and which are nobody's business."""

import functools
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional

from hydra_tune import train_plain
from hydra_tune.closures import ClosureSnapshot
from tests.unit.pool.tasks import running, task

WIDTH = 16


def net(width):
    return nn.Sequential(nn.Linear(8, width), nn.Linear(width, 4))


def changes(closures):
    return [(one.argument, one.variable, one.before, one.now) for one in closures.changed()]


def test_the_variable_of_a_loop_is_seen_to_change():
    noted = []
    for width in (8, 16):
        noted += [ClosureSnapshot({"model": lambda: net(width)})]  # noqa: B023 - the mistake that is looked for
    assert changes(noted[0]) == [("model", "width", "8", "16")]
    assert changes(noted[1]) == []


def test_a_variable_of_the_module_is_seen_to_change(monkeypatch):
    noted = ClosureSnapshot({"model": lambda: net(WIDTH)})
    monkeypatch.setitem(globals(), "WIDTH", 32)
    assert changes(noted) == [("model", "WIDTH", "16", "32")]


class Unprintable(int):
    """A number whose own code may not be run."""

    def __repr__(self):
        pytest.fail("a user's code is run")


class Posing:
    @property
    def __class__(self):
        pytest.fail("a user's code is run")


UNPRINTABLE = Unprintable(1)


def test_a_number_of_a_users_class_is_noted_without_the_users_code(monkeypatch):
    width, posing = Unprintable(8), Posing()
    noted = ClosureSnapshot({"model": lambda: net(width + UNPRINTABLE), "loss": lambda: posing})
    assert changes(noted) == []
    monkeypatch.setitem(globals(), "UNPRINTABLE", Unprintable(2))
    assert changes(noted) == [("model", "UNPRINTABLE", "1", "2")]


def test_an_attribute_is_no_variable_of_the_module(monkeypatch):
    noted = ClosureSnapshot({"step": lambda module, batch: module.WIDTH})
    monkeypatch.setitem(globals(), "WIDTH", 32)
    assert changes(noted) == []


def test_an_object_counts_by_itself_and_not_by_its_content():
    sizes, other = [8], [8]
    noted = ClosureSnapshot({"model": functools.partial(lambda extra: net(sizes[0] + extra), 1)})
    sizes[0] = 9
    assert changes(noted) == []
    sizes = other
    assert changes(noted) == [("model", "sizes", "an object of list", "an object of list")]


def test_an_equal_value_is_no_change():
    size = 1000
    noted = ClosureSnapshot({"model": lambda: net(size)})
    size = int("1000")
    assert changes(noted) == []
    size = 1000.0
    assert changes(noted) == [("model", "size", "1000", "1000.0")]


def test_one_that_the_functions_change_themselves_is_meant():
    built = 0

    def model():
        nonlocal built
        built += 1
        return net(built)

    noted = ClosureSnapshot({"model": model, "loss": lambda output, target: output.mean() * built})
    model()
    assert changes(noted) == []


def test_one_that_has_no_value_yet_is_not_noted():
    noted = ClosureSnapshot({"loss": lambda output, target: later(output, target)})  # noqa: PLW0108
    later = functional.cross_entropy
    assert changes(noted) == []
    assert later is functional.cross_entropy


def test_what_is_no_function_of_python_is_left_alone():
    assert (
        changes(ClosureSnapshot({"model": nn.Linear, "loss": functional.cross_entropy, "step": None, "train": 3})) == []
    )


def test_it_is_said_by_name_before_the_model_is_built_and_the_trial_goes_on(caplog):
    tasks = []
    for width in (8, 16):
        tasks += [task(model=lambda: net(width))]  # noqa: B023
    with running() as pool:
        results = pool.run(tasks)
    assert [result.module()[0].out_features for result in results] == [16, 16]
    (record,) = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert record.getMessage().startswith(
        "model= of a TrainTask reads the variable 'width', which was 8 when the task was made and is 16 now; the trial takes "
        "16. If every task"
    )
    caplog.clear()
    train_plain(tasks[0])
    assert "'width', which was 8" in caplog.text


@pytest.mark.parametrize("fusion", ["off", "on"])
def test_tasks_that_bind_their_values_are_not_warned_of(caplog, fusion):
    with running(fusion=fusion) as pool:
        pool.run([task(model=lambda width=width: net(width)) for width in (8, 16)])
        pool.run([task(optimizer=functools.partial(torch.optim.SGD, lr=rate)) for rate in (0.1, 0.2)])
    assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []
