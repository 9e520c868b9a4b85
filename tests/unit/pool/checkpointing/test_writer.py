"""Trials of a pool are saved beside the work, gone on with, cloned, and begun from others' weights."""

import errno
import logging
import threading
from contextlib import closing
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hydra_tune import Reported, load_module
from hydra_tune.checkpoint import files
from hydra_tune.checkpoint.every import CheckpointInterval, parse_every
from hydra_tune.checkpoint.folder import CheckpointFolder, generations, load_checkpoint
from hydra_tune.checkpoint.naming import folder_name
from hydra_tune.errors import CheckpointError, ConfigError
from hydra_tune.pool.checkpointing.writer import check_checkpoint_dir
from hydra_tune.pool.job import OVER
from hydra_tune.train.checkpoint.snapshot import TrialStateSnapshot
from hydra_tune.train.checkpoint.trial_checkpoint import decoded
from tests.parity.exact import differences
from tests.unit.pool.tasks import PATIENCE_SECONDS, Held, X, Y, against_plain, running, task, until

pytestmark = pytest.mark.usefixtures("captured_once")
REPORTS = {"epochs": 3, "report_every": 1}


def at_report(pool, described, number, name="trial"):
    """A job that waits at its report of that number, from 1."""
    events = pool.events()
    job = pool.submit(described, name, events)
    for count in range(1, number + 1):
        assert events.get(PATIENCE_SECONDS) is not None
        if count < number:
            job.proceed()
    return job


def finished(job):
    result = job.result(PATIENCE_SECONDS)
    if result.error is not None:
        raise result.error
    return result


@pytest.mark.parametrize("options", [{}, {"checkpoint_every": 2}, {"checkpoint_every": "1h"}])
def test_saving_changes_nothing_and_leaves_the_last_state(tmp_path, options):
    described = task(epochs=3)
    with running(devices="cpu:2", num_shards=2, checkpoint_dir=tmp_path, **options) as pool:
        result = finished(pool.submit(described, "a trial"))
        found = pool.find_checkpoint("a trial")
        assert against_plain(described, result) == []
        assert (found.steps, [entry["step"] for entry in found.history]) == (9, [0, 1, 2])
        again = finished(pool.submit(described, "again", resume_from=result.checkpoint))
        assert list(differences(dict(result.state_dict()), dict(again.state_dict()))) == []
        assert len(generations(result.checkpoint)) == 1  # one that is over needs no other


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert check_checkpoint_dir("~/saved") == tmp_path / "saved"


def test_a_tilde_is_the_home_folder_wherever_a_state_is_read_or_written(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    described = task(**REPORTS)
    with running(devices="cpu:1") as pool:
        job = at_report(pool, described, 1)
        assert pool.save_to(job, "~/saved") == tmp_path / "saved"
        job.cancel()
        result = finished(pool.submit(described, resume_from="~/saved"))
        assert against_plain(described, result) == []
        finished(pool.submit(described, warm_start="~/saved"))
    result.save("~/weights.safetensors")
    loaded = load_module(described, "~/weights.safetensors").state_dict()
    assert list(differences(dict(result.state_dict()), dict(loaded))) == []
    assert load_module(described, "~/saved").state_dict().keys() == loaded.keys()


def test_another_pool_goes_on_from_any_report(tmp_path):
    described = task(**REPORTS)
    for number in (1, 5):
        with running(devices="cpu:1", num_shards=3, checkpoint_dir=tmp_path) as pool:
            job = at_report(pool, described, number)
            path = job.checkpoint(PATIENCE_SECONDS)
            job.cancel()
        with running(devices="cpu:2", num_shards=1, spill_dir=tmp_path) as pool:
            assert against_plain(described, finished(pool.submit(described, resume_from=path))) == []
        with running(checkpoint_dir=tmp_path) as pool:
            found = pool.find_checkpoint("trial")
            assert (found.steps, len(found.history)) == (number, number)
            result = finished(pool.submit(described, "trial", resume_from=found.path))
            assert result.checkpoint == path
            assert against_plain(described, result) == []
            pool.remove_checkpoint("trial")
            assert pool.find_checkpoint("trial") is None


@pytest.mark.parametrize("count", [1, 2])
def test_a_trial_that_is_saved_before_it_has_computed_anything_has_its_optimizers_state_in_the_file(tmp_path, count):
    """Gone on with at the end of an epoch, it is saved at the beginning of the next; alone, and computed with another."""
    described = [task(epochs=3, report_every=3, seed=seed) for seed in range(count)]
    with running(checkpoint_dir=tmp_path / "first") as pool:
        jobs = [at_report(pool, one, 1, str(seed)) for seed, one in enumerate(described)]
        paths = [job.checkpoint(PATIENCE_SECONDS) for job in jobs]
        for job in jobs:
            job.cancel()
    fusion = "off" if count == 1 else "on"
    with running(checkpoint_dir=tmp_path / "second", checkpoint_every=3, fusion=fusion) as pool:
        events = pool.events()
        jobs = [pool.submit(one, str(seed), events, resume_from=paths[seed]) for seed, one in enumerate(described)]
        assert {events.get(PATIENCE_SECONDS).step for _ in jobs} == {6}
        folder = pool.find_checkpoint("0").path.parent
        for job in jobs:
            job.cancel()
        saved_again = folder / f"{generations(folder)[-1]:08}.manifest"
    assert decoded(load_checkpoint(saved_again))["progress"]["steps"] == 3
    with running() as pool:
        result = finished(pool.submit(described[0], resume_from=saved_again))
    assert against_plain(described[0], result) == []


def test_with_little_host_memory_a_trial_is_written_from_where_it_lies(tmp_path):
    described = task(model=lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)), nn.Linear(8, 4)), **REPORTS)
    (tmp_path / "spill").mkdir()
    with running(
        devices="cpu:1",
        device_memory="12KiB",
        host_memory="6KiB",
        spill_dir=tmp_path / "spill",
        checkpoint_dir=tmp_path / "saved",
    ) as pool:
        job = at_report(pool, described, 4)
        path = job.checkpoint(PATIENCE_SECONDS)
        job.proceed()
        job.cancel()
        assert pool.stats().disk.bytes_written > 0
    with running() as pool:
        assert against_plain(described, finished(pool.submit(described, resume_from=path))) == []


def test_a_copy_that_fails_gives_its_host_memory_back(tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("copying failed")

    (tmp_path / "spill").mkdir()
    options = {"host_memory": "64MiB", "spill_dir": tmp_path / "spill", "checkpoint_dir": tmp_path / "saved"}
    with running(**options) as pool:
        job = at_report(pool, task(**REPORTS), 2)
        ledger, checkpoints = pool._pool._host.ledger, pool._pool.checkpoints
        assert checkpoints.take_slot(waits=True), "once the report's own checkpoint is written"
        before = ledger.used_bytes
        checkpoints.give_slot_back()
        with monkeypatch.context() as during:
            during.setattr(TrialStateSnapshot, "copied", broken)
            with pytest.raises(RuntimeError, match="copying failed"):
                job.checkpoint(PATIENCE_SECONDS)
        assert ledger.used_bytes == before
        assert generations(job.checkpoint(PATIENCE_SECONDS))
        job.proceed()
        job.cancel()


def between_steps(pool, **changes):
    """A running job that goes on once a caller asks for its state."""
    reached, go_on = threading.Event(), threading.Event()

    def batches():
        for batch in ((torch.ones(2, 8), torch.zeros(2).long()),) * 4:
            yield batch
            reached.set()
            assert go_on.wait(PATIENCE_SECONDS)

    job = pool.submit(task(train=batches, **changes), "trial")
    assert reached.wait(PATIENCE_SECONDS)
    keeper = pool._pool._records[job.key].keeper

    def go_on_once_asked():
        until(lambda: keeper.is_asked)
        go_on.set()

    threading.Thread(target=go_on_once_asked).start()
    return job


def test_a_running_job_is_saved_after_its_step(tmp_path):
    with running(checkpoint_dir=tmp_path) as pool:
        job = between_steps(pool)
        assert generations(job.checkpoint(PATIENCE_SECONDS))
        finished(job)
        assert job.checkpoint() == tmp_path / "trial"


def test_a_running_job_goes_on_after_a_copy_that_fails(tmp_path):
    with running() as pool:
        job = between_steps(pool, model=lambda: Keeps(8, 4))
        with pytest.raises(CheckpointError, match="'thing'"):
            pool.save_to(job, tmp_path / "saved")
        assert finished(job).status == "completed"


@pytest.mark.parametrize("fusion", ["off", "on"])
def test_the_last_state_is_copied_though_nobody_asks_for_it_then(tmp_path, fusion):
    described, longer = task(epochs=3, report_every=4), task(epochs=5, report_every=4)
    held = Held()
    with running(devices="cpu:1", fusion=fusion, instrument=held) as pool:
        jobs = [pool.submit(described) for _ in range(3)]
        first, unwanted, ended = (pool.copy_at_end(job) for job in jobs)
        assert unwanted.cancel()
        jobs[2].cancel()
        held.go()
        _, trained, _ = (finished(job) for job in jobs)
        with pytest.raises(CheckpointError, match=r"is over \(cancelled\)"):
            ended.result(0)
        with pytest.raises(CheckpointError, match=r"is over \(completed\)"):
            pool.copy_at_end(jobs[0])
        with closing(CheckpointFolder(tmp_path / "last")) as folder:
            folder.write(first.result(0))
        again = finished(pool.submit(described, resume_from=tmp_path / "last"))
        assert list(differences(dict(trained.state_dict()), dict(again.state_dict()))) == []
    with running(devices="cpu:1") as pool:
        gone_on = finished(pool.submit(longer, resume_from=tmp_path / "last", resume="allow-changes"))
        assert fusion == "on" or against_plain(longer, gone_on) == []
        assert [report["step"] for report in gone_on.history] == [4, 8, 12]


class Halves(torch.optim.lr_scheduler.LRScheduler):
    """Halves the weights after each epoch."""

    def get_lr(self):
        with torch.no_grad():
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.5)
        return [group["lr"] for group in self.optimizer.param_groups]


@pytest.mark.parametrize("report_every", ["epoch", 1, 2])
def test_the_last_state_has_what_the_scheduler_writes_after_the_last_epoch(tmp_path, report_every):
    described = task(epochs=2, scheduler=Halves, report_every=report_every)
    held = Held()
    with running(checkpoint_dir=tmp_path, instrument=held) as pool:
        job = pool.submit(described, "trial")
        copy = pool.copy_at_end(job)
        held.go()
        result = finished(job)
    expected = dict(result.state_dict())
    assert against_plain(described, result) == []
    # Only after the pool has written all files.
    for saved in (copy.result(0), load_checkpoint(result.checkpoint)):
        assert list(differences(expected, decoded(saved)["model"])) == []
    with running() as pool:
        again = finished(pool.submit(described, resume_from=result.checkpoint))
        assert list(differences(expected, dict(again.state_dict()))) == []


def test_a_trial_that_goes_on_with_nothing_left_to_do_keeps_its_optimizers_state(tmp_path):
    described, longer = task(**REPORTS), task(**REPORTS | {"epochs": 4})
    with running(checkpoint_dir=tmp_path) as pool:
        job = at_report(pool, described, 9)
        path = job.checkpoint(PATIENCE_SECONDS)
        job.cancel()
        job.result(PATIENCE_SECONDS)
        last = finished(pool.submit(described, resume_from=path)).checkpoint
        assert against_plain(longer, finished(pool.submit(longer, resume_from=last, resume="allow-changes"))) == []


class Keeps(nn.Linear):
    """Keeps a thing that no checkpoint can hold."""

    def forward(self, x):
        self.thing = object()
        return super().forward(x)


def test_what_cannot_be_saved_fails_the_trial_by_name(tmp_path):
    described = task(model=lambda: Keeps(8, 4))
    with running(checkpoint_dir=tmp_path) as pool:
        with pytest.raises(CheckpointError, match=r"attribute 'thing' of the model is of type builtins.object"):
            finished(pool.submit(described))
        assert finished(pool.submit(task())).status == "completed"
    held = Held()
    with running(instrument=held) as pool:
        job = pool.submit(described)
        copy = pool.copy_at_end(job)
        held.go()
        assert finished(job).status == "completed"
        with pytest.raises(CheckpointError, match="'thing'"):
            copy.result(0)


def test_a_full_disk_is_said_and_training_goes_on(tmp_path, monkeypatch, caplog):
    described = task(**REPORTS)
    with running(checkpoint_dir=tmp_path) as pool, caplog.at_level(logging.ERROR):
        job = at_report(pool, described, 3)
        path = job.checkpoint(PATIENCE_SECONDS)
        before = generations(path)

        def full(folder):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(files, "_flush_folder", full)
        job.proceed()
        until(lambda: job.state == "waiting")
        with pytest.raises(Exception, match="No space left"):
            job.checkpoint(PATIENCE_SECONDS)
        assert "training goes on" in caplog.text
        assert generations(path) == before
        monkeypatch.undo()
        job.checkpoint(PATIENCE_SECONDS)
        assert generations(path)[0] > before[0]
        job.cancel()


def test_a_clone_goes_on_by_itself(tmp_path):
    described = task(**REPORTS, scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5))
    with running(devices="cpu:2") as pool:
        job = at_report(pool, described, 5)  # the rate is half of what it was
        same = pool.clone(job)
        other = pool.clone(job, {"optimizer": partial(torch.optim.AdamW, lr=1.0)}, "other")
        finished(other)
        assert (
            against_plain(described, finished(same)) == []
        )  # with nothing beside it: both draw from torch's own stream
        assert finished(other).optimizer_state_dict()["param_groups"][0]["lr"] == 1.0 * 0.5**3
        assert finished(other).history[:5] == finished(same).history[:5]
        job.cancel()
        job.result(PATIENCE_SECONDS)
        with pytest.raises(CheckpointError, match="no checkpoint that could be cloned"):
            pool.clone(job)
        with pytest.raises(ConfigError, match="no argument 'lr'"):
            pool.clone(job, {"lr": 1.0})
    with running(checkpoint_dir=tmp_path) as pool:
        done = pool.submit(described)
        first = finished(done)
        longer = finished(pool.clone(done, {"epochs": 4}))
        assert [entry["step"] for entry in longer.history] == list(range(1, 13))
        assert longer.history[:9] == first.history


def test_a_warm_start_takes_weights_only(tmp_path):
    described = task(**REPORTS)
    with running(checkpoint_dir=tmp_path) as pool:
        first = finished(pool.submit(described, "first"))
        warm = finished(pool.submit(described, "warm", warm_start=first.checkpoint))
        assert len(warm.history) == 9
        assert warm.history[0]["train_loss"] < first.history[0]["train_loss"]
        with pytest.raises(CheckpointError, match=r"weights of another model: parameters.0.weight"):
            finished(pool.submit(task(model=lambda: nn.Linear(8, 4)), warm_start=first.checkpoint))


def test_another_task_is_refused_with_what_differs_or_allowed(tmp_path):
    described, longer = task(**REPORTS), task(epochs=4, report_every=1)
    with running(checkpoint_dir=tmp_path) as pool:
        job = at_report(pool, described, 4)
        path = job.checkpoint(PATIENCE_SECONDS)
        with pytest.raises(CheckpointError, match=r"task.epochs: 3 when it was saved, 4 now"):
            finished(pool.submit(longer, resume_from=path))
        assert against_plain(longer, finished(pool.submit(longer, resume_from=path, resume="allow-changes"))) == []
        for changes, what in (
            ({"optimizer": partial(torch.optim.SGD, lr=0.1)}, r"optimizer: 'torch.optim.adamw.AdamW' when"),
            ({"model": lambda: nn.Linear(8, 4)}, r"parameters.0.weight: 'float32 \[16, 8\]' when"),
        ):
            with pytest.raises(CheckpointError, match=what):
                finished(pool.submit(task(**REPORTS, **changes), resume_from=path, resume="allow-changes"))
        job.cancel()


CHANGED = {
    "a layer": ({"model": lambda: nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))}, "parameters.0.weight", False),
    "the optimizer": ({"optimizer": partial(torch.optim.SGD, lr=0.1)}, "optimizer: 'torch.optim.adamw.AdamW'", False),
    "its options": (
        {"optimizer": partial(torch.optim.AdamW, lr=0.5)},
        r"groups.0.lr: 0.01 when it was saved, 0.5",
        True,
    ),
    "the data": ({"train": TensorDataset(X[:16], Y[:16])}, "task.train.samples: 24 when it was saved, 16 now", True),
    "the batches": ({"batch_size": 4}, "task.batch_size: 8 when it was saved, 4 now", True),
    "the seed": ({"seed": 4}, "task.seed: 3 when it was saved, 4 now", True),
    "clipping": ({"max_grad_norm": 1.0}, "task.max_grad_norm: None when it was saved, 1.0 now", True),
    "torch": ({}, "torch: '[0-9.]+' when it was saved, '9.9.9' now", True),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("change", CHANGED)
def test_what_has_changed_is_said_and_allowed_only_where_it_can_be(tmp_path, monkeypatch, change):
    changes, said, may_be = CHANGED[change]
    with running(checkpoint_dir=tmp_path) as pool:
        job = at_report(pool, task(**REPORTS, model=small), 4)
        path = job.checkpoint(PATIENCE_SECONDS)
        job.cancel()
        if change == "torch":
            monkeypatch.setattr(torch, "__version__", "9.9.9+cpu")
        described = task(**REPORTS | {"model": small} | changes)
        with pytest.raises(CheckpointError, match=said):
            finished(pool.submit(described, resume_from=path))
        again = pool.submit(described, resume_from=path, resume="allow-changes").result(PATIENCE_SECONDS)
        assert (again.status == "completed") == may_be, again.error


def small() -> nn.Module:
    return nn.Linear(8, 4)


def test_one_folder_for_each_trial(tmp_path):
    with running(checkpoint_dir=tmp_path) as pool:
        results = [finished(pool.submit(task(), name)) for name in ("same", "same", "../up", "")]
        folders = [result.checkpoint for result in results]
    assert len(set(folders)) == 4
    assert {folder.parent for folder in folders} == {tmp_path}
    assert folders[:2] == [tmp_path / "same", tmp_path / "same~2"]
    assert folder_name("a/b") != folder_name("a-b")


def test_a_trial_that_was_never_saved_leaves_no_folder(tmp_path):
    with running(checkpoint_dir=tmp_path) as pool:
        result = pool.submit(task(model=lambda: 1), "trial").result(PATIENCE_SECONDS)
        assert (result.status, result.checkpoint) == ("failed", None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["checkpoint", "find_checkpoint"])
def test_without_a_folder_that_is_said(call):
    with running() as pool:
        job = pool.submit(task(), "trial")
        with pytest.raises((CheckpointError, ConfigError), match="checkpoint_dir="):
            job.checkpoint() if call == "checkpoint" else pool.find_checkpoint("trial")
        with pytest.raises(CheckpointError, match="there is no checkpoint"):
            pool.submit(task(), resume_from="/nowhere")
        with pytest.raises(ConfigError, match="give one of the two"):
            pool.submit(task(), resume_from="/a", warm_start="/b")
        finished(job)


def test_how_often():
    assert parse_every(None) == CheckpointInterval()
    assert parse_every(100) == CheckpointInterval(steps=100)
    assert [parse_every(text).seconds for text in ("30s", "1.5 min", "2h")] == [30.0, 90.0, 7200.0]


@pytest.mark.parametrize("text", [0, -1, True, "often", "3 days", "0s", 1.5])
def test_how_often_in_other_words_is_refused(text):
    with pytest.raises(ConfigError, match="checkpoint_every must be"):
        parse_every(text)


def test_trials_of_two_pools_with_one_folder_have_folders_of_their_own(tmp_path):
    """Also before the first has saved anything."""
    gone_on = threading.Event()

    def waiting():
        yield from batches()
        assert gone_on.wait(PATIENCE_SECONDS)
        yield from batches()

    def batches():
        return iter([(torch.ones(2, 8), torch.zeros(2).long())])

    with running(checkpoint_dir=tmp_path) as first, running(checkpoint_dir=tmp_path) as second:
        job = first.submit(task(train=waiting), "same")
        until(lambda: job.progress.step)
        try:
            other = second.submit(task(train=batches), "same").result(PATIENCE_SECONDS)
        finally:
            gone_on.set()
        assert other.status == "completed", other.error
        assert other.checkpoint == tmp_path / "same~2"
        assert job.result(PATIENCE_SECONDS).checkpoint == tmp_path / "same"


def drawn_anew():
    """Data that cannot be drawn again from the middle: the order comes from torch's generator within the pass."""
    for indices in torch.randperm(24).split(8):
        yield X[indices] + torch.randn(1), Y[indices]


@pytest.mark.parametrize("options", [{}, {"fusion": "on", "fusion_size": 2}], ids=["alone", "fused"])
def test_a_save_at_a_report_that_cannot_be_resumed_is_refused(tmp_path, options, monkeypatch):
    """The thread that answers the reports would wait for itself."""
    monkeypatch.setattr("hydra_tune.pool.pool._ANSWER_SECONDS", 0.0)
    described = [task(train=drawn_anew, epochs=2, report_every=2, seed=seed) for seed in (1, 2)]
    with running(devices="cpu:1", checkpoint_dir=tmp_path / "saved", max_concurrent=2, **options) as pool:
        events = pool.events()
        jobs = [pool.submit(one, f"trial {number}", events) for number, one in enumerate(described)]
        for _ in jobs:
            assert events.get(PATIENCE_SECONDS) is not None
        for job in jobs:
            with pytest.raises(CheckpointError, match="could not be resumed"):
                job.checkpoint(PATIENCE_SECONDS)
            with pytest.raises(CheckpointError, match="could not be resumed"):
                pool.save_to(job, tmp_path / "elsewhere")
        while any(job.state not in OVER for job in jobs):
            for job in jobs:
                job.proceed()
            events.get(0.05)
        for one, job in zip(described, jobs, strict=True):
            assert job.result().status == "completed"
            if not options:
                assert against_plain(one, job.result()) == []


def test_a_save_waits_for_another_thread_to_answer_reports(tmp_path):
    described = task(train=drawn_anew, epochs=3, report_every=1)
    with running(devices="cpu:1", checkpoint_dir=tmp_path / "saved") as pool:
        events = pool.events()
        job = pool.submit(described, "trial", events)

        def answer():
            while isinstance(events.get(PATIENCE_SECONDS), Reported):
                job.proceed()

        answering = threading.Thread(target=answer)
        answering.start()
        assert generations(job.checkpoint(PATIENCE_SECONDS))
        assert job.result(PATIENCE_SECONDS).status == "completed"
        answering.join()
