"""Devices that are taken from a pool, and added to it, while trials run."""

import threading
import time
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from hydra_tune import HydraExecutor, Job, Reported
from hydra_tune.errors import ConfigError, HydraTuneError
from hydra_tune.memory.pager import Pager
from hydra_tune.observe.event_log.reader import read_log
from hydra_tune.pool.job import OVER
from hydra_tune.train.parallel.cost_model import DATA_PARALLEL, PIPELINED
from tests.support.parallel import PARALLEL
from tests.unit.pool.tasks import PATIENCE_SECONDS, against_plain, running, task

pytestmark = pytest.mark.usefixtures("captured_once")

TIGHT = {"device_memory": "12KiB", "num_shards": 4}  # of which a trial with AdamW takes more


def long(seed: int = 3, **changes):
    return task(seed=seed, **({"epochs": 12} | changes))


def wait_for_units(pool: HydraExecutor, device: str, count: int, jobs: list[Job]) -> None:
    """Until a device has run so many units; should all jobs be over before, there are as many more of the same."""
    end, tasks = time.monotonic() + PATIENCE_SECONDS, [job.task for job in jobs]
    while pool.stats().devices[device].units < count:
        assert time.monotonic() < end, f"{device} has not run {count} units"
        if all(job.state in OVER for job in jobs):
            jobs += [pool.submit(one) for one in tasks]
        time.sleep(0.002)


def assert_as_plain(jobs: list[Job]) -> None:
    for job in jobs:
        assert against_plain(job.task, job.result(PATIENCE_SECONDS)) == []


@pytest.mark.cases(1)
@pytest.mark.parametrize("options", [{}, TIGHT, {"optimizer_placement": "host"}, {"buffer_fraction": 0.0}])
def test_trials_go_on_elsewhere_with_the_same_numbers(options):
    with running(devices="cpu:3", max_concurrent=4, **options) as pool:
        jobs = [pool.submit(long(seed)) for seed in range(4)]
        wait_for_units(pool, "cpu:1", 10, jobs)
        pool.remove_device("cpu:1")
        stats = pool.stats().devices["cpu:1"]
        units, resident = stats.units, stats.resident_bytes
        assert resident == 0
        assert pool.device_names == ("cpu:0", "cpu:2")
        assert_as_plain(jobs)
        assert pool.stats().devices["cpu:1"].units == units


@pytest.mark.cases(1 / 3)
def test_what_is_on_disk_stays_right(tmp_path):
    with running(devices="cpu:2", host_memory="40KiB", spill_dir=tmp_path, max_concurrent=3, **TIGHT) as pool:
        jobs = [pool.submit(long(seed)) for seed in range(3)]
        wait_for_units(pool, "cpu:0", 10, jobs)
        pool.remove_device("cpu:0")
        assert_as_plain(jobs)


@pytest.mark.parametrize("name", ["cpu:1", "cpu:7"])
def test_a_device_that_is_added_gets_its_part_of_the_work(name):
    """The trials wait at their first reports meanwhile; then the other device waits in a unit until this one has run five."""
    is_added, enough, units = threading.Event(), threading.Event(), []

    @contextmanager
    def counting():
        if is_added.is_set() and threading.current_thread().name == f"hydra-{name}":
            units.append(1)
            if len(units) == 5:
                enough.set()
        elif is_added.is_set():
            assert enough.wait(PATIENCE_SECONDS)
        yield

    with running(devices="cpu:2", max_concurrent=4, instrument=counting) as pool:
        stream = pool.events()
        jobs = [pool.submit(long(seed), events=stream) for seed in range(4)]
        assert {stream.get(PATIENCE_SECONDS).job.key for _ in jobs} == {job.key for job in jobs}
        pool.remove_device("cpu:1")
        pool.add_device(name)
        is_added.set()
        for job in jobs:
            job.proceed()
        while not all(job.state in OVER for job in jobs):
            if isinstance(event := stream.get(PATIENCE_SECONDS), Reported):
                event.job.proceed()
        assert enough.is_set()
        assert sorted(pool.device_names) == ["cpu:0", name]
        assert_as_plain(jobs)


@pytest.mark.parametrize("way", [DATA_PARALLEL, PIPELINED])
def test_a_device_that_helps_a_trial_may_be_taken_away(way):
    with running(devices="cpu:3", num_shards=4) as pool:
        jobs = [pool.submit(long(accumulate=3, parallel=PARALLEL[way]))]
        wait_for_units(pool, "cpu:2", 5, jobs)
        pool.remove_device("cpu:2")
        wait_for_units(pool, "cpu:1", pool.stats().devices["cpu:1"].units + 1, jobs)
        pool.add_device("cpu:2")
        pool.remove_device("cpu:1")
        assert_as_plain(jobs)


@pytest.mark.cases(1 / 3)
def test_devices_that_come_and_go_all_the_time_change_no_bit():
    tasks = [long(seed, epochs=15) for seed in range(3)]
    with running(devices="cpu:3", max_concurrent=3, **TIGHT) as pool:
        jobs = [pool.submit(one) for one in tasks]
        turns = 0
        while turns <= 5 or not all(job.state == "completed" for job in jobs):
            if all(job.state == "completed" for job in jobs):
                jobs += [pool.submit(one) for one in tasks]
            name = f"cpu:{turns % 3}"
            pool.remove_device(name)
            pool.add_device(name)
            turns += 1
            assert all(job.state != "failed" for job in jobs)
        assert_as_plain(jobs)


def test_a_unit_that_runs_is_waited_for():
    inside, go_on = threading.Event(), threading.Event()

    @contextmanager
    def slow():
        if threading.current_thread().name == "hydra-cpu:1":
            inside.set()
            assert go_on.wait(PATIENCE_SECONDS)
        else:
            assert inside.wait(PATIENCE_SECONDS)  # else one device may run both trials, one after the other
        yield

    described = [long(seed) for seed in range(2)]
    with running(devices="cpu:2", instrument=slow) as pool:
        jobs = [pool.submit(one) for one in described]
        assert inside.wait(PATIENCE_SECONDS)
        removal = threading.Thread(target=pool.remove_device, args=("cpu:1",))
        removal.start()
        removal.join(0.2)
        assert removal.is_alive()
        go_on.set()
        removal.join(PATIENCE_SECONDS)
        assert not removal.is_alive()
        assert pool.stats().devices["cpu:1"].units <= 2, "a backward, and its update"
        assert [job.result(PATIENCE_SECONDS).status for job in jobs] == ["completed"] * 2


def test_what_cannot_be_is_refused():
    with running(devices="cpu:2", device_memory="1MiB") as pool:
        with pytest.raises(ConfigError, match="'cpu:5' is not in the pool; its devices are cpu:0, cpu:1"):
            pool.remove_device("cpu:5")
        with pytest.raises(ConfigError, match="'cpu:0' is in the pool already"):
            pool.add_device("cpu:0")
        with pytest.raises(ConfigError, match="a device's name is like"):
            pool.add_device("cpu")
        pool.remove_device("cpu:0")
        with pytest.raises(ConfigError, match="'cpu:0' is not in the pool"):
            pool.remove_device("cpu:0")
        with pytest.raises(ConfigError, match="'cpu:1' is the pool's only device; add another one first"):
            pool.remove_device("cpu:1")
        if not torch.cuda.is_available():
            with pytest.raises(ConfigError, match="no GPU is visible"):
                pool.add_device("cuda:0")
    with pytest.raises(HydraTuneError, match="is shut down"):
        pool.add_device("cpu:0")


def test_a_trials_own_code_cannot_take_its_device_away():
    pool = HydraExecutor(devices="cpu:2")
    with pool:
        result = pool.submit(task(train=partial(removing, pool))).result(PATIENCE_SECONDS)
    assert result.status == "failed"
    assert "was called by a trial's own code" in str(result.error)


def removing(pool: HydraExecutor):
    yield torch.zeros(2, 8), torch.zeros(2, dtype=torch.long)
    pool.remove_device("cpu:0")


def test_the_event_log_knows_of_devices_that_were_added(tmp_path):
    path = tmp_path / "run.jsonl"
    with running(devices="cpu:1", event_log=path) as pool:
        job = pool.submit(long())
        pool.add_device("cpu:3")
        pool.remove_device("cpu:0")
        assert job.result(PATIENCE_SECONDS).status == "completed"
    assert set(read_log(path).budgets) == {"cpu:0", "cpu:3"}


def test_a_device_is_added_again_only_when_its_last_worker_has_ended(monkeypatch):
    """The old worker still gives up the device's blocks when no unit runs there any more; a second one would do so, too."""
    empties, go_on, empty = threading.Event(), threading.Event(), Pager.empty

    def held(self, *arguments, **keywords):
        empties.set()
        assert go_on.wait(PATIENCE_SECONDS)
        return empty(self, *arguments, **keywords)

    with running(devices="cpu:2") as pool:
        monkeypatch.setattr(Pager, "empty", held)
        removal = threading.Thread(target=pool.remove_device, args=("cpu:1",))
        removal.start()
        assert empties.wait(PATIENCE_SECONDS)
        with pytest.raises(ConfigError, match="'cpu:1' is in the pool already"):
            pool.add_device("cpu:1")
        go_on.set()
        removal.join(PATIENCE_SECONDS)
        assert not removal.is_alive()
        pool.add_device("cpu:1")
        assert pool.device_names == ("cpu:0", "cpu:1")
