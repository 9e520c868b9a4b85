"""A thousand short trials in one process: what it holds after the first fifty is what it holds after the last."""

from functools import partial

import pytest
import torch
from torch import nn

from hydra_tune.checkpoint.folder import generations
from tests.support.held import Held
from tests.unit.pool.tasks import PATIENCE_SECONDS, X, Y, running, task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_TRIALS = 1_000
WAVE = 25
MIB = 2**20


def model(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.Dropout(0.1), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 4))


def described(number: int):
    """Of one of five architectures; every tenth runs whole."""
    if number % 10 == 0:
        return task(model=Counts, seed=number, train=two_batches, epochs=1)
    return task(model=partial(model, 16 * (1 + number % 5)), seed=number, train=two_batches, epochs=1, report_every=1)


def two_batches():
    return [(X[:8].clone(), Y[:8].clone()), (X[8:16].clone(), Y[8:16].clone())]


class Counts(nn.Module):
    """Runs whole."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen = model(16), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.inner(x) * self.seen


def train_wave(pool, first: int) -> None:
    """Some end by themselves, some are pruned at their first report, and one fails."""
    events = pool.events()
    jobs = [pool.submit(described(number), f"trial {number}", events) for number in range(first, first + WAVE)]
    jobs.append(pool.submit(task(model=lambda: 1), f"wrong {first}"))
    open_jobs = set(jobs[:-1])
    while open_jobs:
        event = events.get(PATIENCE_SECONDS)
        assert event is not None
        if hasattr(event, "metrics"):
            event.job.prune() if int(event.job.name.split()[1]) % 7 == 0 else event.job.proceed()
        else:
            open_jobs.remove(event.job)
    states = {job.result(PATIENCE_SECONDS).status for job in jobs[:-1]}
    assert states == {"completed", "pruned"}
    assert jobs[-1].result(PATIENCE_SECONDS).status == "failed"


@pytest.mark.parametrize("saves", [False, True], ids=["without checkpoints", "with checkpoints"])
def test_nothing_grows(saves, tmp_path):
    (tmp_path / "spill").mkdir()
    options = {"devices": "cpu:2", "device_memory": "24KiB", "host_memory": "16KiB", "spill_dir": tmp_path / "spill"}
    if saves:
        options |= {"checkpoint_dir": tmp_path / "saved"}
    looks = []
    with running(num_shards=2, max_concurrent=4, **options) as pool:
        for first in range(0, NUM_TRIALS, WAVE):
            train_wave(pool, first)
            if saves:
                for number in range(first, first + WAVE):
                    pool.remove_checkpoint(f"trial {number}") if number % 2 else None
                pool.find_checkpoint("trial 0")  # waits until all that was asked for is on disk
            looks.append(Held.now())
        assert pool.stats().disk.bytes_written > 0
    if saves:
        folders = list((tmp_path / "saved").iterdir())
        numbers = {int(folder.name.split("-")[1]) for folder in folders if folder.name.startswith("trial-")}
        assert len(numbers) == len(folders), "a trial that has failed has left its folder"
        # What was pruned may never have been saved: another trial was being written.
        completed = {number for number in range(0, NUM_TRIALS, 2) if number % 7 or number % 10 == 0}
        assert completed <= numbers <= set(range(0, NUM_TRIALS, 2))
        assert {len(generations(folder)) for folder in folders} == {1}
    first, last = looks[50 // WAVE], looks[-1]
    for look in looks[50 // WAVE :]:
        assert (look.threads, look.files, look.pinned_bytes) == (first.threads, first.files, first.pinned_bytes)
        assert abs(look.storages - first.storages) <= 8, "a wave's last copies may be under way"
        assert look.storage_bytes <= first.storage_bytes + MIB
    assert last.objects - first.objects < NUM_TRIALS // 4
    assert last.resident_bytes - first.resident_bytes < 48 * MIB
