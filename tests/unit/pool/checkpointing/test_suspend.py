"""Jobs are saved where they are and ended; one that hangs keeps no other from it."""

import contextlib
import signal
import threading
from types import SimpleNamespace

import pytest
import torch

from hydra_tune import HydraExecutor
from hydra_tune.checkpoint.folder import generations
from hydra_tune.errors import CheckpointError, ConfigError
from hydra_tune.interrupts import Terminated
from hydra_tune.pool.checkpointing import suspend
from hydra_tune.pool.job import OVER
from tests.unit.pool.tasks import PATIENCE_SECONDS, against_plain, running, task, until

BATCH = torch.ones(2, 8), torch.zeros(2).long()


class Gate:
    """Data whose batches after the first wait until they are let go."""

    def __init__(self):
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self):
        yield BATCH
        self.reached.set()
        assert self.go_on.wait(PATIENCE_SECONDS)
        yield BATCH


def test_each_is_saved_at_the_end_of_its_step_and_goes_on_with_the_same_bits(tmp_path):
    epochs = 100_000
    described = task(epochs=epochs)
    with running(devices="cpu:2", max_concurrent=2, checkpoint_dir=tmp_path) as pool:
        waiting = pool.submit(task(report_every=1), "waiting", pool.events())
        until(lambda: waiting.state == "waiting")  # and has left its place to the third
        jobs = [pool.submit(described, f"trial {number}") for number in range(2)]
        until(lambda: all(job.progress.step for job in jobs))
        queued = pool.submit(task(), "queued")
        pool.suspend(seconds=PATIENCE_SECONDS)
        results = [job.result(PATIENCE_SECONDS) for job in (*jobs, waiting, queued)]
        assert [result.status for result in results] == ["cancelled"] * 4
        assert [result.checkpoint is not None for result in results] == [True, True, True, False]
        steps = [pool.find_checkpoint(job.name).steps for job in jobs]
        assert pool.find_checkpoint("waiting").steps == 1
        assert not pool.has_checkpoint("queued")
    with running(checkpoint_dir=tmp_path) as pool:
        found = pool.find_checkpoint("waiting")
        assert (
            against_plain(task(report_every=1), pool.submit(task(report_every=1), resume_from=found.path).result())
            == []
        )
    assert all(0 < count < 3 * epochs for count in steps)


def test_one_that_is_paused_within_a_step_is_saved_at_the_end_of_the_step(tmp_path):
    described = task(epochs=100_000)
    with running(num_shards=3, checkpoint_dir=tmp_path) as pool:
        job = pool.submit(described, "trial")

        def is_paused_within_a_step():
            job.pause()
            with contextlib.suppress(TimeoutError):
                try:
                    job.checkpoint(timeout=0.5)
                except CheckpointError:
                    return True
            job.unpause()
            return False

        until(lambda: job.progress.step)
        until(is_paused_within_a_step)
        pool.suspend(seconds=PATIENCE_SECONDS)
        assert job.result(PATIENCE_SECONDS).checkpoint is not None
        assert pool.find_checkpoint("trial").steps >= job.progress.step


def test_one_whose_data_hangs_does_not_keep_others_from_being_saved(tmp_path, monkeypatch):
    """A trial's own code has the random streams of the process to itself, and so has this one's data while it hangs.

    The time is up as soon as the other one is over, however long the disk takes.
    """
    gate = Gate()
    with running(devices="cpu:2", checkpoint_dir=tmp_path) as pool:
        other = pool.submit(task(report_every=1), "other", pool.events())
        until(lambda: other.state == "waiting")
        before = generations(other.checkpoint())
        hangs = pool.submit(task(train=gate), "hangs")
        assert gate.reached.wait(PATIENCE_SECONDS)
        monkeypatch.setattr(suspend, "time", SimpleNamespace(monotonic=lambda: float(other.state in OVER)))
        pool.suspend([hangs, other], seconds=0.5)
        result = other.result(PATIENCE_SECONDS)
        assert result.status == "cancelled"
        assert generations(result.checkpoint)[0] > before[0]
        assert hangs.state == "running"  # until its step is over
        gate.go_on.set()
        assert hangs.result(PATIENCE_SECONDS).status == "cancelled"


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
@pytest.mark.parametrize("way", ["run", "submit"])
def test_a_signal_in_a_with_block_has_jobs_saved(tmp_path, number, error, way):
    def train():
        for count in range(10**6):
            if count == 3:
                signal.pthread_kill(threading.main_thread().ident, number)
            yield BATCH

    before = signal.getsignal(signal.SIGTERM)
    described = task(train=train, epochs=1)
    with pytest.raises(error) as raised, HydraExecutor(devices="cpu:1", checkpoint_dir=tmp_path) as pool:
        _ = pool.run([described]) if way == "run" else pool.submit(described, "job 0").result()
    assert error is KeyboardInterrupt or raised.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == before
    with running(checkpoint_dir=tmp_path) as pool:
        assert pool.find_checkpoint("job 0").steps >= 2


def test_without_a_folder_there_is_nothing_to_save():
    with pytest.raises(ConfigError, match="checkpoint_dir="):
        HydraExecutor(devices="cpu:1").suspend()
    with pytest.raises(ConfigError, match=r"stop_seconds must be a time above 0, in seconds or as .*, not 0"):
        HydraExecutor(stop_seconds=0)


def test_one_that_ends_just_before_it_is_asked_does_not_keep_others_from_being_saved(tmp_path, monkeypatch):
    with running(devices="cpu:2", max_concurrent=2, checkpoint_dir=tmp_path) as pool:
        jobs = [pool.submit(task(epochs=100_000), f"trial {number}") for number in range(2)]
        until(lambda: all(job.progress.step for job in jobs))
        ask = pool._pool.ask_to_save

        def ask_late(job):
            if job is jobs[0]:
                job.cancel()
                raise CheckpointError("the job is over and was never saved")
            return ask(job)

        monkeypatch.setattr(pool._pool, "ask_to_save", ask_late)
        pool.suspend(seconds=PATIENCE_SECONDS)
        results = [job.result(PATIENCE_SECONDS) for job in jobs]
    assert results[1].checkpoint is not None
