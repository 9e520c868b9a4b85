"""Loaders that keep a burst waiting: the trial leaves its device within it, and comes back with the plain loop's numbers."""

import random
import threading
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from hydra_tune import TrainTask
from hydra_tune.errors import LoaderTimeoutError
from hydra_tune.observe.event_log.reader import read_log
from hydra_tune.pool.faults import loader_watchdog
from hydra_tune.shard.capture.capture_lock import GATE
from tests.support.hanging import hanging, have_others_not_age
from tests.unit.pool.tasks import PATIENCE_SECONDS, against_plain, running

pytestmark = pytest.mark.timeout(120)

_GENERATOR = torch.Generator().manual_seed(5)
X = torch.randn(8, 64, generator=_GENERATOR)
Y = torch.randint(4, (8,), generator=_GENERATOR)
TIGHT = "180KiB"  # one trial fits, with 139 KB of state; two do not, so that one that has left is moved away


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    monkeypatch.setattr(loader_watchdog, "_PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(loader_watchdog, "_GRACE_SECONDS", 0.1)
    have_others_not_age(monkeypatch)


@pytest.fixture(autouse=True)
def never_captured(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("captured")

    monkeypatch.setattr("hydra_tune.shard.partition.trial_step.capture", refuse)


class Hanging:
    """Batches of one pass after another, of which one draw hangs in a lock until it is let go."""

    def __init__(self, at, count=5):
        self.at, self.count = at, count
        self.reached, self.opened = threading.Event(), threading.Event()
        self.thread = None  # that hung

    def __call__(self):
        for number in range(self.count):
            shift = torch.rand(8, 64) + random.random()
            self.wait(number)
            yield X + shift + torch.rand(8, 64), Y
        self.wait(self.count)

    def wait(self, number):
        if number == self.at:
            if not self.reached.is_set():
                self.thread = threading.current_thread()
            self.reached.set()
            with hanging():
                self.opened.wait()


@pytest.fixture(name="hanging")
def made_hanging():
    made = []

    def make(*args):
        made.append(Hanging(*args))
        return made[-1]

    yield make
    for one in made:
        one.opened.set()


def net(wide=64):
    return nn.Sequential(
        nn.Linear(64, wide), nn.BatchNorm1d(wide), nn.ReLU(), nn.Dropout(0.2), nn.Linear(wide, 64), nn.Linear(64, 4)
    )


def described(train, **changes):
    arguments = {
        "model": net,
        "optimizer": partial(torch.optim.AdamW, lr=1e-2),
        "train": train,
        "loss": functional.cross_entropy,
        "epochs": 2,
        "seed": 3,
    }
    return TrainTask(**(arguments | changes))


def plain_batches():
    for _ in range(40):
        yield X + torch.rand(8, 64), Y


CASES = {
    "the first batch": (0, {}),
    "between two steps": (2, {}),
    "within a step": (3, {"accumulate": 2}),
    "within a step that is drawn at once": (3, {"accumulate": 3, "remainder": "divide_by_rest"}),
    "after the last batch": (5, {}),
    "before the last step, which is short": (5, {"accumulate": 2}),
    "a step that clips": (5, {"accumulate": 2, "max_grad_norm": 0.1}),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("memory", [None, TIGHT], ids=["all fits", "one fits"])
@pytest.mark.parametrize("case", CASES)
def test_another_trial_runs_to_its_end_while_one_hangs_in_a_lock(hanging, case, memory):
    at, changes = CASES[case]
    train = hanging(at)
    slow, other = described(train, **changes), described(plain_batches, seed=4)
    with running(num_shards=None, device_memory=memory, loader_timeout=None) as pool:
        job = pool.submit(slow)
        assert train.reached.wait(PATIENCE_SECONDS)
        result = pool.submit(other).result(PATIENCE_SECONDS)
        assert job.state == "running"
        train.opened.set()
        found = job.result(PATIENCE_SECONDS)
        moved = sum(pool.stats().devices["cpu:0"].bytes_out_by_kind.values())
    assert (moved > 0) == (memory == TIGHT)
    assert against_plain(other, result) == []
    assert against_plain(slow, found) == []


def test_a_device_that_serves_others_meanwhile_is_not_busy_with_the_wait(hanging, tmp_path):
    train, path = hanging(2), tmp_path / "run.jsonl"
    with running(num_shards=None, loader_timeout=None, event_log=path) as pool:
        job = pool.submit(described(train))
        assert train.reached.wait(PATIENCE_SECONDS)
        pool.submit(described(plain_batches, seed=4)).result(PATIENCE_SECONDS)
        train.opened.set()
        job.result(PATIENCE_SECONDS)
        busy_seconds = pool.stats().devices["cpu:0"].busy_seconds
    units = sorted(read_log(path).units, key=lambda unit: unit.start_ns)
    assert all(one.ready_ns <= one.end_ns <= other.start_ns for one, other in pairwise(units))
    assert busy_seconds == pytest.approx(sum(unit.end_ns - unit.start_ns for unit in units) / 1e9)


class Seen(torch.optim.SGD):
    """Says on which thread it steps."""

    def __init__(self, parameters, threads):
        super().__init__(parameters, lr=0.1)
        self.threads = threads

    def step(self, closure=None):
        self.threads.append(threading.current_thread())
        return super().step(closure)


@pytest.mark.parametrize("case", CASES)
def test_no_step_runs_before_the_trial_has_a_device_again(hanging, case):
    """The thread that has waited is no device's any more: another runs what comes next, under a lease."""
    at, changes = CASES[case]
    train, threads = hanging(at), []
    slow = described(train, optimizer=partial(Seen, threads=threads), **changes)
    with running(num_shards=None, loader_timeout=None) as pool:
        job = pool.submit(slow)
        assert train.reached.wait(PATIENCE_SECONDS)
        assert pool.submit(described(plain_batches)).result(PATIENCE_SECONDS).status == "completed"
        before = len(threads)
        train.opened.set()
        assert job.result(PATIENCE_SECONDS).status == "completed"
    assert set(threads[:before]) <= {train.thread}
    assert len(threads) > before
    assert train.thread not in threads[before:]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("at", [1, 5])
def test_a_trial_that_leaves_within_its_first_step_gives_all_room_back(hanging, at, precision):
    """Before the second batch, and before a step of five batches that were all of the pass."""
    train, other = hanging(at), described(plain_batches)
    slow = described(train, accumulate=at + 1, precision=precision, epochs=1)
    with running(num_shards=None, loader_timeout=None) as pool:
        job = pool.submit(slow)
        assert train.reached.wait(PATIENCE_SECONDS)
        assert pool.submit(other).result(PATIENCE_SECONDS).status == "completed"
        train.opened.set()
        found = job.result(PATIENCE_SECONDS)
        pool.submit(other).result(PATIENCE_SECONDS)
        (pager,) = pool._pool._pagers.values()
        assert pager.ledger.used_bytes == pager.resident_bytes
    assert against_plain(slow, found) == []


@pytest.mark.cases(1)
@pytest.mark.parametrize("memory", [None, TIGHT], ids=["all fits", "one fits"])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_another_trial_runs_to_its_end_while_one_hangs_in_its_validation(hanging, at, memory):
    """Before its first batch, within the pass, and after the last one."""
    validate = hanging(at, 3)
    slow, other = described(plain_batches, validate=validate), described(plain_batches, seed=4)
    with running(num_shards=None, device_memory=memory, loader_timeout=None) as pool:
        job = pool.submit(slow)
        assert validate.reached.wait(PATIENCE_SECONDS)
        result = pool.submit(other).result(PATIENCE_SECONDS)
        assert job.state == "running"
        validate.opened.set()
        found = job.result(PATIENCE_SECONDS)
    assert against_plain(other, result) == []
    assert against_plain(slow, found) == []


def test_two_trials_that_hang_on_one_device_leave_it_to_a_third(hanging):
    handles = [hanging(2), hanging(3)]
    slow = [described(handle, seed=seed) for seed, handle in enumerate(handles)]
    other = described(plain_batches, seed=4)
    with running(num_shards=None, device_memory=TIGHT, loader_timeout=None, max_concurrent=3) as pool:
        jobs = [pool.submit(one) for one in slow]
        for handle in handles:
            assert handle.reached.wait(PATIENCE_SECONDS)
        assert against_plain(other, pool.submit(other).result(PATIENCE_SECONDS)) == []
        for handle in reversed(handles):
            handle.opened.set()
        for one, job in zip(slow, jobs, strict=True):
            assert against_plain(one, job.result(PATIENCE_SECONDS)) == []


@pytest.mark.cases(1)
@pytest.mark.parametrize("memory", [None, TIGHT], ids=["all fits", "one fits"])
def test_one_that_is_given_up_on_within_a_burst_fails_by_name_and_leaves_nothing(hanging, memory):
    """That nothing of it stays on the device is what `running` looks at in the end."""
    train = hanging(3)
    with running(num_shards=None, device_memory=memory, loader_timeout=0.5) as pool:
        job = pool.submit(described(train), name="hung")
        error = job.result(PATIENCE_SECONDS).error
        assert isinstance(error, LoaderTimeoutError)
        for part in ("'hung'", "train=", "threading.py", "loader_timeout is 0.5s"):
            assert part in str(error)
        assert pool.stats().devices["cpu:0"].resident_bytes == 0
        other = described(plain_batches, seed=4)
        assert against_plain(other, pool.submit(other).result(PATIENCE_SECONDS)) == []
        train.opened.set()
        again = described(plain_batches, seed=5)
        assert against_plain(again, pool.submit(again).result(PATIENCE_SECONDS)) == []


class Waits(Dataset):
    """A worker that waits at some samples until there is a file."""

    def __init__(self, folder, *at):
        self.folder, self.at = folder, at

    def __len__(self):
        return 32

    def __getitem__(self, index):
        if index in self.at:
            (self.folder / f"reached {index}").touch()
            while not (self.folder / f"go on {index}").exists():
                threading.Event().wait(0.01)
        return X[index % 8] * index, Y[index % 8]

    def wait(self, index, job):
        while not (self.folder / f"reached {index}").exists():
            assert job.state not in ("failed", "completed")
            threading.Event().wait(0.01)

    def go_on(self, index):
        (self.folder / f"go on {index}").touch()


@pytest.mark.cases(1)
@pytest.mark.parametrize("memory", [None, TIGHT], ids=["all fits", "one fits"])
def test_another_trial_runs_to_its_end_while_a_worker_of_one_hangs(tmp_path, memory):
    data = Waits(tmp_path, 16)
    slow, other = described(DataLoader(data, batch_size=8, num_workers=1)), described(plain_batches, seed=4)
    with running(num_shards=None, device_memory=memory) as pool:
        job = pool.submit(slow)
        data.wait(16, job)
        result = pool.submit(other).result(PATIENCE_SECONDS)
        assert job.state == "running"
        data.go_on(16)
        found = job.result(PATIENCE_SECONDS)
    assert against_plain(other, result) == []
    assert against_plain(slow, found) == []


@pytest.mark.cases(1 / 3)
def test_a_second_wait_within_the_draws_of_a_step_keeps_no_capture_out(tmp_path):
    """The first has cost the trial its device."""
    data = Waits(tmp_path, 8, 16)
    loader = DataLoader(data, batch_size=8, num_workers=1)
    slow, captured = described(loader, accumulate=4, remainder="divide_by_rest"), threading.Event()

    def capture():
        with GATE.exclusive():
            captured.set()

    with running(num_shards=None) as pool:
        job = pool.submit(slow)
        data.wait(8, job)
        assert pool.submit(described(plain_batches)).result(PATIENCE_SECONDS).status == "completed"
        data.go_on(8)
        data.wait(16, job)
        threading.Thread(target=capture, daemon=True).start()
        try:
            assert captured.wait(10)
        finally:
            data.go_on(16)
        assert against_plain(slow, job.result(PATIENCE_SECONDS)) == []


def test_a_checkpoint_is_waited_for_no_longer_than_asked_while_the_trial_reads_data(tmp_path):
    reached, opened = threading.Event(), threading.Event()

    def batches():
        yield X, Y
        reached.set()
        opened.wait(10)
        yield X, Y

    described = TrainTask(
        model=lambda: nn.Linear(64, 4),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        train=batches,
        loss=functional.cross_entropy,
    )
    with running(num_shards=None, checkpoint_dir=tmp_path) as pool:
        job = pool.submit(described, "slow")
        assert reached.wait(PATIENCE_SECONDS)
        with pytest.raises(TimeoutError):
            job.checkpoint(timeout=0.2)
        assert not opened.is_set()
        opened.set()
        assert job.result(PATIENCE_SECONDS).status == "completed"
