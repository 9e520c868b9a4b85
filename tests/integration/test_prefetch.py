"""Double buffering in the running pool: what is sent ahead, and when it comes, changes times and nothing else."""

import gc
import random
import threading
import time
from collections import Counter

import pytest
import torch
from torch import nn

from hydra_tune import Reported
from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.devices.hardware import discovery
from hydra_tune.memory.prefetch import BlockPrefetcher
from hydra_tune.observe.event_log.reader import read_log
from hydra_tune.train.loop import burst
from tests.support.tracker import StorageTracker
from tests.unit.pool.tasks import PATIENCE_SECONDS, Held, against_plain, running, task, until

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("captured_once")]
TIGHT = {"devices": "cpu:2", "num_shards": 3, "device_memory": "8KiB", "max_concurrent": 3}
LOSSES = {"accumulate": 2}, {"max_grad_norm": 0.1}, {}


class Hooked(CpuDevice):
    """Calls `hook` on the copy thread before each copy in the background."""

    hook = staticmethod(lambda device: None)

    def _send(self, pairs, *, is_waited_for):
        if not is_waited_for:
            type(self).hook(self)
        super()._send(pairs, is_waited_for=is_waited_for)

    def _take(self, source, pairs, *, is_waited_for):
        if not is_waited_for:
            type(self).hook(self)
        super()._take(source, pairs, is_waited_for=is_waited_for)


@pytest.fixture
def hooked(monkeypatch):
    """Sets what happens before each copy in the background of every CPU device that is opened."""

    def set_hook(hook):
        monkeypatch.setattr(discovery, "CpuDevice", type("Hooked", (Hooked,), {"hook": staticmethod(hook)}))

    return set_hook


def devices_of(pool):
    return pool.stats().devices.values()


def run(tasks, **options):
    with running(**(TIGHT | options)) as pool:
        results = [job.result(PATIENCE_SECONDS) for job in [pool.submit(one) for one in tasks]]
    return results, pool.stats().devices.values()


@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_delays_on_the_copy_thread_change_no_bit(hooked, seed):
    """Late, early, or in an order of their own: losses, weights and optimizer state are those of a plain loop."""
    drawn = random.Random(seed)
    hooked(lambda device: None if seed is None else time.sleep(drawn.choice([0, 0, 1e-4, 2e-3])))
    tasks = [task(epochs=2, **changes) for changes in LOSSES]
    results, devices = run(tasks, device_memory="11KiB")
    for described, result in zip(tasks, results, strict=True):
        assert against_plain(described, result) == []
    assert sum(device.bytes_ahead for device in devices) > 0
    for device in devices:
        assert device.peak_bytes <= device.budget_bytes
        assert device.resident_bytes == 0
        assert 0 <= device.bytes_in_vain <= device.bytes_ahead <= device.bytes_in + device.bytes_across
        assert 0 <= device.overlap <= 1


@pytest.mark.cases(1)
@pytest.mark.parametrize("policy", ["random", "fair", "lpt"])
def test_whatever_is_guessed_the_numbers_are_the_same(policy):
    tasks = [task(epochs=2, seed=seed) for seed in range(3)]
    results, _ = run(tasks, policy=policy)
    for described, result in zip(tasks, results, strict=True):
        assert against_plain(described, result) == []


@pytest.mark.cases(1 / 3)
def test_an_independent_tracker_sees_the_budget_kept_though_all_copies_are_late(hooked):
    hooked(lambda device: time.sleep(1e-3))
    tracker = StorageTracker()
    results, devices = run([task(seed=seed) for seed in range(3)], instrument=tracker)
    assert [result.error for result in results] == [None] * 3
    assert sum(device.bytes_ahead for device in devices) > 0
    assert max(tracker.peak_bytes) <= 8 * 1024
    del results
    gc.collect()
    assert tracker.current_bytes == 0


def test_no_buffer_and_nothing_is_sent_ahead():
    results, devices = run([task(seed=seed) for seed in range(3)], buffer_fraction=0)
    assert [result.error for result in results] == [None] * 3
    assert sum(device.bytes_in for device in devices) > 0
    assert {device.bytes_ahead for device in devices} == {0}


def test_where_everything_fits_nothing_is_sent_ahead():
    results, devices = run([task(seed=seed) for seed in range(3)], device_memory="4MiB")
    assert [result.error for result in results] == [None] * 3
    assert {device.bytes_ahead for device in devices} == {0}


@pytest.mark.cases(1)
@pytest.mark.parametrize("device_memory", [None, "24KiB"])
def test_what_is_on_another_device_is_sent_ahead(tmp_path, device_memory):
    """Three trials on two devices, behind links and with the same turns: their shards change devices.

    No unit begins before all three are ready. A trial that ends before the next one is submitted shares no device.
    """
    tasks, held = [task(epochs=4, seed=seed) for seed in range(3)], Held()
    options = {"device_memory": device_memory, "link_bandwidth": "20MB/s", "event_log": tmp_path / "log"}
    with running(**(TIGHT | options), instrument=held) as pool:
        jobs = [pool.submit(one) for one in tasks]
        until(lambda: {job.state for job in jobs} == {"running"})
        held.go()
        results = [job.result(PATIENCE_SECONDS) for job in jobs]
    devices = devices_of(pool)
    for described, result in zip(tasks, results, strict=True):
        assert against_plain(described, result) == []
    across = Counter()
    for copy in read_log(tmp_path / "log").copies:
        if copy.what == "across":
            across[copy.how] += copy.nbytes
    assert across["background"] > 0
    assert sum(across.values()) == sum(device.bytes_across for device in devices)
    for device in devices:
        assert device.peak_bytes <= device.budget_bytes
        assert device.resident_bytes == 0


class ClockOfSteps(threading.local):
    """Each thread's looks at it are 6 ms apart."""

    looks = 0

    def perf_counter(self):
        self.looks += 1
        return 0.006 * self.looks


def whole(seed):
    """A trial of 240 KiB of state, which runs its own code in bursts; few steps make one."""
    width = 64
    layers = [layer for _ in range(4) for layer in (lambda: nn.Linear(width, width), nn.ReLU)]
    inputs = torch.randn(1600, width, generator=torch.Generator().manual_seed(7))
    return task(
        model=lambda: nn.Sequential(*[layer() for layer in layers]),
        train=torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(dim=1)),
        seed=seed,
    )


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize(("devices", "num_trials", "share"), [("cpu:1", 3, 0.5), ("cpu:2", 5, 0.1)])
def test_trials_in_bursts_that_do_not_all_fit_load_the_next_ones_state_while_the_present_one_computes(
    devices, num_trials, share, monkeypatch
):
    """There is room for two: the one that has had its turn is written back beside the next, and gives its room then.

    Bursts are of eight steps each, and what is written back beside one is there at the end of a step.
    """
    go_on = BlockPrefetcher.go_on

    def waiting(prefetch):
        for copy in prefetch._awaited:
            copy.wait_quietly()
        go_on(prefetch)

    monkeypatch.setattr(BlockPrefetcher, "go_on", waiting)
    monkeypatch.setattr(burst, "time", ClockOfSteps())
    tasks = [whole(seed) for seed in range(num_trials)]
    results, devices = run(
        tasks,
        devices=devices,
        num_shards=None,
        device_memory="640KiB",
        link_bandwidth="100MB/s",
        policy="round_robin",
        max_concurrent=num_trials,
    )
    for described, result in zip(tasks, results, strict=True):
        assert against_plain(described, result) == []
    loaded = sum(device.bytes_in + device.bytes_across for device in devices)
    ahead = sum(device.bytes_ahead for device in devices)
    assert ahead > share * loaded
    for device in devices:
        assert device.peak_bytes <= device.budget_bytes
        assert device.resident_bytes == 0


class Gate:
    """Stops the copies in the background, once `shut`, until it is opened."""

    def __init__(self):
        self.is_shut = False
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, device):
        if self.is_shut:
            self.reached.set()
            assert self.opened.wait(PATIENCE_SECONDS)


@pytest.mark.parametrize("end", ["prune", "cancel"])
def test_a_job_that_ends_while_its_bytes_are_on_their_way_gives_them_back(hooked, end):
    gate = Gate()
    hooked(gate)
    with running(**(TIGHT | {"devices": "cpu:1"})) as pool:
        jobs = [pool.submit(task(epochs=20_000, seed=seed)) for seed in range(2)]
        other = pool.submit(task(epochs=2))
        gate.is_shut = True
        assert gate.reached.wait(PATIENCE_SECONDS)
        for job in jobs:
            getattr(job, end)()
        threading.Timer(0.05, gate.opened.set).start()
        statuses = [job.result(PATIENCE_SECONDS).status for job in jobs]
        assert statuses == ["pruned" if end == "prune" else "cancelled"] * 2
        assert against_plain(task(epochs=2), other.result(PATIENCE_SECONDS)) == []
        (device,) = devices_of(pool)
        assert device.resident_bytes == 0
        assert device.peak_bytes <= device.budget_bytes


def test_a_shutdown_ends_though_bytes_are_on_their_way(hooked):
    gate = Gate()
    hooked(gate)
    with running(**TIGHT) as pool:
        for seed in range(3):
            pool.submit(task(epochs=20_000, seed=seed))
        gate.is_shut = True
        assert gate.reached.wait(PATIENCE_SECONDS)
        threading.Timer(0.05, gate.opened.set).start()
    assert {device.resident_bytes for device in devices_of(pool)} == {0}


def test_a_copy_that_fails_in_the_background_fails_its_own_trial_at_most(hooked):
    """Write-backs are made again when the room is needed; a load fails the trial that came for it. The others go on."""
    failed = []

    def fail_once(device):
        if not failed and threading.current_thread().name.startswith("hydra-ahead"):
            failed.append(True)
            raise OSError("the link was down for a moment")

    hooked(fail_once)
    tasks = [task(epochs=3, seed=seed) for seed in range(3)]
    results, devices = run(tasks)
    assert failed
    errors = [result.error for result in results if result.error is not None]
    assert len(errors) <= 1
    assert all("the link was down" in str(error) for error in errors)
    for described, result in zip(tasks, results, strict=True):
        assert result.status == "failed" or against_plain(described, result) == []
    assert {device.resident_bytes for device in devices} == {0}


def test_pruning_at_reports_in_a_tight_pool_leaves_the_others_exact():
    described = task(epochs=4, report_every=1)
    with running(**TIGHT) as pool:
        stream = pool.events()
        jobs = [pool.submit(described, events=stream) for _ in range(4)]
        reports, left = 0, len(jobs)
        while left:
            event = stream.get(PATIENCE_SECONDS)
            assert event is not None
            if not isinstance(event, Reported):
                left -= 1
                continue
            reports += 1
            if event.job in jobs[:2] and event.step >= 2:
                event.job.prune()
            else:
                event.job.proceed()
    assert [job.result().status for job in jobs] == ["pruned", "pruned", "completed", "completed"]
    for job in jobs[2:]:
        assert against_plain(described, job.result()) == []
