"""No device ever holds more than its budget, and a trial that ends early gives every byte back.

Seen by a tracker that shares nothing with the engine: tests/support/tracker.py.
"""

import gc
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from hydra_tune import Finished, HydraExecutor, Reported, train_plain
from hydra_tune.train import single_trial
from tests.parity.models import MODELS, build
from tests.support.tracker import StorageTracker

BUDGET_BYTES = 180 * 1024
NUM_TRIALS = 8
PATIENCE_SECONDS = 60


def until(condition):
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def release_when_stopped(record, release):
    until(lambda: record.outcome is not None)
    release.set()


def is_freed(tracker, but=0):
    """Whether so much is left. A worker may hold its last unit a moment longer than the driver waits for it."""
    gc.collect()
    return tracker.current_bytes == but


def plain_peak_bytes(name):
    tracker = StorageTracker()
    gc.collect()
    gc.disable()
    with tracker():
        train_plain(build(name))
    gc.enable()
    return max(tracker.peak_bytes)


def test_the_tracker_counts_storages_once_from_the_first_operation_to_the_last_reference():
    tracker = StorageTracker()
    outside = torch.zeros(1000)
    with tracker():
        copied = outside.clone()
        view = copied.view(10, 100)[2:]
        assert tracker.current_bytes == 4000, "the source of a copy may be host memory"
        product = view * 2
        assert tracker.current_bytes == 4000 + 3200
        del copied, view
        assert tracker.current_bytes == 3200
        outside.add_(1)
        assert tracker.current_bytes == 3200 + 4000, "what is computed on must be here"
    del product, outside
    assert tracker.current_bytes == 0
    assert tracker.peak_bytes == [7200]


@pytest.mark.slow
def test_the_tracker_sees_a_model_that_needs_more_than_the_budget():
    """Without shards and spilling these models would not do: the tests below could fail."""
    assert {name: plain_peak_bytes(name) > 2 * BUDGET_BYTES for name in ("cnn", "vit", "gpt2")} == {
        "cnn": True,
        "vit": True,
        "gpt2": True,
    }


def answer_all(pool, tasks):
    """Run tasks as a driver does, every report answered with "go on"; returns the results and the shards of each."""
    stream, num_shards, results = pool.events(), {}, []
    for task in tasks:
        pool.submit(task, events=stream)
    while len(results) < len(tasks):
        event = stream.get(4 * PATIENCE_SECONDS)  # eight captures come before the first
        assert event is not None, "nothing happens any more"
        if isinstance(event, Reported):
            num_shards[event.job.name] = event.job.progress.num_shards
            event.job.proceed()
        else:
            results.append(event.result)
    return results, num_shards


@pytest.mark.parametrize(
    ("devices", "activations"),
    [
        pytest.param("cpu:1", "recompute", marks=pytest.mark.slow),
        pytest.param("cpu:1", "keep", marks=pytest.mark.slow),
        pytest.param("cpu:2", "keep", marks=pytest.mark.slow),
        pytest.param("cpu:2", "spill", marks=pytest.mark.slow),
    ],
)
def test_eight_trials_stay_within_the_budget_of_each_device(devices, activations, monkeypatch):
    """Cut from their first step on: own code computes on the data set itself, of which no device has room for all."""
    monkeypatch.setattr(single_trial, "uncaptured", lambda *_: "the test asks for a cut")
    tracker = StorageTracker()
    names = [name for name in MODELS if name != "mlp"]
    tasks = [build(names[i % 3], seed=i, epochs=1, activations=activations) for i in range(NUM_TRIALS)]
    with HydraExecutor(
        devices=devices, device_memory=BUDGET_BYTES, max_concurrent=NUM_TRIALS, instrument=tracker
    ) as pool:
        results, num_shards = answer_all(pool, tasks)
        statistics = pool.stats().devices
    assert [result.error for result in results] == [None] * NUM_TRIALS
    assert len(num_shards) == NUM_TRIALS
    assert min(num_shards.values()) >= 4
    assert len(tracker.peak_bytes) == len(statistics), "every device ran units"
    assert max(tracker.peak_bytes) <= BUDGET_BYTES
    assert min(tracker.peak_bytes) > BUDGET_BYTES / 4, "the tracker sees units at work"
    for device in statistics.values():
        assert device.peak_bytes <= device.budget_bytes == BUDGET_BYTES
        assert device.resident_bytes == 0
        assert device.bytes_ahead > 0, "what was sent ahead is counted, too"
    del results
    gc.collect()
    assert tracker.current_bytes == 0


@pytest.mark.cases(1 / 3)
def test_a_prune_at_a_report_returns_every_byte():
    tracker = StorageTracker()
    with HydraExecutor(devices="cpu:1", num_shards=1, instrument=tracker) as pool:
        stream = pool.events()
        job = pool.submit(build("gpt2"), events=stream)
        event = stream.get(PATIENCE_SECONDS)
        assert isinstance(event, Reported)
        resident = pool.stats().devices["cpu:0"].resident_bytes
        assert resident > 0
        assert tracker.current_bytes >= resident / 2
        job.prune()
        event = stream.get(PATIENCE_SECONDS)
        assert isinstance(event, Finished)
        assert event.result.status == "pruned"
        assert pool.stats().devices["cpu:0"].resident_bytes == 0
        assert pool.stats().units_saved > 0
        del event
        until(lambda: is_freed(tracker))


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize(
    "activations", ["keep", *(pytest.param(each, marks=pytest.mark.slow) for each in ("spill", "recompute"))]
)
def test_a_cancel_in_mid_run_lets_the_running_unit_end_and_no_other_begin(activations):
    """After four forward units: what they have kept goes with their graphs."""
    tracker = StorageTracker()
    entered = []
    reached, release = threading.Event(), threading.Event()

    @contextmanager
    def instrument():
        """Stop inside the fifth unit until the test has cancelled the job."""
        entered.append(threading.get_ident())
        if len(entered) == 5:
            reached.set()
            assert release.wait(PATIENCE_SECONDS)
        with tracker():
            yield

    with HydraExecutor(devices="cpu:1", num_shards=8, instrument=instrument) as pool:
        job = pool.submit(build("vit", activations=activations))
        assert reached.wait(PATIENCE_SECONDS)
        record = pool._pool._records[job.key]
        releasing = threading.Thread(target=release_when_stopped, args=(record, release))
        releasing.start()
        job.cancel()
        result = job.result(PATIENCE_SECONDS)
        releasing.join()
        assert result.status == "cancelled"
        assert len(entered) == 5
        assert pool.stats().devices["cpu:0"].resident_bytes == 0
        del result, record
        until(lambda: is_freed(tracker))


@pytest.mark.slow
def test_the_other_trials_get_the_memory_of_a_pruned_one():
    """After the prune the tracker counts the other trial alone: as much as when it runs by itself."""
    tracker = StorageTracker()
    with HydraExecutor(devices="cpu:1", num_shards=1, instrument=tracker, max_concurrent=2) as pool:
        stream = pool.events()
        pruned, other = (pool.submit(build("gpt2", seed=seed), events=stream) for seed in (1, 2))
        first, second = stream.get(PATIENCE_SECONDS), stream.get(PATIENCE_SECONDS)
        assert {first.job, second.job} == {pruned, other}
        both = tracker.current_bytes
        pruned.prune()
        assert stream.get(PATIENCE_SECONDS).job is pruned
        del first, second
        until(lambda: is_freed(tracker, but=both / 2))
        other.cancel()
        assert stream.get(PATIENCE_SECONDS).job is other
        until(lambda: is_freed(tracker))


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize("name", ["mlp", "cnn", "vit", "gpt2"])
def test_the_memory_that_a_plain_loop_would_take_is_counted(name):
    """A plain loop has batches and results of its own besides; own code is not counted."""
    needed = []
    for num_shards in (1, 2, None):
        with HydraExecutor(devices="cpu:1", num_shards=num_shards) as pool:
            needed.append(pool.submit(build(name)).result(PATIENCE_SECONDS).one_shard_bytes)
    assert needed[0] == needed[1]
    assert 0.75 <= needed[0] / plain_peak_bytes(name) <= 1
    assert needed[2] == 0
