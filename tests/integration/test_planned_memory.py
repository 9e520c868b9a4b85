"""Planned steps in a pool: no more memory than the device has, and as much as was predicted, by a tracker of storages.

It shares nothing with the planner, the interpreter or the ledger: tests/support/tracker.py.
"""

import gc
from functools import partial

import pytest
import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

from hydra_tune import HydraExecutor, TrainTask
from hydra_tune.observe.event_log.reader import read_log
from hydra_tune.planner.run.runner import MergedGraphRunner
from tests.support.tracker import StorageTracker
from tests.unit.planner.made import MODELS
from tests.unit.pool.tasks import running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def task_of(name, seed):
    """Three batches an epoch, all of one size, so that all steps are of one kind."""
    model, batch = MODELS[name]
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        batches = [batch() for _ in range(3)]
    return TrainTask(
        model=model,
        optimizer=partial(torch.optim.AdamW, lr=1e-3 * (seed + 1)),
        train=TensorDataset(*(torch.cat(tensors) for tensors in zip(*batches, strict=True))),
        validate=TensorDataset(*batches[0]),
        batch_size=len(batches[0][1]),
        loss=functional.cross_entropy,
        epochs=4,
        seed=seed,
    )


@pytest.fixture
def tracker(monkeypatch):
    """Entered around each part of planned steps, on the thread that computes them; host copies are made before."""
    found, segment = StorageTracker(), MergedGraphRunner.segment

    def tracked(self, *arguments):
        with found():
            return segment(self, *arguments)

    monkeypatch.setattr(MergedGraphRunner, "segment", tracked)
    return found


@pytest.mark.parametrize(("name", "share"), [*((name, 0.65) for name in MODELS), ("cnn", 0.8), ("resnet", 0.8)])
def test_the_most_that_there_is_at_once_is_what_was_predicted_and_within_the_budget(tmp_path, tracker, name, share):
    """Of four trials, in a share of what all of them need at once with everything kept."""
    with HydraExecutor("cpu:1", "1GiB") as pool:
        (device,) = pool.plan([task_of(name, 0)]).devices.values()
    options = {"fusion": "on", "fusion_size": 4, "fusion_planner": "on", "event_log": tmp_path / "log.jsonl"}
    gc.collect()
    gc.disable()  # what circles hold is not the device's
    try:
        with running(**options, device_memory=int(4 * share * device.peak_bytes)) as pool:
            results = pool.run([task_of(name, seed) for seed in range(4)])
            (device,) = pool.stats().devices.values()
        (measured,) = tracker.peak_bytes
    finally:
        gc.enable()
    assert [result.error for result in results] == [None] * 4
    (plan,) = (event.more for event in read_log(tmp_path / "log.jsonl").jobs if event.what == "plan")
    (chosen,) = (way for way in plan["ways"] if way["is_chosen"])
    assert sum(chosen["sizes"]) == 4
    assert measured <= device.peak_bytes <= device.budget_bytes
    assert 0.9 * measured <= chosen["peak_bytes"] <= 1.1 * measured
