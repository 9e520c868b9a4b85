"""Trials that run their own code stay within the budget of their devices, as torch's allocations show it.

Seen by a tracker that shares nothing with the engine: tests/support/tracker.py. It counts every storage that an operation of a
burst has made or computed on, with all of its bytes, from that operation until the last reference to the storage is gone:
parameters, buffers, gradients, optimizer state, activations, what an optimizer works in, copies of buffers for a step that may
be undone, and the memory that the pool has moved state into. CPU devices hand a trial's tensors on where they lie, so all
devices have one account.

It does not count what the host would hold beside a device: batches as the user's data gives them (a trial keeps its last one
while it waits), host copies of state and of activations, which no operation of a burst computes on, and modules of trials that
have ended. So peaks are read before any trial ends, when all have made their last step and evaluation.

Room for a tensor is taken before the operator runs that makes it, so a device stays within its budget to the byte.
"""

import logging
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hydra_tune import HydraExecutor, Reported, TrainTask
from hydra_tune.errors import BudgetError
from hydra_tune.train.loop import burst
from tests.parity.observe import watched_ways
from tests.support.tracker import StorageTracker
from tests.unit.pool.tasks import PATIENCE_SECONDS, against_plain

pytestmark = pytest.mark.timeout(120)
WIDTH = 64
EPOCHS, BATCHES = 4, 3
KIB = 1024


class Net(nn.Module):
    """Layers with statistics of their own, or with common ones, which allow no cut; and a table, if it has rows."""

    def __init__(self, depth: int = 3, *, has_one_norm: bool = False, table: int = 0) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(table, WIDTH) if table else None)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(1 if has_one_norm else depth))
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = self.drop(self.norms[number % len(self.norms)](layer(x)).relu())
        return self.head(x if self.table is None else x * self.table[0])


class Data:
    """Batches that nobody keeps; the tracker leaves them out."""

    def __init__(self, tracker: StorageTracker | None, sizes: tuple[int, ...]) -> None:
        self.tracker, self.sizes = tracker, sizes

    def __call__(self) -> Iterator[Any]:
        for number, size in enumerate(self.sizes):
            stream = torch.Generator().manual_seed(number)
            with torch._C._DisableTorchDispatch():
                batch = torch.randn(size, WIDTH, generator=stream), torch.randint(4, (size,), generator=stream)
            if self.tracker is not None:
                self.tracker.leave_out(*batch)
            yield batch


def described(tracker: StorageTracker | None, **changes: Any) -> TrainTask:
    arguments: dict[str, Any] = {
        "model": Net,
        "optimizer": partial(torch.optim.AdamW, lr=1e-3),
        "train": Data(tracker, (32,) * BATCHES),
        "validate": Data(tracker, (48, 48)),
        "loss": functional.cross_entropy,
        "epochs": EPOCHS,
    }
    return TrainTask(**(arguments | changes))


def peaks_of(pool: HydraExecutor, tasks: list[TrainTask], tracker: StorageTracker) -> tuple[int, int]:
    """The peaks of the first epoch, in which steps are followed, and of the others; the trials' bits are looked at."""
    stream = pool.events()
    jobs = [pool.submit(task, events=stream) for task in tasks]
    peaks = []
    for epoch in range(EPOCHS):
        for _ in jobs:
            event = stream.get(PATIENCE_SECONDS)
            assert isinstance(event, Reported), event
            assert event.step == epoch
        peaks += tracker.peak_bytes
        tracker.forget_peaks()
        for job in jobs:
            job.proceed()
    for job in jobs:
        assert against_plain(job.task, job.result(PATIENCE_SECONDS)) == []
    return peaks[0], max(peaks[1:])


CASES = {
    "statistics": (Net, 320),
    "a large buffer": (partial(Net, table=400), 400),
}


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_trials_that_make_room_for_each_other(case, devices, monkeypatch):
    """Four trials, of which not two have room together, train and evaluate in turns of one step."""
    monkeypatch.setattr(burst, "BURST_SECONDS", 0.0)
    tracker = StorageTracker(is_common=True)
    model, kibibytes = CASES[case]
    options = {"devices": f"cpu:{devices}", "device_memory": kibibytes * KIB, "max_concurrent": 4}
    tasks = [described(tracker, model=model, seed=seed) for seed in range(4)]
    with watched_ways() as ways, HydraExecutor(policy="round_robin", instrument=tracker, **options) as pool:
        first, rest = peaks_of(pool, tasks, tracker)
        statistics = pool.stats().devices.values()
    assert [ways[id(task)].own_batches for task in tasks] == [EPOCHS * BATCHES] * 4
    assert [ways[id(task)].shards for task in tasks] == [{}] * 4
    assert all(device.bytes_out_by_kind["parameters"] > 0 for device in statistics)
    assert all(device.bytes_out_by_kind["optimizer"] > 0 for device in statistics)
    budget = devices * kibibytes * KIB
    assert first <= budget
    assert budget / 2 < rest <= budget, "the tracker sees steps at work"


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize(("has_one_norm", "kibibytes"), [(False, 500), (True, 520)])
def test_a_first_step_that_sheds_its_activations(has_one_norm, kibibytes):
    """What can be cut is cut from the second step on; what cannot be cut sheds in every step."""
    tracker = StorageTracker(is_common=True)
    model = partial(Net, 6, has_one_norm=has_one_norm)
    task = described(tracker, model=model, train=Data(tracker, (96,) * BATCHES))
    with (
        watched_ways() as ways,
        HydraExecutor(devices="cpu:1", device_memory=kibibytes * KIB, instrument=tracker) as pool,
    ):
        first, rest = peaks_of(pool, [task], tracker)
        (device,) = pool.stats().devices.values()
    assert device.bytes_out_by_kind["activations"] > 0
    assert ways[id(task)].own_batches == (EPOCHS * BATCHES if has_one_norm else 1)
    assert kibibytes * KIB / 2 < first <= kibibytes * KIB
    assert rest <= kibibytes * KIB


@pytest.mark.cases(1 / 3)
def test_a_step_that_does_not_fit_even_so_is_taken_back(caplog):
    """Its batch runs once more, cut, from the buffers and random streams that were before."""
    caplog.set_level(logging.INFO, "hydra_tune.shard.partition.shard_size_search")
    tracker, budget = StorageTracker(is_common=True), 520 * KIB
    rows = 350
    task = described(tracker, model=partial(Net, 6), train=Data(tracker, (rows,) * BATCHES))
    with HydraExecutor(devices="cpu:1", device_memory=budget, instrument=tracker) as pool:
        first, rest = peaks_of(pool, [task], tracker)
    assert (
        "the trial is cut after step 0: a step does not fit, even with its activations on the host" in caplog.messages
    )
    assert first <= budget
    assert rest <= budget


class Counting(nn.Module):
    """Scales its inputs by the number of its calls, which it counts in Python or in a buffer."""

    def __init__(self, *, in_python: bool) -> None:
        super().__init__()
        self.in_python, self.calls = in_python, 0
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)), nn.Dropout(0.2), nn.Linear(256, 3))

    def forward(self, x: Tensor) -> Tensor:
        if self.in_python:
            self.calls += 1
            return self.layers(x * (1 + 0.01 * self.calls))
        self.seen += 1
        return self.layers(x * (1 + 0.01 * self.seen))


class DrawnData:
    """Batches that are drawn from the trial's streams."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def __call__(self) -> Iterator[Any]:
        for size in self.sizes:
            inputs = torch.randn(size, 256) * random.uniform(0.5, 1.5)
            yield inputs, inputs[:, :3].argmax(1)


class LeavesZeros(torch.optim.AdamW):
    """Leaves zeros in place of gradients between its steps."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=False)


def counting(*, in_python: bool, train: tuple[int, ...], validate: tuple[int, ...], **changes: Any) -> TrainTask:
    model = partial(Counting, in_python=in_python)
    data = {"train": DrawnData(*train), "validate": DrawnData(*validate)}
    return described(None, model=model, epochs=2, **data, **changes)


@pytest.mark.cases(1)
@pytest.mark.parametrize("in_python", [True, False])
@pytest.mark.parametrize(
    ("train", "validate", "changes", "kibibytes"),
    [
        ((32, 32, 800, 32), (32,), {}, 5632),
        ((32, 32, 32), (32, 1000, 32), {}, 5632),
        ((32, 32, 32, 800, 32, 32), (32,), {"accumulate": 2}, 5632),
        ((32, 32, 800, 32), (32,), {"optimizer": LeavesZeros}, 5632),
        ((32, 32, 32, 800, 32, 32), (32,), {"optimizer": LeavesZeros, "accumulate": 2}, 5900),
    ],
)
def test_a_batch_that_is_taken_back_counts_once(in_python, train, validate, changes, kibibytes, caplog):
    """Neither the step nor the data have drawn or counted twice."""
    caplog.set_level(logging.INFO, "hydra_tune.shard.partition.shard_size_search")
    make = partial(counting, in_python=in_python, train=train, validate=validate, **changes)
    with HydraExecutor(devices="cpu:1", device_memory=kibibytes * KIB) as pool:
        (result,) = pool.run([make()], on_error="return")
    if in_python and "accumulate" in changes:
        # The first batch of the step ran without a note of what it counts.
        assert isinstance(result.error, BudgetError)
    else:
        assert any("does not fit" in message for message in caplog.messages)
        assert against_plain(make(), result) == []
