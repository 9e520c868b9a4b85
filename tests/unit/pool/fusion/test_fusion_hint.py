"""The line that says once that short, alike trials had better be fused, and when it is not said."""

import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hydra_tune.pool.fusion import fusion_hint
from hydra_tune.train.timing.unit_times import UnitTimes
from tests.unit.pool.tasks import PATIENCE_SECONDS, X, Y, running, task

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def any_step_is_short(monkeypatch):
    """However slow the machine is; where a step's time matters, a test says otherwise."""
    monkeypatch.setattr(fusion_hint, "_MOST_STEP_SECONDS", 3600.0)


@pytest.fixture(autouse=True)
def steps_are_short(monkeypatch):
    """On any machine, and beside anything else that it does."""
    monkeypatch.setattr(fusion_hint, "_MOST_STEP_SECONDS", 60.0)
    monkeypatch.setattr(fusion_hint, "_LEAST_SECONDS", 0.0)


def net(width=16):
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))


def batches(steps):
    return [(X[:8], Y[:8])] * steps


def alike(number, *, steps=24, **changes):
    """A trial of so many steps; its seed and learning rate are its own."""
    optimizer = partial(torch.optim.SGD, lr=0.01 * (number + 1))
    described = {"model": net, "optimizer": optimizer, "train": partial(batches, steps), "epochs": 1, "seed": number}
    return task(**(described | changes))


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name == fusion_hint.__name__]


def run_in_turn(pool, *tasks):
    """One after the other, so that the pool has one trial at any time."""
    for one in tasks:
        assert pool.submit(one).result(PATIENCE_SECONDS).status == "completed"


@pytest.mark.parametrize("num_shards", [None, 1], ids=["own code", "captured"])
def test_the_fourth_trial_that_is_like_the_others_is_the_one_to_say_it_and_no_later_one_is(caplog, num_shards):
    with running(num_shards=num_shards) as pool:
        run_in_turn(pool, *(alike(number) for number in range(3)))
        assert lines(caplog) == []
        run_in_turn(pool, alike(3))
        (line,) = lines(caplog)
        assert line.startswith("4 trials of one architecture with steps of ")
        assert "fusion='auto' may train them several times faster, with results that are equal up to rounding" in line
        run_in_turn(pool, *(alike(number, model=partial(net, 32)) for number in range(4)), alike(4))
    assert lines(caplog) == [line]


def test_trials_of_other_architectures_do_not_count(caplog):
    are_there = threading.Event()

    def late():
        are_there.wait(PATIENCE_SECONDS)
        return batches(24)

    with running(num_shards=None) as pool:
        described = [alike(number, train=late) for number in range(4)]
        described += [alike(number, train=late, model=partial(net, 8 * number)) for number in range(4, 10)]
        jobs = [pool.submit(one) for one in described]
        are_there.set()
        assert {job.result(PATIENCE_SECONDS).status for job in jobs} == {"completed"}
    (line,) = lines(caplog)
    assert line.startswith("4 trials of one architecture")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param([{"model": partial(net, 8 * width)} for width in range(1, 7)], id="shapes"),
        pytest.param(
            [{"optimizer": partial(kind, lr=0.01)} for kind in (torch.optim.SGD, torch.optim.AdamW) for _ in range(3)],
            id="optimizers",
        ),
        pytest.param([{"steps": 19} for _ in range(6)], id="too few steps"),
        pytest.param([{"steps": 400, "epochs": 3}, {}, {}], id="too few trials, however long they are"),
    ],
)
def test_it_is_not_said_of_trials_that_differ_in(caplog, changes):
    with running(num_shards=None) as pool:
        run_in_turn(pool, *(alike(number, **one) for number, one in enumerate(changes)))
    assert lines(caplog) == []


def test_a_trial_of_twenty_steps_counts(caplog):
    with running(num_shards=None) as pool:
        run_in_turn(pool, *(alike(number, steps=20) for number in range(4)))
    assert len(lines(caplog)) == 1


def test_it_is_not_said_of_steps_that_are_long(caplog, monkeypatch):
    monkeypatch.setattr(fusion_hint, "_MOST_STEP_SECONDS", 1e-9)
    with running(num_shards=None) as pool:
        run_in_turn(pool, *(alike(number) for number in range(5)))
    assert lines(caplog) == []


@pytest.mark.parametrize("fusion", ["on", "auto"])
def test_it_is_not_said_where_trials_are_fused_if_they_can_be(caplog, fusion):
    with running(num_shards=None, fusion=fusion) as pool:
        run_in_turn(pool, *(alike(number) for number in range(5)))
    assert lines(caplog) == []


def test_each_pool_says_it_once(caplog):
    for count in (1, 2):
        with running(num_shards=None) as pool:
            run_in_turn(pool, *(alike(number) for number in range(5)))
        assert len(lines(caplog)) == count


class Looked(SimpleNamespace):
    """Stands for a trial, of which a hint reads these attributes alone."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


class Meets(nn.Linear):
    """Two threads that look at its parameters do so at the same time, if there is a barrier."""

    barrier = None

    def parameters(self, recurse=True):
        if self.barrier is not None:
            self.barrier.wait(PATIENCE_SECONDS)
        return super().parameters(recurse)


def test_two_workers_that_find_it_out_at_the_same_time_say_it_once(caplog):
    hint, module = fusion_hint.FusionAdvisor(), Meets(2, 2)

    def look():
        hint.look(
            Looked(
                task=None,
                module=module,
                optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters()),
                progress=SimpleNamespace(steps=20, num_steps=40),
                unit_times=UnitTimes({"step": 1e-3}),
            )
        )

    for _ in range(3):
        look()
    assert not hint.is_over
    module.barrier = threading.Barrier(2)
    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert len(lines(caplog)) == 1
    assert hint.is_over


def test_trials_of_too_little_work_are_not_worth_a_line(caplog, monkeypatch):
    monkeypatch.setattr(fusion_hint, "_LEAST_SECONDS", 3600.0)
    with running(num_shards=None) as pool:
        run_in_turn(pool, *(alike(number) for number in range(5)))
    assert lines(caplog) == []
