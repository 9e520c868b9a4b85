"""Jobs that are paused and preferred while they run: others go on, and no number changes."""

import threading
import time
from contextlib import contextmanager

import pytest

from hydra_tune import Finished, HydraExecutor, Reported
from hydra_tune.errors import ConfigError
from tests.unit.pool.tasks import PATIENCE_SECONDS, against_plain, one_batch, running, short, task

pytestmark = pytest.mark.usefixtures("captured_once")


def test_a_paused_job_lets_others_go_on_and_is_exact_afterwards():
    described = task(epochs=4)
    with running(num_shards=3, max_concurrent=1) as pool:
        stream = pool.events()
        job = pool.submit(described, events=stream)
        assert isinstance(stream.get(PATIENCE_SECONDS), Reported)
        job.pause()
        job.proceed()
        assert job.paused
        assert pool.submit(task(epochs=3)).result(PATIENCE_SECONDS).status == "completed"
        assert stream.get(timeout=0.1) is None, "no further unit, so no further report"
        job.unpause()
        assert not job.paused
        while isinstance(event := stream.get(PATIENCE_SECONDS), Reported):
            event.job.proceed()
        assert isinstance(event, Finished)
        assert against_plain(described, event.result) == []


@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
def test_pausing_at_any_time_changes_no_number(devices):
    described = task(epochs=3)
    with running(devices=devices, num_shards=3) as pool:
        jobs = [pool.submit(described) for _ in range(3)]
        while jobs[0].state not in ("completed", "failed"):
            for job in jobs:
                job.pause()
                job.set_priority(int(job is jobs[0]))
                job.unpause()
            time.sleep(0.001)  # the workers get their turn: without it this loop keeps a core for itself
        results = [
            job.result(PATIENCE_SECONDS) for job in jobs
        ]  # all of them: the plain loop draws from torch's streams
    for result in results:
        assert against_plain(described, result) == []


def test_a_paused_job_can_be_cancelled_and_stays_over():
    with running() as pool:
        job = pool.submit(task(epochs=100_000))
        job.pause()
        job.cancel()
        assert job.result(PATIENCE_SECONDS).status == "cancelled"
        job.pause()
        job.unpause()
        job.set_priority(3)
        assert not job.paused


@pytest.mark.parametrize("at_once", [True, False], ids=["submit", "set_priority"])
def test_a_preferred_job_is_admitted_first(at_once):
    begun, go = [], threading.Event()

    def batches(name):
        def draw():
            begun.append(name)
            go.wait(PATIENCE_SECONDS)
            return one_batch()

        return draw

    with running(max_concurrent=1) as pool:
        first = pool.submit(short(train=batches("first")))
        later = [pool.submit(short(train=batches("second")))]
        later.append(pool.submit(short(train=batches("third")), priority=int(at_once)))
        if not at_once:
            later[1].set_priority(1)
        go.set()
        for job in (first, *later):
            assert job.result(PATIENCE_SECONDS).status == "completed"
    assert list(dict.fromkeys(begun)) == ["first", "third", "second"]


@pytest.mark.parametrize("priority", [0.5, "high", None, True])
def test_a_priority_is_an_int(priority):
    with running() as pool:
        job = pool.submit(short())
        with pytest.raises(ConfigError, match="priority must be an int, not"):
            job.set_priority(priority)
        assert job.result(PATIENCE_SECONDS).status == "completed"


def test_a_priority_is_a_whole_number():
    with HydraExecutor(devices="cpu:1") as pool:
        for priority in (1.0, True, "high", None):
            with pytest.raises(ConfigError, match="priority must be an int, not "):
                pool.submit(short(), priority=priority)


def test_staggered_jobs_end_one_after_another_and_no_number_changes():
    names = ["a", "b", "c"]
    drawn, go = [], threading.Event()

    def described(name):
        def draw():
            drawn.append(name)
            return one_batch()

        return task(train=draw, epochs=5)

    @contextmanager
    def held_until_all_are_prepared():
        go.wait(PATIENCE_SECONDS)
        yield

    options = {"policy": "round_robin", "admission": "staggered", "instrument": held_until_all_are_prepared}
    with running(max_concurrent=3, **options) as pool:
        jobs = [pool.submit(described(name)) for name in names]
        while any(job.state in ("queued", "preparing") for job in jobs):
            time.sleep(0.001)
        assert drawn == names
        go.set()
        results = [job.result(PATIENCE_SECONDS) for job in jobs]
    assert drawn[len(names) :] == [name for name in names for _ in range(4)], "the oldest runs to its end"
    assert [against_plain(job.task, result) for job, result in zip(jobs, results, strict=True)] == [[]] * 3
