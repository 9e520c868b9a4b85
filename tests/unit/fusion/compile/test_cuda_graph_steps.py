"""Steps of groups are recorded, replayed, and recorded anew where their state has moved; here with recordings made of calls."""

import logging
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, AdamW, lr_scheduler
from torch.utils.data import TensorDataset

from hydra_tune import TrainTask
from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.errors import BudgetError
from hydra_tune.fusion.compile.cuda_graph_steps import GraphReplayPolicy, GroupCaptureCache
from hydra_tune.memory.pager import Pager
from hydra_tune.shard.capture.capture_lock import GATE
from tests.unit.fusion.groups import Run, assert_as_plain

GENERATOR = torch.Generator().manual_seed(5)
X = torch.randn(48, 8, generator=GENERATOR, dtype=torch.float64)
Y = torch.randint(4, (48,), generator=GENERATOR)
STEPS = 12


class Again:
    """A recording that calls the recorded function again: it reads the addresses that it has read, and writes where it has."""

    def __init__(self, run):
        self.run, self.outputs, self.nbytes, self.is_gone = run, run(), 0, False

    def replay(self):
        assert not self.is_gone, "its memory has been given back"
        for target, made in zip(self.outputs, self.run(), strict=True):
            target.copy_(made)

    def drop(self):
        self.is_gone = True


class Recorder:
    """Notes what it has recorded, and how often that was replayed."""

    def __init__(self, spoil=None):
        self.made, self.spoil = [], spoil

    def record(self, run):
        run()
        if self.spoil == "fails":
            raise RuntimeError("operation not permitted when stream is capturing")
        made = Again(run)
        if self.spoil == "large":
            made.nbytes = 1 << 40
        if self.spoil == "wrong":
            replay = made.replay
            made.replay = lambda: (replay(), [output.mul_(1.1) for output in made.outputs])
        self.made.append(made)
        return made


def net():
    first = [nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*first, nn.Linear(8, 4)).double()


def task(seed, **changes):
    arguments = {
        "model": net,
        "optimizer": partial(SGD, lr=0.1 / (seed + 1), momentum=0.9),
        "train": TensorDataset(X, Y),
        "batch_size": 8,
        "loss": functional.cross_entropy,
        "epochs": 2,
        "seed": seed,
        "scheduler": partial(lr_scheduler.ExponentialLR, gamma=0.9),
        "scheduler_interval": "step",
    }
    return TrainTask(**(arguments | changes))


def slow_device():
    """Each step is a unit of its own, as where a group takes most of a GPU."""
    return CpuDevice(0, 1 << 30, link_bandwidth=1 << 40)


def fast_device():
    """Several steps are a unit."""
    return CpuDevice(0, 1 << 30)


both = pytest.mark.parametrize("opened", [slow_device, fast_device])


def recorded(tasks, recorder, between=None, device=None):
    def before(run, _unit):
        if not run.trial.records:
            run.trial.records, run.trial.captures = True, GroupCaptureCache(recorder)
        if between is not None:
            between(run)

    run = Run(tasks, before=before, device=device or slow_device())
    for index, one in enumerate(tasks):
        assert_as_plain(run, index, one)
    assert all(one.is_gone for one in recorder.made), "a group that is over keeps none"
    assert run.pager.ledger.used_bytes == 0
    return run


@both
@pytest.mark.parametrize("optimizer", [partial(SGD, momentum=0.9), AdamW])
def test_replayed_steps_are_each_members_own(optimizer, opened, caplog):
    """With rates that change at each step, step counts, dropout and the statistics of BatchNorm."""
    recorder = Recorder()
    with caplog.at_level(logging.INFO, "hydra_tune.fusion"):
        tasks = [task(seed, optimizer=partial(optimizer, lr=0.01 * (seed + 1))) for seed in range(3)]
        run = recorded(tasks, recorder, device=opened())
    assert len(recorder.made) == 1
    assert (len(run.units) < STEPS) == (opened is fast_device)
    assert "the step of a group of 3 is replayed as a CUDA graph" in caplog.text


class Turns:
    """A generator that says when somebody has its turn, and with how many computing meanwhile he began to wait for it."""

    def __init__(self, generator):
        self.get_state, self.set_state = generator.get_state, generator.set_state
        self.depth, self.computing = 0, []

    @contextmanager
    def in_turn(self):
        self.computing.append(GATE._sharing)
        self.depth += 1
        yield
        self.depth -= 1


@both
def test_recorded_steps_have_their_generators_turn_since_before_the_gate(opened):
    """Whoever draws takes both in this order; the other way round they could wait for each other, and a capture for both."""
    device = opened()
    device.shares_generator = False
    device.generator = turns = Turns(device.generator)
    seen = []

    class Looking(Recorder):
        def record(self, run):
            def looked():
                seen.append((turns.depth, GATE._sharing))
                return run()

            return super().record(looked)

    recorded([task(seed, model=lambda: nn.Linear(8, 4).double()) for seed in range(2)], Looking(), device=device)
    assert len(seen) > STEPS / 2, "recorded and replayed"
    assert set(seen) == {(1, 1)}
    assert set(turns.computing) == {0}


def test_state_that_moves_is_recorded_anew(caplog):
    """What was sent to the host comes back to other addresses; replayed where it was, members would train on nothing."""
    recorder, kept = Recorder(), []

    def between(run):
        if len(run.units) in (8, 16):
            run.pager.relieve()
            kept.extend(torch.full((1 << 12,), float("nan")) for _ in range(64))  # what was there is somebody else's

    recorded([task(seed) for seed in range(3)], recorder, between)
    assert len(recorder.made) == 3
    assert "not replayed" not in caplog.text


def test_state_that_moves_all_the_time_is_not_recorded():
    recorder = Recorder()
    recorded([task(seed) for seed in range(3)], recorder, lambda run: run.pager.relieve())
    assert len(recorder.made) <= 8


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        ("fails", "it cannot be recorded: RuntimeError"),
        ("wrong", "its numbers are off by"),
        ("large", "no room for what a graph keeps for itself"),
    ],
)
@both
def test_a_step_that_cannot_be_recorded_runs_as_it_is(spoil, why, opened, caplog):
    recorded([task(seed) for seed in range(2)], Recorder(spoil), device=opened())
    assert "a group's step is not replayed as a CUDA graph: " in caplog.text
    assert why in caplog.text


def test_a_course_records_what_has_stayed_and_gives_up_what_does_not():
    course = GraphReplayPolicy()
    assert [course.next(1), course.next(1)] == ["run", "record"]
    course.recorded()
    assert [course.next(1), course.next(1)] == ["replay", "replay"]
    assert [course.next(2), course.next(1), course.next(2)] == ["run", "replay", "run"]
    course.forget()
    assert [course.next(1), course.next(1)] == ["run", "record"]
    for place in range(20):
        if course.next(place) == "run" and course.next(place) == "record":
            course.recorded()
    assert course.why
    assert [course.next(99), course.next(99)] == ["run", "run"]


def test_room_that_is_held_goes_before_any_block_and_never_keeps_a_unit_from_its_own():
    pager, gone = Pager(CpuDevice(0, 1000)), []
    held = pager.caches.hold(600, lambda: gone.append(1))
    assert pager.caches.hold(600, lambda: gone.append(2)) is None
    with pager.lease([], 400):
        assert not gone
    with pager.lease([], 900):
        assert gone == [1]
    held.release()
    assert pager.ledger.used_bytes == 0
    with pytest.raises(BudgetError), pager.lease([], 1001):
        pass
    pager.device.close()
