"""Pools that Ctrl-C, the loss of a device, a breakdown or the shutdown meets at a bad moment: nobody waits for ever."""

import signal
import threading
from concurrent.futures import Future
from contextlib import contextmanager

import pytest
from torch.utils.data import DataLoader, Dataset

from hydra_tune import HydraExecutor, Reported
from hydra_tune.checkpoint.folder import CheckpointFolder
from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.errors import CheckpointError, DeviceLostError
from hydra_tune.pool.checkpointing.writer import PoolCheckpointWriter
from hydra_tune.pool.devices.host_admission import has_room
from hydra_tune.schedule.policies.lrtf import ShardedLRTF
from tests.support.losable import OPENED, LosableDevice, losable
from tests.unit.pool.tasks import PATIENCE_SECONDS, Held, X, Y, against_plain, one_batch, running, short, task, until

pytestmark = pytest.mark.timeout(280)


@pytest.fixture
def devices(monkeypatch):
    return losable(monkeypatch)


@pytest.fixture
def held():
    """Holds all units until it is let go."""
    instrument = Held()
    yield instrument
    instrument.go()


def in_time(call):
    """What a call that takes no limit of time returns, from a thread of its own."""
    told = Future()

    def run():
        try:
            told.set_result(call())
        except BaseException as error:  # noqa: BLE001 - it is raised below
            told.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive(), "the call does not end"
    return told.result(0)


def workers(device):
    """The threads that work for a device."""
    return [thread for thread in threading.enumerate() if thread.name == f"hydra-{device}"]


def test_a_checkpoint_may_be_asked_for_after_the_shutdown(tmp_path):
    with running(checkpoint_dir=tmp_path) as pool:
        job = pool.submit(short())
        result = job.result(PATIENCE_SECONDS)
    assert in_time(job.checkpoint) == result.checkpoint


def never_built():
    raise RuntimeError("a mistake of the trial's own")


class Once:
    """Batches for one epoch; a second one raises."""

    def __init__(self):
        self.passes = 0

    def __call__(self):
        self.passes += 1
        if self.passes > 1:
            raise RuntimeError("a mistake of the trial's own")
        yield from one_batch()


@pytest.mark.parametrize("when", ["preparing", "running"])
def test_a_trials_own_error_is_not_blamed_on_a_device_lost_before(devices, when):
    with running(devices="cpu:2", max_retries=2) as pool:
        stream = pool.events()
        job = pool.submit(short(train=Once()), events=stream)
        assert isinstance(stream.get(PATIENCE_SECONDS), Reported)
        name = next(name for name, stats in pool.stats().devices.items() if not stats.units)
        devices[int(name.removeprefix("cpu:"))].lose_at(0)
        pool.remove_device(name)  # whose worker finds the loss
        until(lambda: not workers(name))
        if when == "preparing":
            job.prune()
            job = pool.submit(short(model=never_built))
        else:
            job.proceed()
        result = job.result(PATIENCE_SECONDS)
    assert isinstance(result.error, RuntimeError)
    assert not isinstance(result.error, DeviceLostError)
    assert "a mistake of the trial's own" in str(result.error)
    assert (result.retries, result.faults) == (0, ())


def test_a_breakdown_answers_whoever_waits_for_a_checkpoint(devices, held, tmp_path):
    with running(max_concurrent=1, checkpoint_dir=tmp_path, instrument=held) as pool:
        jobs = [pool.submit(short(), name=name) for name in ("first", "second")]
        until(lambda: jobs[0].state == "running")
        assert jobs[1].state == "queued"
        asked = [pool._pool.save(job) for job in jobs]  # what `Job.checkpoint` waits for
        devices[0].lose_at(0)
        held.go()
        for job, one in zip(jobs, asked, strict=True):
            assert isinstance(job.result(PATIENCE_SECONDS).error, DeviceLostError)
            with pytest.raises(CheckpointError, match=rf"{job.name}'? is over \(failed\) and was not saved before"):
                one.result(PATIENCE_SECONDS)
            with pytest.raises(CheckpointError):
                in_time(job.checkpoint)


def test_ctrl_c_while_a_driver_writes_a_checkpoint_leaves_the_next_trial_its_turn(monkeypatch, tmp_path):
    write, pressed = CheckpointFolder.write, []

    def pressing(self, saved):
        if threading.current_thread() is threading.main_thread() and not pressed:
            pressed.append(self.path)
            signal.raise_signal(signal.SIGINT)
        write(self, saved)

    # As on a host short of memory: a state is written by the thread that asks for it, without a copy.
    monkeypatch.setattr(PoolCheckpointWriter, "room", lambda self, nbytes: None)
    monkeypatch.setattr(CheckpointFolder, "write", pressing)
    with running(checkpoint_dir=tmp_path) as pool:
        stream = pool.events()
        job = pool.submit(short(), events=stream)
        assert isinstance(stream.get(PATIENCE_SECONDS), Reported)
        with pytest.raises(KeyboardInterrupt):
            job.checkpoint(PATIENCE_SECONDS)
        assert len(pressed) == 1
        job.prune()
        assert job.result(PATIENCE_SECONDS).status == "pruned"
        following = pool.submit(short(seed=1)).result(PATIENCE_SECONDS)
        assert following.status == "completed"
        assert following.checkpoint is not None


def test_a_breakdown_lets_go_of_a_trial_that_waits_for_host_memory(devices, held, monkeypatch, tmp_path):
    waits = threading.Event()

    def looked(record, *others):
        found = has_room(record, *others)
        if not found:
            waits.set()
        return found

    # So much of each trial cannot go to disk; the host has room for one.
    for module in ("hydra_tune.train.trial_figures", "hydra_tune.train.state.host_quota"):
        monkeypatch.setattr(f"{module}.fixed_bytes", lambda plan: 600 * 1024)
    monkeypatch.setattr("hydra_tune.pool.runtime.preparer.has_room", looked)
    with running(max_concurrent=2, host_memory="1MiB", spill_dir=tmp_path, instrument=held) as pool:
        first = pool.submit(short())
        until(lambda: first.state == "running")
        second = pool.submit(short(seed=1))
        assert waits.wait(PATIENCE_SECONDS)
        devices[0].lose_at(0)
        held.go()
        for job in (first, second):
            assert isinstance(job.result(PATIENCE_SECONDS).error, DeviceLostError)


class Hanging(Dataset):
    """Samples of which one hangs, the first time that it is drawn, until it is let go."""

    def __init__(self):
        self.reached, self.opened, self.thread = threading.Event(), threading.Event(), None

    def __len__(self):
        return 24

    def __getitem__(self, index):
        if index == 12 and self.thread is None:
            self.thread = threading.current_thread()
            self.reached.set()
            assert self.opened.wait(PATIENCE_SECONDS)
        return X[index], Y[index]


@pytest.fixture
def samples():
    made = Hanging()
    yield made
    made.opened.set()


@pytest.mark.cases(1 / 3)
def test_a_thread_back_from_a_loader_to_a_lost_device_fails_no_other_trial(devices, samples, monkeypatch):
    worker = LosableDevice.worker

    @contextmanager
    def synchronizing(self):
        """As a GPU does at its worker's end."""
        with worker(self):
            yield
            self.synchronize()

    monkeypatch.setattr(LosableDevice, "worker", synchronizing)
    with running(devices="cpu:2", max_concurrent=2, max_retries=1) as pool:
        stream = pool.events()
        other = pool.submit(task(), events=stream)
        assert isinstance(stream.get(PATIENCE_SECONDS), Reported)
        slow = pool.submit(task(train=DataLoader(samples, batch_size=8), batch_size=None, seed=4))
        assert samples.reached.wait(PATIENCE_SECONDS)
        device = samples.thread.name.removeprefix("hydra-")
        until(lambda: len(workers(device)) == 2)  # the trial has left its device, which another thread works for
        slow.pause()  # so that no unit finds the loss first
        devices[int(device.removeprefix("cpu:"))].lose_at(0)
        samples.opened.set()
        samples.thread.join(PATIENCE_SECONDS)
        assert not samples.thread.is_alive()
        until(lambda: device not in pool.device_names)
        assert len(pool.device_names) == 1
        slow.unpause()
        other.proceed()
        while isinstance(stream.get(PATIENCE_SECONDS), Reported):
            other.proceed()
        for job in (slow, other):
            assert against_plain(job.task, job.result(PATIENCE_SECONDS)) == []
        assert pool.submit(short()).result(PATIENCE_SECONDS).status == "completed"


class Unready(ShardedLRTF):
    """A policy that cannot be used at first."""

    is_ready = False

    def start(self):
        if not self.is_ready:
            raise RuntimeError("not ready")
        return super().start()


def test_a_pool_that_cannot_start_leaves_no_device_open_and_no_folder_locked(monkeypatch, tmp_path):
    closed = []

    class Device(CpuDevice):
        def close(self):
            closed.append(self.name)
            super().close()

    monkeypatch.setattr(OPENED, Device)
    pool = HydraExecutor(devices="cpu:2", policy=Unready(), spill_dir=tmp_path)
    with pytest.raises(RuntimeError, match="not ready"):
        pool.submit(short())
    assert sorted(closed) == ["cpu:0", "cpu:1"]
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(Unready, "is_ready", True)
    with pool:
        assert pool.submit(short()).result(PATIENCE_SECONDS).status == "completed"
