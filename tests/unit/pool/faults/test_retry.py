"""The end of a process under a supervisor that has lost all its devices."""

import os
from types import SimpleNamespace

import pytest

from hydra_tune.checkpoint.every import CheckpointInterval
from hydra_tune.pool.checkpointing.writer import PoolCheckpointWriter
from hydra_tune.pool.faults import retry
from hydra_tune.pool.faults.retry import DEVICES_LOST, FaultRecovery
from hydra_tune.supervision.marks import TrialMarkTable


class Stub:
    """A device that works, or not."""

    def __init__(self, *, is_lost):
        self.is_lost = is_lost

    def synchronize(self):
        if self.is_lost:
            raise RuntimeError("CUDA error: device-side assert triggered\nCompile with ...")


@pytest.fixture
def marks(monkeypatch):
    found = TrialMarkTable()
    monkeypatch.setattr(retry, "here", lambda: found)
    yield found
    found.close()


@pytest.fixture
def done(monkeypatch):
    """All that has been done before the end, and the end with its code."""
    done = []

    def end(code):
        done.append(code)
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", end)
    return done


def recovery(done, **lost):
    checkpoints = PoolCheckpointWriter(None, CheckpointInterval(), None)
    checkpoints.start(lambda: done.append("checkpoint"))
    devices = {name: Stub(is_lost=is_lost) for name, is_lost in lost.items()}
    return FaultRecovery(devices, checkpoints, SimpleNamespace(close=lambda: done.append("log")))


def test_a_process_without_a_device_ends_with_its_reason_and_whole_files(marks, done):
    faults = recovery(done, a=True, b=True)
    with marks.at_work("trial 1"), pytest.raises(SystemExit):
        faults.end_if_all_lost()
    assert sorted(done[:-1]) == ["checkpoint", "log"]
    assert done[-1] == DEVICES_LOST
    assert marks.why == "the loss of all its devices, a, b (RuntimeError: CUDA error: device-side assert triggered)"
    assert marks.ended is None


def test_the_trial_of_the_first_lost_device_is_named(marks, done):
    faults = recovery(done, a=True)
    faults.first_loser = "trial 1"
    with marks.at_work("trial 2"), pytest.raises(SystemExit):
        faults.end_if_all_lost()
    assert set(marks.marked().values()) == {"trial 1"}


def test_a_process_with_a_device_goes_on(marks, done):
    recovery(done, a=True, b=False).end_if_all_lost()
    assert DEVICES_LOST not in done
    assert marks.why == ""


def test_a_process_without_a_supervisor_goes_on(done):
    recovery(done, a=True).end_if_all_lost()
    assert DEVICES_LOST not in done
