"""Bursts in a real pool: who has the device, from which step on. Each burst would last an hour, were it not asked to end."""

import threading
import time
from contextlib import contextmanager

import pytest
from torch.nn import functional

from hydra_tune import Reported
from hydra_tune.observe.event_log.reader import read_log
from hydra_tune.train.loop import burst
from tests.support.schedule_invariants import eligible_jobs
from tests.unit.pool.tasks import PATIENCE_SECONDS, X, Y, against_plain, running, task

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def endless(monkeypatch):
    monkeypatch.setattr(burst, "BURST_SECONDS", 3600.0)


class Steps:
    """The batches of all trials, in the order in which they are computed; at some of them a trial waits."""

    def __init__(self):
        self.order = []
        self.holds = {}

    def task(self, name, count, **changes):
        def step(module, batch):
            self.order.append(name)
            reached, go_on = self.holds.get((name, self.order.count(name)), (threading.Event(), None))
            reached.set()
            if go_on is not None:
                go_on.wait(PATIENCE_SECONDS)
            return functional.cross_entropy(module(batch[0]), batch[1])

        def batches():
            return [(X[:8], Y[:8])] * count

        return task(**({"train": batches, "loss": None, "step": step, "epochs": 1} | changes))

    @contextmanager
    def held(self, name, number):
        """In the block the trial is in the middle of this batch of it."""
        reached, go_on = self.holds[name, number]
        assert reached.wait(PATIENCE_SECONDS)
        try:
            yield
        finally:
            go_on.set()

    def hold(self, name, number):
        self.holds[name, number] = threading.Event(), threading.Event()


@pytest.fixture
def steps():
    return Steps()


def own(**options):
    return running(**({"num_shards": None, "policy": "round_robin"} | options))


def until(condition):
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def is_asked(pool, job):
    return pool._pool._records[job.key].is_asked_to_end()


def waits(pool, job):
    """Whether a job waits for a device."""
    return job.key in eligible_jobs(pool._pool._core.scheduler)


def bursts(path):
    """The steps of each unit, in order; all are bursts, so that nothing was captured."""
    units = sorted(read_log(path).units, key=lambda unit: unit.start_ns)
    assert {unit.kind for unit in units} == {burst.BURST}
    return [unit.steps for unit in units if unit.steps]  # one may find at its beginning that all is done


def test_a_burst_ends_after_the_step_in_which_another_trial_begins_to_wait(steps, tmp_path):
    tasks = [steps.task("a", 10), steps.task("b", 3)]
    steps.hold("a", 4)
    with own(event_log=tmp_path / "log") as pool:
        jobs = [pool.submit(tasks[0])]
        with steps.held("a", 4):
            jobs.append(pool.submit(tasks[1]))
            until(lambda: is_asked(pool, jobs[0]))
        results = [job.result(PATIENCE_SECONDS) for job in jobs]
    assert steps.order == [*"aaaa", *"bbb", *"aaaaaa"]
    assert bursts(tmp_path / "log") == [4, 3, 6]
    assert [result.units_run for result in results] == [10, 3]
    for one, result in zip(tasks, results, strict=True):
        assert against_plain(one, result) == []


def test_a_burst_does_not_end_within_a_step_of_several_batches(steps):
    one = steps.task("a", 8, accumulate=4)
    steps.hold("a", 2)
    with own() as pool:
        first = pool.submit(one)
        with steps.held("a", 2):
            second = pool.submit(steps.task("b", 1))
            until(lambda: is_asked(pool, first))
        result = first.result(PATIENCE_SECONDS)
        assert second.result(PATIENCE_SECONDS).status == "completed"
    assert steps.order == [*"aaaa", "b", *"aaaa"]
    assert against_plain(one, result) == []


def test_a_burst_that_was_asked_to_end_asks_nothing_of_the_next_one(steps, tmp_path):
    """The first comes back, and runs all of its other steps in one burst."""
    steps.hold("a", 1)
    with own(event_log=tmp_path / "log", max_concurrent=3) as pool:
        first = pool.submit(steps.task("a", 6))
        with steps.held("a", 1):
            others = [pool.submit(steps.task(name, 2)) for name in "bc"]
            until(lambda: all(waits(pool, other) for other in others))
        assert {job.result(PATIENCE_SECONDS).status for job in (first, *others)} == {"completed"}
    assert sorted(bursts(tmp_path / "log")) == [1, 2, 2, 5]
    assert steps.order[0] == "a"
    assert steps.order[1:3] in (["b", "b"], ["c", "c"])


def test_a_trial_of_lower_priority_ends_no_burst(steps):
    steps.hold("a", 2)
    with own() as pool:
        first = pool.submit(steps.task("a", 5))
        with steps.held("a", 2):
            second = pool.submit(steps.task("b", 1), priority=-1)
            until(lambda: waits(pool, second))
            assert not is_asked(pool, first)
        assert {job.result(PATIENCE_SECONDS).status for job in (first, second)} == {"completed"}
    assert steps.order == [*"aaaaa", "b"]


def test_a_burst_goes_on_beside_a_device_that_is_free(steps):
    steps.hold("a", 2)
    with own(devices="cpu:2") as pool:
        first = pool.submit(steps.task("a", 5))
        with steps.held("a", 2):
            assert pool.submit(steps.task("b", 3)).result(PATIENCE_SECONDS).status == "completed"
            assert not is_asked(pool, first)
        assert first.result(PATIENCE_SECONDS).status == "completed"
    assert steps.order == [*"aa", *"bbb", *"aaa"]


@pytest.mark.parametrize(("way", "status"), [("prune", "pruned"), ("cancel", "cancelled")])
def test_an_end_within_a_burst_takes_effect_at_the_next_step(steps, way, status):
    steps.hold("a", 4)
    with own() as pool:
        job = pool.submit(steps.task("a", 100))
        with steps.held("a", 4):
            getattr(job, way)()
        result = job.result(PATIENCE_SECONDS)
    assert (result.status, result.units_run) == (status, 4)
    assert steps.order == [*"aaaa"]


def test_a_pause_within_a_burst_takes_effect_at_the_next_step_and_changes_no_bit(steps):
    one = steps.task("a", 8)
    steps.hold("a", 3)
    with own() as pool:
        job = pool.submit(one)
        with steps.held("a", 3):
            job.pause()
        until(lambda: pool._pool._core.scheduler.phases[job.key] == "paused")
        assert pool.submit(steps.task("b", 2)).result(PATIENCE_SECONDS).status == "completed"
        assert steps.order == [*"aaa", *"bb"]
        job.unpause()
        result = job.result(PATIENCE_SECONDS)
    assert steps.order == [*"aaa", *"bb", *"aaaaa"]
    assert against_plain(one, result) == []


def test_only_a_report_that_waits_for_an_answer_ends_a_burst(steps, tmp_path):
    one = steps.task("a", 4, epochs=3, validate=lambda: [(X[8:], Y[8:])])
    with own(event_log=tmp_path / "free") as pool:
        free = pool.submit(one).result(PATIENCE_SECONDS)
    with own(event_log=tmp_path / "asked") as pool:
        stream = pool.events()
        pool.submit(one, events=stream)
        while isinstance(event := stream.get(PATIENCE_SECONDS), Reported):
            event.job.proceed()
        asked = event.result
    assert bursts(tmp_path / "free") == [3 * (4 + 1)]
    assert bursts(tmp_path / "asked") == [4 + 1] * 3
    for name, result in (("free", free), ("asked", asked)):
        reports = [event.more for event in read_log(tmp_path / name).jobs if event.what == "report"]
        assert [(more["step"], more["waits"]) for more in reports] == [(epoch, name == "asked") for epoch in range(3)]
        assert [more["metrics"]["val_loss"] for more in reports] == [row["val_loss"] for row in result.history]
        assert against_plain(one, result) == []
