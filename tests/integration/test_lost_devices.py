"""Devices that fail for good: their trials go on elsewhere, from what the host has or from their last checkpoint."""

import os
import signal
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest
from torch.utils.data import DataLoader, Dataset

from hydra_tune import Finished, Reported
from hydra_tune.errors import ConfigError, DeviceLostError, HydraTuneError, LoaderWorkerError
from hydra_tune.observe.event_log.reader import read_log
from hydra_tune.pool.devices import device_failure
from hydra_tune.pool.job import OVER
from hydra_tune.pool.runtime.dispatcher import JobDispatcher
from tests.integration.test_elastic import TIGHT, long, wait_for_units
from tests.support.losable import losable
from tests.support.parallel import PARALLEL
from tests.unit.pool.tasks import PATIENCE_SECONDS, X, Y, against_plain, one_batch, running, short, task

pytestmark = pytest.mark.timeout(280)


@pytest.fixture
def devices(monkeypatch):
    return losable(monkeypatch)


class Seventh:
    """Entered around units: does something at the beginning of a device's seventh one; others begin no earlier than it."""

    def __init__(self, do=lambda: None, device="cpu:1"):
        self.do, self.thread, self.units, self.begun = do, f"hydra-{device}", 0, threading.Event()

    @contextmanager
    def __call__(self):
        if threading.current_thread().name != self.thread:
            assert self.begun.wait(PATIENCE_SECONDS)  # else the first trial may be over before the second has a device
        else:
            self.begun.set()
            self.units += 1
            if self.units == 7:
                self.do()
        yield


def losing(devices, after):
    """Of two trials, each with a device of its own, the second is in the middle when its device is lost."""
    return Seventh(lambda: devices[1].lose_at(after))


@pytest.mark.cases(1)
@pytest.mark.parametrize(("after", "options"), [(0, {}), (3, TIGHT)], ids=["roomy", "tight"])
def test_trials_of_a_lost_device_end_with_the_same_numbers(devices, caplog, after, options):
    described = [long(seed) for seed in range(2)]
    how = {"devices": "cpu:2", "max_concurrent": 2, "max_retries": 1, "instrument": losing(devices, after)} | options
    with running(**how) as pool:
        jobs = [pool.submit(one) for one in described]
        results = [job.result(PATIENCE_SECONDS) for job in jobs]
        assert pool.device_names == ("cpu:0",)
    for one, result in zip(described, results, strict=True):
        assert against_plain(one, result) == []
        assert result.retries in (0, 1)
        for fault in result.faults:
            assert fault.startswith("DeviceLostError: device cpu:1 was lost")
            assert "illegal memory access" in fault
    assert "device cpu:1 is lost (RuntimeError: CUDA error: an illegal memory access was encountered)" in caplog.text
    assert caplog.text.count("begins again from its beginning (retry 1 of 1)") == sum(r.retries for r in results)


def test_without_retries_those_fail_by_name_whose_state_is_lost_and_the_others_go_on(devices):
    described = [long(seed) for seed in range(2)]
    with running(devices="cpu:2", max_concurrent=2, max_retries=0, instrument=losing(devices, 0)) as pool:
        jobs = [pool.submit(one, name=f"trial {number}") for number, one in enumerate(described)]
        results = [job.result(PATIENCE_SECONDS) for job in jobs]
        failed = [number for number, result in enumerate(results) if result.status == "failed"]
        assert len(failed) == 1
        assert isinstance(results[failed[0]].error, DeviceLostError)
        assert f"'trial {failed[0]}'" in str(results[failed[0]].error)
        assert against_plain(described[1 - failed[0]], results[1 - failed[0]]) == []
        assert pool.submit(short()).result(PATIENCE_SECONDS).status == "completed"


def test_a_trial_goes_on_from_its_last_checkpoint(devices, tmp_path, caplog):
    described = {seed: long(seed) for seed in (3, 4)}
    log = tmp_path / "run.jsonl"
    how = {"checkpoint_dir": tmp_path / "saved", "event_log": log, "instrument": Seventh()}
    with running(devices="cpu:2", max_concurrent=2, **how) as pool:
        streams = [pool.events() for _ in described]
        jobs = [
            pool.submit(one, name=f"trial {seed}", events=stream)
            for (seed, one), stream in zip(described.items(), streams, strict=True)
        ]
        for _ in range(2):
            for stream, job in zip(streams, jobs, strict=True):
                assert isinstance(stream.get(PATIENCE_SECONDS), Reported)
                job.proceed()
        for stream, job in zip(streams, jobs, strict=True):  # both wait at their third report, and hold it for us
            assert isinstance(stream.get(PATIENCE_SECONDS), Reported)
            job.checkpoint(PATIENCE_SECONDS)
        devices[1].lose_at(0)
        for stream, job in zip(streams, jobs, strict=True):
            job.proceed()
            while isinstance(stream.get(PATIENCE_SECONDS), Reported):
                job.proceed()
        results = [job.result(PATIENCE_SECONDS) for job in jobs]
    assert sum(result.retries for result in results) == 1
    assert "begins again from its last checkpoint (retry 1 of 1)" in caplog.text
    for one, result in zip(described.values(), results, strict=True):
        assert against_plain(one, result) == []
    assert [event.what for event in read_log(log).jobs].count("begins again") == 1


def test_a_driver_is_told_of_each_report_once(devices):
    described = long()
    with running(devices="cpu:2", max_concurrent=2, instrument=Seventh()) as pool:
        streams = [pool.events() for _ in range(2)]
        jobs = [pool.submit(long(seed), events=stream) for seed, stream in enumerate(streams)]
        for _ in range(3):
            for stream, job in zip(streams, jobs, strict=True):
                assert isinstance(stream.get(PATIENCE_SECONDS), Reported)
                job.proceed()
        waiting = [stream.get(PATIENCE_SECONDS) for stream in streams]  # all wait at the fourth report
        assert [event.step for event in waiting] == [3, 3]
        devices[1].lose_at(0)
        steps = [[], []]
        jobs[0].proceed()
        jobs[1].proceed()  # at once, or while it begins again
        for number, stream in enumerate(streams):
            while isinstance(event := stream.get(PATIENCE_SECONDS), Reported):
                steps[number].append(event.step)
                event.job.proceed()
            assert isinstance(event, Finished)
            assert [entry["epoch"] for entry in event.result.history] == list(range(described.epochs))
        assert steps == [list(range(4, described.epochs))] * 2
        assert sum(job.result(0).retries for job in jobs) == 1
        for seed, job in enumerate(jobs):
            assert against_plain(long(seed), job.result(0)) == []


@pytest.fixture
def held():
    """Holds the second device in the middle of a trial until it is let go."""
    reached, go_on = threading.Event(), threading.Event()

    def hold():
        reached.set()
        assert go_on.wait(PATIENCE_SECONDS)

    yield Seventh(hold), reached, go_on
    go_on.set()


@pytest.mark.cases(1 / 3)
def test_a_paused_trial_whose_state_is_lost_stays_paused(devices, held):
    instrument, reached, go_on = held
    with running(devices="cpu:2", max_concurrent=2, instrument=instrument) as pool:
        jobs = [pool.submit(long(seed, epochs=40)) for seed in range(2)]
        assert reached.wait(PATIENCE_SECONDS)
        for job in jobs:
            job.pause()
        devices[1].lose_at(0)
        go_on.set()
        until(lambda: pool.device_names == ("cpu:0",))
        assert (jobs[1].paused, jobs[1].state in OVER) == (True, False)
        for job in jobs:
            job.unpause()
        results = [job.result(PATIENCE_SECONDS) for job in jobs]
    assert [(result.status, result.retries) for result in results] == [("completed", 0), ("completed", 1)]


def test_a_pause_that_ends_just_before_a_trial_begins_again_has_ended(devices, held, monkeypatch):
    instrument, reached, go_on = held
    begin_again = JobDispatcher._begin_again

    def unpaused_before(self, record, result):
        record.job.unpause()
        return begin_again(self, record, result)

    monkeypatch.setattr(JobDispatcher, "_begin_again", unpaused_before)
    with running(devices="cpu:2", max_concurrent=2, instrument=instrument) as pool:
        jobs = [pool.submit(long(seed)) for seed in range(2)]
        assert reached.wait(PATIENCE_SECONDS)
        jobs[1].pause()
        devices[1].lose_at(0)
        go_on.set()
        results = [job.result(PATIENCE_SECONDS) for job in jobs]
    assert results[1].retries == 1
    assert [result.status for result in results] == ["completed", "completed"]


@pytest.mark.cases(1 / 3)
def test_a_device_that_works_again_may_be_added_again(devices):
    described = [long(seed) for seed in range(2)]
    with running(devices="cpu:2", max_concurrent=2, instrument=losing(devices, 0)) as pool:
        jobs = [pool.submit(one) for one in described]
        for job in jobs:
            job.result(PATIENCE_SECONDS)
        broken, units = devices[1], pool.stats().devices["cpu:1"].units
        pool.add_device("cpu:1")
        assert devices[1] is not broken
        jobs = [pool.submit(one) for one in described]
        wait_for_units(pool, "cpu:1", units + 5, jobs)
        for job in jobs:
            assert against_plain(job.task, job.result(PATIENCE_SECONDS)) == []


def test_a_lost_device_whose_worker_hangs_is_added_although_it_could_not_be_opened_at_first(devices, monkeypatch):
    hangs, go_on, give_up = threading.Event(), threading.Event(), device_failure.give_up

    def held(pager):
        hangs.set()
        assert go_on.wait(PATIENCE_SECONDS)
        give_up(pager)

    monkeypatch.setattr(device_failure, "give_up", held)
    with running(devices="cpu:2", max_concurrent=2, instrument=losing(devices, 0)) as pool:
        jobs = [pool.submit(long(seed)) for seed in range(2)]
        assert hangs.wait(PATIENCE_SECONDS)
        until(lambda: pool.device_names == ("cpu:0",))
        with monkeypatch.context() as patched:
            patched.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=0))
            with pytest.raises(ConfigError, match="need more memory than is free"):
                pool.add_device("cpu:1")
        pool.add_device("cpu:1")
        assert pool.device_names == ("cpu:0", "cpu:1")
        go_on.set()
        assert [job.result(PATIENCE_SECONDS).status for job in jobs] == ["completed", "completed"]


def test_a_device_that_fails_while_it_is_taken_away_is_lost(devices, held):
    instrument, reached, go_on = held
    described = [long(seed) for seed in range(2)]
    with running(devices="cpu:2", max_concurrent=2, instrument=instrument) as pool:
        jobs = [pool.submit(one) for one in described]
        assert reached.wait(PATIENCE_SECONDS)
        for job in jobs:
            job.pause()
        go_on.set()
        until(lambda: not pool._pool._core.scheduler.running)
        devices[1].lose_at(0)
        pool.remove_device("cpu:1")
        for job in jobs:
            job.unpause()
        results = [job.result(PATIENCE_SECONDS) for job in jobs]
    assert sum(result.retries for result in results) == 1
    for one, result in zip(described, results, strict=True):
        assert against_plain(one, result) == []


def until(condition):
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_the_loss_of_the_last_device_fails_every_job_and_leaves_none_waiting(devices):
    submitted = threading.Event()

    def lose():
        assert submitted.wait(PATIENCE_SECONDS)
        devices[0].lose_at(0)

    with running(devices="cpu:1", max_concurrent=2, instrument=Seventh(lose, "cpu:0")) as pool:
        jobs = [pool.submit(long(seed)) for seed in range(3)]
        submitted.set()
        for job in jobs:
            result = job.result(PATIENCE_SECONDS)
            assert result.status == "failed"
            assert "the pool's last device, cpu:0, is lost" in str(result.error)
        with pytest.raises(HydraTuneError, match="last device"):
            pool.submit(short())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["one", "data-parallel", "pipelined"])
def test_wherever_a_device_is_lost_the_numbers_are_the_same(devices, way):
    parallel = PARALLEL[None if way == "one" else way]
    described = [long(seed, epochs=4, accumulate=3, parallel=parallel) for seed in range(1 if way != "one" else 3)]
    losses = 0
    for after in range(0, 120, 5):
        with running(devices="cpu:2", max_concurrent=3, **TIGHT) as pool:
            assert pool.width
            devices[1].lose_at(after)
            results = [job.result(PATIENCE_SECONDS) for job in [pool.submit(one) for one in described]]
            losses += devices[1].is_lost
        for one, result in zip(described, results, strict=True):
            assert against_plain(one, result) == [], after
    assert losses > 12


class Kills(Dataset):
    """A worker that kills itself at a sample, so many times."""

    def __init__(self, folder, times):
        self.folder, self.times = folder, times

    def __len__(self):
        return 24

    def __getitem__(self, index):
        if index == 20 and (count := len(list(self.folder.iterdir()))) < self.times:
            (self.folder / str(count)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return X[index], Y[index]


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_trial_whose_loaders_worker_is_killed_begins_again(times, tmp_path):
    loader = DataLoader(Kills(tmp_path, times), batch_size=8, num_workers=1)
    described = task(train=loader, batch_size=None, epochs=1)
    with running(devices="cpu:1") as pool:
        result = pool.submit(described, max_retries=1).result(PATIENCE_SECONDS)
    if times == 1:
        assert against_plain(described, result) == []
        assert result.faults[0].startswith("LoaderWorkerError: ")
    else:
        assert isinstance(result.error, LoaderWorkerError)
        assert "begun again 1 times before" in "".join(result.error.__notes__)


def test_what_a_trials_own_code_raises_is_not_tried_again():
    calls = []

    def failing():
        calls.append(1)
        yield from one_batch()
        raise RuntimeError("CUDA error: so it says")

    with running(devices="cpu:1", max_retries=5) as pool:
        result = pool.submit(short(train=failing)).result(PATIENCE_SECONDS)
    assert isinstance(result.error, RuntimeError)
    assert (len(calls), result.retries) == (1, 0)


@pytest.mark.parametrize("value", [-1, 1.5, True, "2"])
def test_what_is_no_number_of_retries_is_refused(value):
    with pytest.raises(ConfigError, match="max_retries must be a whole number from 0"), running(max_retries=value):
        pass
    with running() as pool:
        assert pool.width
        with pytest.raises(ConfigError, match="max_retries must be a whole number from 0"):
            pool.submit(short(), max_retries=value)
