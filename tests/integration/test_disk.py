"""Trials whose state is several times host memory: the rest goes to disk and comes back, and no number changes by one bit."""

import gc
import itertools
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from hydra_tune import HydraExecutor, Reported, TrainTask, train_plain
from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.devices.hardware import discovery
from hydra_tune.errors import BudgetError, SpillError
from hydra_tune.memory.block import Block, BlockKind, TensorBlock
from tests.parity.exact import differences, without_seconds
from tests.support.forked import Forked, forked, run_code

pytestmark = pytest.mark.usefixtures("captured_once")

WIDTH, DEPTH, ROWS = 48, 7, 32
HOST_BYTES = 48 * 1024  # the optimizer state of the largest shard takes 38 KiB
DEVICE_BYTES = 128 * 1024
PATIENCE_SECONDS = 60


def data():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(4 * ROWS, WIDTH, generator=generator), torch.randint(0, 4, (4 * ROWS,), generator=generator)


X, Y = data()


def make_model():
    layers = []
    for _ in range(DEPTH):
        layers += [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 4))


def task(seed=0, **options):
    return TrainTask(
        **{
            "model": make_model,
            "optimizer": partial(torch.optim.AdamW, lr=1e-2),
            "loss": nn.CrossEntropyLoss(),
            "train": lambda: [(X[i : i + ROWS], Y[i : i + ROWS]) for i in range(0, len(X), ROWS)],
            "validate": lambda: [(X[:ROWS], Y[:ROWS])],
            "epochs": 3,
            "seed": seed,
            "scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
        }
        | options
    )


def pool(folder, **options):
    return HydraExecutor(
        **{
            "devices": "cpu:1",
            "device_memory": DEVICE_BYTES,
            "host_memory": HOST_BYTES,
            "spill_dir": folder,
            "num_shards": DEPTH,
            "max_retries": 0,
        }
        | options
    )


def against_plain(plain, result):
    """Where a result differs from the plain loop's."""
    if result.error is not None:
        raise result.error
    found = [*differences(without_seconds(plain.history), without_seconds(result.history), "history")]
    found += differences(dict(plain.state_dict()), dict(result.state_dict()), "state")
    return [*found, *differences(plain.optimizer_state_dict(), result.optimizer_state_dict(), "optimizer")]


def one_thread(function):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return function()
    finally:
        torch.set_num_threads(threads)


def state_bytes():
    plain = train_plain(task(epochs=1))
    kept = [t for entry in plain.optimizer_state_dict()["state"].values() for t in entry.values()]
    return sum(t.nbytes for t in [*plain.state_dict().values(), *kept])


def ours(folder):
    return sorted(folder.glob("hydra-tune-*"))


def files(folder):
    return sorted(folder.glob("hydra-tune-*/block-*.bin"))


def handles():
    found = Path("/proc/self/fd")
    return sum(1 for _ in found.iterdir()) if found.is_dir() else 0


def host_bytes_seen(since):
    """Bytes of the host copies of all blocks but the batches' made after this one, counted by their storages."""
    found = [thing for thing in gc.get_objects() if type(thing) in (Block, TensorBlock)]
    blocks = [block for block in found if block.number > since.number and block.kind is not BlockKind.INPUTS]
    return sum(block.host.untyped_storage().nbytes() for block in blocks if block.host is not None)


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize("devices", [pytest.param("cpu:1", marks=pytest.mark.slow), "cpu:2"])
def test_a_trial_several_times_host_memory_is_exact(tmp_path, devices):
    assert state_bytes() > 4 * HOST_BYTES
    seen, open_now, units, first = [], [], itertools.count(1), Block(BlockKind.INPUTS, 1, 1)

    @contextmanager
    def instrument():
        yield
        if next(units) % 25 == 0:  # looking through all objects takes long
            seen.append(host_bytes_seen(first))
            open_now.append((handles(), [thread.name for thread in threading.enumerate()]))

    with pool(tmp_path, devices=devices, instrument=instrument) as executor:
        (result,) = executor.run([task()])
        disk, devices_stats = executor.stats().disk, executor.stats().devices.values()
    assert against_plain(one_thread(lambda: train_plain(task())), result) == []
    assert sum(device.bytes_ahead for device in devices_stats) > 0, "double buffering goes on with a disk"
    assert sum(device.bytes_in_vain for device in devices_stats) < sum(device.bytes_in for device in devices_stats) / 4
    assert result.num_shards == DEPTH
    settled = open_now[len(open_now) // 3 :]
    counts = [count for count, _ in settled]
    assert max(counts) <= min(counts) + 1, "the disk's thread has one file open at a time"
    for _, names in settled:  # a device's threads begin when there is something to do for them
        ours_now = [name for name in names if name.startswith("hydra-")]
        assert len(ours_now) == len(set(ours_now)), "there is one of each kind"
    assert 0 < max(seen) <= HOST_BYTES, "host copies that went to disk must really be gone"
    assert disk.bytes_read > 2 * state_bytes()
    assert disk.bytes_written > state_bytes()
    assert disk.stored_bytes == 0, "a completed trial leaves nothing on disk"
    assert ours(tmp_path) == []


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_delays_of_copies_in_the_background_change_no_bit(tmp_path, monkeypatch, seed):
    """Late or early, what is sent ahead, written back and read from disk meanwhile are the same bytes."""
    drawn = random.Random(seed)

    class Delayed(CpuDevice):
        def _send(self, pairs, *, is_waited_for):
            if not is_waited_for:
                time.sleep(drawn.choice([0, 0, 1e-4, 2e-3]))
            super()._send(pairs, is_waited_for=is_waited_for)

    monkeypatch.setattr(discovery, "CpuDevice", Delayed)
    tasks = [task(seed, epochs=2), task(seed + 1, epochs=2, max_grad_norm=0.5)]
    with pool(tmp_path, devices="cpu:2", max_concurrent=2) as executor:
        results = executor.run(tasks)
        devices = executor.stats().devices.values()
        assert executor._pool._host.ledger.used_bytes == 0
    for described, result in zip(tasks, results, strict=True):
        assert against_plain(one_thread(lambda d=described: train_plain(d)), result) == []
    assert sum(device.bytes_ahead for device in devices) > 0
    assert all(device.resident_bytes == 0 and device.peak_bytes <= device.budget_bytes for device in devices)


@pytest.mark.slow
def test_trials_share_host_memory_and_disk(tmp_path):
    with pool(tmp_path, devices="cpu:2", max_concurrent=4) as executor:
        results = executor.run([task(seed) for seed in range(4)])
        assert files(tmp_path) == []
    for seed, result in enumerate(results):
        assert against_plain(one_thread(lambda s=seed: train_plain(task(s))), result) == []
    assert ours(tmp_path) == []


@pytest.mark.cases(1 / 3)
def test_batches_side_by_side_read_what_is_on_disk(tmp_path):
    def make():  # without BatchNorm, whose batches depend on each other
        layers = [part for _ in range(DEPTH) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.2))]
        return nn.Sequential(*layers, nn.Linear(WIDTH, 4))

    accumulating = partial(task, model=make, accumulate=4, epochs=6)
    with pool(tmp_path, devices="cpu:2", host_memory=2 * HOST_BYTES) as executor:
        (result,) = executor.run([accumulating()])
        stats = executor.stats()
        assert executor._pool._host.ledger.used_bytes == 0
    assert against_plain(one_thread(lambda: train_plain(accumulating())), result) == []
    assert all(device.units > 0 for device in stats.devices.values()), "no device has helped"
    assert stats.disk.bytes_read > state_bytes()


def test_a_pruned_trial_leaves_the_disk_at_once_and_others_stay(tmp_path):
    with pool(tmp_path, max_concurrent=2) as executor:
        stream = executor.events()
        jobs = [executor.submit(task(seed), events=stream) for seed in range(2)]
        reported = {stream.get(PATIENCE_SECONDS).job.name for _ in jobs}
        assert reported == {job.name for job in jobs}, "both wait at their first report"
        before, disk = files(tmp_path), executor.stats().disk
        assert disk.stored_bytes == sum(path.stat().st_size for path in before) > state_bytes()
        assert {stat.S_IMODE(path.stat().st_mode) for path in before} == {0o600}
        assert [stat.S_IMODE(path.stat().st_mode) for path in ours(tmp_path)] == [0o700]
        jobs[0].prune()
        jobs[0].result(PATIENCE_SECONDS)
        assert 0 < len(files(tmp_path)) < len(before)
        jobs[1].prune()
        jobs[1].result(PATIENCE_SECONDS)
        assert files(tmp_path) == []
        assert executor.stats().disk.stored_bytes == 0
        assert executor._pool._host.ledger.used_bytes == 0
    assert ours(tmp_path) == []


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize("width", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_trial_whose_files_cannot_be_read_fails_alone(tmp_path, width):
    with pool(tmp_path, max_concurrent=width) as executor:
        stream = executor.events()
        broken, other = executor.submit(task(0), events=stream), executor.submit(task(1))
        assert stream.get(PATIENCE_SECONDS).job is broken
        for number in {block.number for block in executor._pool._records[broken.key].trial.state._blocks()}:
            for path in tmp_path.glob(f"hydra-tune-*/block-{number}.bin"):
                path.unlink()
        broken.proceed()
        error = broken.result(PATIENCE_SECONDS).error
        assert isinstance(error, SpillError)
        assert error.errno == 2
        assert error.path in str(error)
        done = other.result(PATIENCE_SECONDS)  # before the plain loop, which draws from the process's one generator
        assert against_plain(one_thread(lambda: train_plain(task(1))), done) == []
        assert executor.stats().devices["cpu:0"].resident_bytes == 0
        assert executor._pool._host.ledger.used_bytes == 0


@pytest.mark.cases(1 / 3)
def test_a_trial_whose_files_cannot_be_read_begins_again(tmp_path):
    with pool(tmp_path, max_retries=1) as executor:
        stream = executor.events()
        broken = executor.submit(task(0), events=stream)
        assert stream.get(PATIENCE_SECONDS).job is broken
        for number in {block.number for block in executor._pool._records[broken.key].trial.state._blocks()}:
            for path in tmp_path.glob(f"hydra-tune-*/block-{number}.bin"):
                path.unlink()
        steps = []
        broken.proceed()
        while isinstance(event := stream.get(PATIENCE_SECONDS), Reported):
            steps.append(event.step)
            broken.proceed()
        assert steps == [1, 2], "of the first report the driver has been told, and has answered"
        assert [fault.split(":")[0] for fault in event.result.faults] == ["SpillError"]
        assert executor._pool._host.ledger.used_bytes == 0
    assert against_plain(one_thread(lambda: train_plain(task(0))), event.result) == []


@pytest.mark.cases(1 / 3)
def test_a_trial_whose_copies_the_disk_refuses_fails_by_name_when_another_needs_the_room(tmp_path):
    with pool(tmp_path, max_concurrent=2) as executor:
        stream = executor.events()
        refused = executor.submit(task(0), events=stream)
        assert stream.get(PATIENCE_SECONDS).job is refused
        (folder,) = ours(tmp_path)
        for block in executor._pool._records[refused.key].trial.state._blocks():
            path = folder / f"block-{block.number}.bin"
            path.unlink(missing_ok=True)
            path.mkdir()
        other = executor.submit(task(1))
        error = refused.result(PATIENCE_SECONDS).error  # though it only waits at its report
        assert isinstance(error, SpillError)
        assert error.errno == 21
        assert error.path.startswith(str(folder))
        assert error.path in str(error)
        done = other.result(PATIENCE_SECONDS)  # before the plain loop, which draws from the process's one generator
        assert against_plain(one_thread(lambda: train_plain(task(1))), done) == []
        assert executor.stats().devices["cpu:0"].resident_bytes == 0
        assert executor._pool._host.ledger.used_bytes == 0
        for left in folder.glob("block-*"):
            left.rmdir()


class ReadsWeights(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler of the user's own that looks at all weights between two units."""

    def get_lr(self):
        largest = max(float(p.detach().abs().max()) for group in self.optimizer.param_groups for p in group["params"])
        return [1e-3 * largest for _ in self.optimizer.param_groups]


@pytest.mark.cases(1 / 3)
def test_code_that_looks_at_weights_on_disk_sees_them(tmp_path):
    reading = partial(task, scheduler=ReadsWeights, scheduler_interval="step")
    with pool(tmp_path, device_memory=80 * 1024) as executor:
        (result,) = executor.run([reading()])
    assert against_plain(one_thread(lambda: train_plain(reading())), result) == []


def test_without_a_spill_dir_the_refusal_names_it(tmp_path):
    with pool(tmp_path, spill_dir=None) as executor:
        (result,) = executor.run([task()], on_error="return")
        assert executor.stats().disk is None
    assert isinstance(result.error, BudgetError)
    assert "host_memory to at least" in str(result.error)
    assert "spill_dir" in str(result.error)
    assert result.units_run == 0


def test_a_shard_larger_than_host_memory_is_refused_before_training(tmp_path):
    with pool(tmp_path, host_memory=20 * 1024) as executor:
        (result,) = executor.run([task()], on_error="return")
    assert isinstance(result.error, BudgetError)
    assert "one shard needs 37.9 KiB of host memory at once, more than the 20.0 KiB" in str(result.error)
    assert result.units_run == 0
    assert ours(tmp_path) == []


LIMITED = """
import resource, sys, pathlib
from tests.integration.test_disk import *
folder = pathlib.Path(sys.argv[1])
small = partial(task, model=lambda: nn.Sequential(nn.Linear(WIDTH, 32), nn.Dropout(0.1), nn.Linear(32, 32), nn.Linear(32, 4)))
expected = one_thread(lambda: train_plain(small()))
resource.setrlimit(resource.RLIMIT_FSIZE, (16 * 1024, resource.RLIM_INFINITY))
with pool(folder, num_shards='layer', max_concurrent=2) as executor:
    jobs = [executor.submit(task(), name="large"), executor.submit(small(), name="small")]
    large, other = (job.result(60) for job in jobs)
    assert isinstance(large.error, SpillError), large.error
    assert large.error.errno in (27, 28), large.error.errno
    assert large.error.path.startswith(str(folder)) and large.error.path in str(large.error), large.error
    assert against_plain(expected, other) == []
    assert files(folder) == []
    assert executor._pool._host.ledger.used_bytes == 0
    assert executor.stats().devices["cpu:0"].resident_bytes == 0
print("as expected")
"""


def run_python(code, *arguments, before=(), **options):
    return subprocess.Popen(
        [*before, sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        **options,
    )


@pytest.mark.cases(1 / 3)
def test_a_disk_that_takes_no_more_fails_that_trial_and_no_other(tmp_path):
    done = forked(run_code, LIMITED, tmp_path)
    assert done.stdout.strip().endswith("as expected"), done


FULL = """
import os, sys, pathlib, subprocess
from tests.integration.test_disk import *
folder = pathlib.Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=66m,mode=700", "tmpfs", folder], check=True)
small = partial(task, model=lambda: nn.Sequential(nn.Linear(WIDTH, 32), nn.Dropout(0.1), nn.Linear(32, 4)))
expected = one_thread(lambda: train_plain(small()))
units, fills = itertools.count(), []

@contextmanager
def instrument():
    yield
    if fills and next(units) == 3:
        with open(folder / "somebody else's", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError as error:
                fills.append(error.errno)

with pool(folder, num_shards="layer", max_concurrent=2, instrument=instrument) as executor:
    stream = executor.events()
    other = executor.submit(small(), events=stream)
    assert stream.get(60).job is other
    fills.append(0)
    large = executor.submit(task()).result(120).error
    assert fills == [0, 28], fills
    assert isinstance(large, SpillError), large
    assert large.errno == 28 and large.path.startswith(str(folder)) and large.path in str(large), large
    while other.state not in ("completed", "failed"):
        other.proceed()
        event = stream.get(60)
    assert against_plain(expected, other.result(60)) == []
    assert files(folder) == []
    assert executor._pool._host.ledger.used_bytes == 0
print("as expected")
"""


@pytest.mark.slow  # of other ways in which a file may grow no more the one above is in every run
def test_a_full_file_system_fails_the_trial_that_fills_it(tmp_path):
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs a mount of its own")
    process = run_python(FULL, tmp_path, before=unshare)
    output, _ = process.communicate(timeout=4 * PATIENCE_SECONDS)
    assert output.strip().endswith("as expected"), output


ENDLESS = """
import sys, pathlib
from tests.integration.test_disk import *
with pool(pathlib.Path(sys.argv[1])) as executor:
    executor.run([task(epochs=100_000)])
"""


def test_what_a_killed_process_leaves_is_removed_at_the_next_start(tmp_path):
    with Forked(run_code, ENDLESS, tmp_path) as process:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(files(tmp_path)) < DEPTH and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        alive = ours(tmp_path)
        with pool(tmp_path):
            assert set(alive) < set(ours(tmp_path)), "of a process that lives nothing is removed"
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=PATIENCE_SECONDS)
    assert ours(tmp_path) == alive
    assert files(tmp_path)
    (tmp_path / "hydra-tune-notes").mkdir()
    (tmp_path / "results.bin").write_text("somebody else's")
    with pool(tmp_path):
        assert alive[0] not in ours(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hydra-tune-notes", "results.bin"]
