"""Data loaders that hang: named, and no other trial waits for them."""

import random
import threading
import time
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hydra_tune import Failed, Reported
from hydra_tune.errors import ConfigError, LoaderTimeoutError
from hydra_tune.fusion.matching.group_size_chooser import GroupSizeChoice, GroupSizeChooser
from hydra_tune.pool.faults import loader_watchdog
from hydra_tune.pool.faults.loader_watchdog import LoaderWaitLimits, LoaderWatchdog
from hydra_tune.pool.fusion import group_jobs
from hydra_tune.pool.fusion.group_jobs import GroupJobLauncher
from hydra_tune.pool.job import OVER
from hydra_tune.train.data.loader_clock import DrawClock, LoaderInterrupt
from tests.support.hanging import hanging, have_others_not_age
from tests.support.parallel import PARALLEL
from tests.support.together import together
from tests.unit.pool.tasks import PATIENCE_SECONDS, X, Y, against_plain, one_batch, running, task

pytestmark = pytest.mark.timeout(120)

SECONDS = 0.5  # for loaders that hang


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    monkeypatch.setattr(loader_watchdog, "_PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(loader_watchdog, "_GRACE_SECONDS", 0.1)
    have_others_not_age(monkeypatch)


@pytest.fixture(params=["captured", "own code"])
def how(request, monkeypatch):
    """Options of a pool whose trials are captured, or run their own code in bursts and are never captured."""
    if request.param == "captured":
        return {"num_shards": 1}

    def refuse(*args, **kwargs):
        raise AssertionError("captured")

    monkeypatch.setattr("hydra_tune.shard.partition.trial_step.capture", refuse)
    return {"num_shards": None}


class Gate:
    """Where a loader hangs in the system, until it is opened."""

    def __init__(self):
        self.reached, self.opened, self.after = threading.Event(), threading.Event(), []

    def hang(self):
        opened, after = self.opened, self.after
        self.reached.set()
        with hanging():
            opened.wait()  # in a lock of the system, where no exception comes through
        after.append(torch.rand(()))


@pytest.fixture
def gate():
    made = Gate()
    yield made
    made.opened.set()


def batches(gate, at, count=4):
    """A handle that hangs before batch `at` of the second pass, but gives the right ones."""
    passes = []

    def drawn():
        passes.append(1)
        for number in range(count):
            if len(passes) == 2 and number == at:
                gate.hang()
            yield X[:8] + torch.rand(8, 8), Y[:8]

    return drawn


def drawing(**changes):
    """A trial whose batches are drawn in this process, with random numbers of all kinds."""

    def drawn():
        for _ in range(3):
            yield X[:8] + torch.rand(8, 8) + random.random(), Y[:8]

    return task(**({"train": drawn, "epochs": 6} | changes))


def until(condition):
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("devices", "changes"),
    [
        ("cpu:1", {"accumulate": 2}),
        ("cpu:2", {}),
        pytest.param("cpu:1", {}, marks=pytest.mark.slow),
        pytest.param("cpu:2", {"accumulate": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_loader_that_hangs_in_this_process_fails_its_trial_and_no_other(gate, caplog, devices, changes, how):
    described = [drawing(seed=seed) for seed in (1, 2)]
    outside = torch.get_rng_state()
    with running(**how, devices=devices, max_concurrent=3, loader_warning=0.2, loader_timeout=SECONDS) as pool:
        hung = pool.submit(task(train=batches(gate, 1), epochs=3, **changes), name="hung")
        assert gate.reached.wait(PATIENCE_SECONDS)
        others = [pool.submit(one) for one in described]
        result = hung.result(PATIENCE_SECONDS)
        assert isinstance(result.error, LoaderTimeoutError)
        message = str(result.error)
        for part in ("'hung'", "train=", "threading.py", f"loader_timeout is {SECONDS:g}s", "num_workers=1"):
            assert part in message
        assert [other.result(PATIENCE_SECONDS).status for other in others] == ["completed"] * 2
        assert torch.equal(torch.get_rng_state(), outside)
        described += [drawing(seed=seed) for seed in (4, 5)]
        others += [pool.submit(one) for one in described[2:]]
        gate.opened.set()  # now, and beside what draws
        assert [other.result(PATIENCE_SECONDS).status for other in others] == ["completed"] * 4
        assert torch.equal(torch.get_rng_state(), outside)
        for one, other in zip(described, others, strict=True):
            assert against_plain(one, other.result(0)) == []
        assert not gate.after, "it must not have drawn from another's streams"
        assert pool.stats().devices["cpu:0"].resident_bytes == 0
    assert any("'hung' has been waiting for" in record.getMessage() for record in caplog.records)


def test_one_that_hangs_at_its_first_batch_does_not_keep_others_from_beginning(gate, how):
    def drawn():
        gate.hang()
        yield from one_batch()

    with running(**how, devices="cpu:1", max_concurrent=2, loader_timeout=SECONDS) as pool:
        hung = pool.submit(task(train=drawn))
        assert gate.reached.wait(PATIENCE_SECONDS)
        described = drawing()
        assert against_plain(described, pool.submit(described).result(PATIENCE_SECONDS)) == []
        assert isinstance(hung.result(PATIENCE_SECONDS).error, LoaderTimeoutError)


def test_beside_one_that_hangs_in_this_process_others_draw_in_this_process(gate, how):
    """As long as nothing has to be captured, for which all that computes or draws here is waited for."""
    with running(**how, devices="cpu:2") as pool:
        assert pool.submit(drawing()).result(PATIENCE_SECONDS).status == "completed"
        hung = pool.submit(task(train=batches(gate, 1), epochs=3))
        assert gate.reached.wait(PATIENCE_SECONDS)
        described = drawing(seed=2)
        assert against_plain(described, pool.submit(described).result(PATIENCE_SECONDS)) == []
        gate.opened.set()
        assert hung.result(PATIENCE_SECONDS).status == "completed"


def test_one_that_hangs_in_python_is_interrupted_where_it_is(caplog, monkeypatch, how):
    monkeypatch.setattr(loader_watchdog, "_GRACE_SECONDS", PATIENCE_SECONDS)
    where = []

    def drawn():
        yield from one_batch()
        try:
            with hanging():
                while True:
                    time.sleep(0.01)
        finally:
            where.append(threading.current_thread().name)

    with running(**how, devices="cpu:1", loader_timeout=0.3) as pool:
        result = pool.submit(task(train=drawn)).result(PATIENCE_SECONDS)
    assert isinstance(result.error, LoaderTimeoutError)
    assert where == ["hydra-cpu:0"], "on its own thread"
    assert not any("left behind" in record.getMessage() for record in caplog.records)


def test_one_that_catches_everything_is_interrupted_again(gate, how):
    tries = []

    def drawn():
        yield from one_batch()
        with hanging():
            while len(tries) < 3:
                try:
                    while True:
                        time.sleep(0.01)
                except BaseException:  # noqa: BLE001
                    tries.append(1)
                    continue

    with running(**how, devices="cpu:1", loader_timeout=0.3) as pool:
        result = pool.submit(task(train=drawn)).result(PATIENCE_SECONDS)
        assert isinstance(result.error, LoaderTimeoutError)
        until(lambda: len(tries) == 3)


class Hangs(Dataset):
    """A worker that hangs at a sample until there is a file."""

    def __init__(self, path):
        self.path = path

    def __len__(self):
        return 24

    def __getitem__(self, index):
        while index == 16 and not self.path.exists():
            time.sleep(0.01)
        return X[index], Y[index]


def test_a_trial_whose_workers_are_slow_leaves_its_device_and_comes_back_with_the_same_numbers(caplog, tmp_path, how):
    loader = DataLoader(Hangs(tmp_path / "go on"), batch_size=8, num_workers=1)
    described = task(train=loader, batch_size=None, epochs=2)
    with running(**how, devices="cpu:1", max_concurrent=2, loader_warning=0.2) as pool:
        slow = pool.submit(described, name="slow")
        until(lambda: slow.state == "running")
        other = drawing()
        assert against_plain(other, pool.submit(other).result(PATIENCE_SECONDS)) == [], "beside it, on its only device"
        assert slow.state == "running"
        # There may be warnings of the workers' start before, which is in this process.
        until(lambda: "num_workers=1), at" in caplog.text and "other trials go on meanwhile" in caplog.text)
        (tmp_path / "go on").touch()
        result = slow.result(PATIENCE_SECONDS)
    assert against_plain(described, result) == []


def test_a_thread_whose_loader_returns_after_all_is_left_behind_no_more():
    core, clock = SimpleNamespace(changed=threading.Condition(), records={}), DrawClock()
    watch = LoaderWatchdog(core, LoaderWaitLimits(), None, None, leaves_devices=True)
    reached, opened = threading.Event(), threading.Event()

    def draw():
        with suppress(LoaderInterrupt), clock.drawing(None, in_process=False):
            reached.set()
            opened.wait()

    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    assert reached.wait(PATIENCE_SECONDS)
    assert clock.abandon()
    watch._left_behind(SimpleNamespace(name="trial"), clock)
    watch._look()
    assert watch.is_left_behind(thread)
    opened.set()
    clock.released()
    thread.join(PATIENCE_SECONDS)
    watch._look()
    assert not watch.is_left_behind(thread), "a later thread may have the same number"


@pytest.mark.parametrize("way", ["prune", "shutdown"])
def test_a_trial_that_is_over_waits_for_a_hanging_loader_no_longer_than_until_its_warning(gate, way, how):
    with running(**how, devices="cpu:1", loader_warning=0.4, loader_timeout=None) as pool:
        stream = pool.events()
        hung = pool.submit(task(train=batches(gate, 0), epochs=3), events=stream)
        assert isinstance(stream.get(PATIENCE_SECONDS), Reported)
        hung.proceed()
        assert gate.reached.wait(PATIENCE_SECONDS)
        if way == "prune":
            hung.prune()
            assert hung.result(PATIENCE_SECONDS).status == "pruned"
            assert against_plain(drawing(), pool.submit(drawing()).result(PATIENCE_SECONDS)) == []
    assert hung.result(0).status == {"prune": "pruned", "shutdown": "cancelled"}[way]


class Breaks:
    """A policy that raises once armed."""

    is_armed = False

    def choose(self, device, candidates):
        if self.is_armed:
            raise ZeroDivisionError
        return candidates[0]


@pytest.mark.parametrize("when", ["the first batch", "a later batch", "a later batch, just before"])
def test_a_pool_that_has_broken_down_leaves_a_hanging_loader_behind(gate, when, how, monkeypatch):
    """Also one that hangs on the worker of a device, as it has not waited long."""
    at_first, leaves = when == "the first batch", when != "a later batch, just before"
    if not leaves:
        monkeypatch.setattr(loader_watchdog, "_PATIENCE_SECONDS", 1000.0)

    def first_batch():
        gate.hang()
        yield from one_batch()

    policy = Breaks()
    with running(**how, devices="cpu:2", max_concurrent=2, policy=policy, loader_timeout=None) as pool:
        stream = pool.events()
        other = pool.submit(task(), events=stream)
        assert isinstance(stream.get(PATIENCE_SECONDS), Reported)
        hung = pool.submit(task(train=first_batch if at_first else batches(gate, 1), epochs=3))
        assert gate.reached.wait(PATIENCE_SECONDS)
        until(lambda: hung.state == "preparing" or pool._pool._records[hung.key].is_detached is leaves)
        policy.is_armed = True
        with pytest.raises(ZeroDivisionError):
            other.proceed()
        for job in (other, hung):
            assert isinstance(job.result(PATIENCE_SECONDS).error, ZeroDivisionError)
    assert not gate.after, "the loader hangs still"


def test_a_slow_validation_reports_when_it_is_done(gate, how):
    def slow():
        time.sleep(0.3)
        yield from one_batch()

    described = task(validate=slow, epochs=2)
    with running(**how, devices="cpu:1") as pool:
        stream = pool.events()
        job = pool.submit(described, events=stream)
        steps = []
        while isinstance(event := stream.get(PATIENCE_SECONDS), Reported):
            steps.append(event.step)
            assert job.state == "waiting"
            job.proceed()
        assert steps == [0, 1]
        assert against_plain(described, event.result) == []


def test_an_error_after_a_long_wait_is_the_trials_own(how):
    def drawn():
        yield from one_batch()
        time.sleep(0.3)
        raise ZeroDivisionError

    with running(**how, devices="cpu:1") as pool:
        stream = pool.events()
        job = pool.submit(task(train=drawn), events=stream)
        event = stream.get(PATIENCE_SECONDS)
        assert isinstance(event, Failed)
        assert isinstance(job.result(0).error, ZeroDivisionError)


def test_a_device_is_taken_away_while_its_trial_waits_for_data(gate, how):
    described = drawing()
    with running(**how, devices="cpu:2", loader_timeout=None) as pool:
        slow = pool.submit(task(train=batches(gate, 1), epochs=3))
        assert gate.reached.wait(PATIENCE_SECONDS)
        for name in ("cpu:0", "cpu:1"):
            pool.remove_device(name)
            pool.add_device(name)
        gate.opened.set()
        assert slow.result(PATIENCE_SECONDS).status == "completed"
        assert against_plain(described, pool.submit(described).result(PATIENCE_SECONDS)) == []


class Slow(IterableDataset):
    def __iter__(self):
        for number in range(4):
            time.sleep(0.1 * (number % 2))
            yield X[number * 4 : number * 4 + 4] + torch.rand(4, 8), Y[number * 4 : number * 4 + 4]


@pytest.mark.parametrize("way", ["data-parallel", pytest.param("pipelined", marks=pytest.mark.slow)])
def test_batches_side_by_side_that_come_late_change_no_bit(way):
    described = task(train=DataLoader(Slow(), batch_size=None), accumulate=4, epochs=2, parallel=PARALLEL[way])
    with running(devices="cpu:2", num_shards=2) as pool:
        result = pool.submit(described).result(PATIENCE_SECONDS)
        assert pool.stats().steps_by_way[way]
    assert against_plain(described, result) == []


@pytest.mark.parametrize("option", ["loader_warning", "loader_timeout"])
@pytest.mark.parametrize("value", [0, -1.0, "soon", True, float("nan")])
def test_what_is_no_time_is_refused(option, value):
    with pytest.raises(ConfigError, match=f"{option} must be a time above 0"), running(**{option: value}):
        pass


def hung_in(gate, number=1, after=1, **changes):
    """A task like `drawing()`'s whose loader hangs at a batch, once it has been begun so often."""
    passes = []

    def drawn():
        passes.append(1)
        for at in range(3):
            if len(passes) > after and at == number:
                gate.hang()
            yield X[:8] + torch.rand(8, 8) + random.random(), Y[:8]

    return drawing(train=drawn, **changes)


def fused(**options):
    arguments = {"devices": "cpu:1", "fusion": "on", "fusion_size": 4, "loader_warning": 0.2}
    return running(**(arguments | options))


def running_group(pool, count=2, **changes):
    jobs = [pool.submit(drawing(seed=seed, epochs=100_000, **changes), name=f"member {seed}") for seed in range(count)]
    until(lambda: all(job.progress.group_size == count for job in jobs))
    return jobs


def test_a_joiner_that_hangs_fails_alone_and_the_next_one_joins(gate, caplog):
    """It hangs in the system, on the thread that has members begin."""
    with fused(loader_timeout=SECONDS) as pool:
        members = running_group(pool)
        hung = pool.submit(hung_in(gate, number=0, after=0), name="hung")
        assert gate.reached.wait(PATIENCE_SECONDS)
        error = hung.result(PATIENCE_SECONDS).error
        assert isinstance(error, LoaderTimeoutError)
        assert f"loader_timeout is {SECONDS:g}s" in str(error)
        next_one = pool.submit(drawing(seed=7, epochs=2), name="next")
        assert next_one.result(PATIENCE_SECONDS).group_size == 3
        gate.opened.set()
        late = pool.submit(drawing(seed=8, epochs=2), name="late")
        assert late.result(PATIENCE_SECONDS).group_size == 3
        for job in members:
            assert job.state not in OVER
            job.cancel()
        assert not gate.after, "it must not have drawn from another's streams"
    assert any("'hung' has been waiting for" in record.getMessage() for record in caplog.records)
    assert any("left behind" in record.getMessage() for record in caplog.records)


def test_a_member_of_a_group_that_hangs_in_python_is_interrupted_and_the_others_go_on(gate, caplog):
    def drawn():
        yield X[:8], Y[:8]
        if begun:
            with hanging():
                while True:
                    time.sleep(0.01)
        begun.append(1)
        yield X[:8], Y[:8]

    begun = []
    with fused(loader_timeout=SECONDS) as pool:
        jobs = [pool.submit(drawing(seed=seed, epochs=100_000), name=f"member {seed}") for seed in range(2)]
        hung = pool.submit(drawing(train=drawn, epochs=40), name="hung")
        assert isinstance(hung.result(PATIENCE_SECONDS).error, LoaderTimeoutError)
        steps = [job.progress.step for job in jobs]
        until(lambda: all(job.progress.step > step for job, step in zip(jobs, steps, strict=True)))
        for job in jobs:
            job.cancel()
        assert {job.result(PATIENCE_SECONDS).group_size for job in jobs} == {3}
    assert any("'hung' has been waiting for" in record.getMessage() for record in caplog.records)


def test_one_that_hangs_before_anybody_is_fused_with_it_does_not_keep_others_from_beginning(gate):
    with fused(loader_timeout=SECONDS) as pool:
        hung = pool.submit(hung_in(gate, number=0, after=0), name="hung")
        assert gate.reached.wait(PATIENCE_SECONDS)
        others = [pool.submit(drawing(seed=seed)) for seed in (1, 2)]
        assert isinstance(hung.result(PATIENCE_SECONDS).error, LoaderTimeoutError)
        assert {other.result(PATIENCE_SECONDS).status for other in others} == {"completed"}
        gate.opened.set()
    assert not gate.after


@pytest.mark.cases(1)
@pytest.mark.parametrize("workers", [0, 1])
def test_trials_whose_first_batches_come_slowly_are_one_group(workers, monkeypatch):
    """Each trial leaves the preparer to the next trial, so that several trials are in preparation at once."""
    sizes, form = [], GroupJobLauncher._formed

    def counted(launcher, entry, others, *arguments):
        sizes.append(1 + len(others))
        return form(launcher, entry, others, *arguments)

    monkeypatch.setattr(GroupJobLauncher, "_formed", counted)
    loader = DataLoader(SlowSamples(), batch_size=8, num_workers=workers)
    with fused() as pool:
        pool.run([task(seed=seed, train=loader, epochs=1) for seed in range(4)])
    assert sizes == [4]


class SlowSamples(Dataset):
    def __getitem__(self, index):
        if index == 0:
            with hanging():
                time.sleep(0.8)
        return X[index], Y[index]

    def __len__(self):
        return 24


@pytest.mark.cases(1 / 3)
def test_a_joiner_that_is_cancelled_waits_for_its_loader_no_longer_than_until_its_warning():
    reached = threading.Event()

    def drawn():
        reached.set()
        with hanging():
            while True:
                time.sleep(0.01)
        yield X[:8], Y[:8]

    with fused(loader_warning=0.4, loader_timeout=None) as pool:
        members = running_group(pool)
        hung = pool.submit(drawing(train=drawn), name="hung")
        assert reached.wait(PATIENCE_SECONDS)
        hung.cancel()
        result = hung.result(PATIENCE_SECONDS)
        assert (result.status, result.error) == ("cancelled", None)
        for job in members:
            job.cancel()


@pytest.mark.parametrize(("patience", "carriers"), [(0.05, 2), (PATIENCE_SECONDS, 1)])
def test_a_trial_whose_turn_comes_while_a_group_chooses_runs_though_the_group_leaves_it(
    gate, monkeypatch, patience, carriers
):
    """A slow loader of the first trial brings a second preparer, and fusion does not pay."""
    is_choosing, has_made, made, make = threading.Event(), threading.Event(), [], GroupJobLauncher.make

    def choose(*_):
        is_choosing.set()
        assert has_made.wait(1.0 if carriers == 1 else PATIENCE_SECONDS) is (carriers == 2)
        return GroupSizeChoice(size=1, why="so it is said")

    def made_late(launcher, entry, *given, **named):
        if entry.job.name == "second":
            gate.opened.set()
            assert is_choosing.wait(PATIENCE_SECONDS)
        trial = make(launcher, entry, *given, **named)
        if entry.job.name == "second":
            made.append(trial)
            has_made.set()
        return trial

    monkeypatch.setattr(group_jobs, "_PATIENCE_SECONDS", patience)
    monkeypatch.setattr(GroupJobLauncher, "make", made_late)
    monkeypatch.setattr(GroupSizeChooser, "choose", choose)
    monkeypatch.setattr(GroupSizeChooser, "refuse", lambda *_: None)
    with fused(fusion="auto") as pool:
        jobs = [pool.submit(hung_in(gate, number=0, after=0), "first"), pool.submit(drawing(seed=7), "second")]
        assert [job.result(PATIENCE_SECONDS).status for job in jobs] == ["completed", "completed"]
    assert len(made) == carriers


class Awaited(Dataset):
    """Samples that wait for a file."""

    def __init__(self, path):
        self.path = path

    def __len__(self):
        return 24

    def __getitem__(self, index):
        until(self.path.exists)
        return X[index], Y[index]


def dropping(width, p):
    return nn.Sequential(nn.Linear(8, width), nn.Dropout(p), nn.Linear(width, 4))


@pytest.mark.cases(1 / 3)
def test_a_trial_whose_data_hang_while_it_is_compared_keeps_only_that_comparison_waiting(monkeypatch, tmp_path):
    """The first trial's carrier draws a batch of the second to compare both; trials behind the two do not wait."""
    monkeypatch.setattr(group_jobs, "_PATIENCE_SECONDS", 0.05)
    loader = DataLoader(Awaited(tmp_path / "there"), batch_size=8, num_workers=1)
    with fused(max_concurrent=4) as pool:
        with together():
            compared = [
                pool.submit(task(model=partial(dropping, 16, 0.1))),
                pool.submit(task(model=partial(dropping, 16, 0.3), train=loader)),
            ]
            others = [pool.submit(task(model=partial(dropping, width, 0.1))) for width in (24, 32)]
        try:
            assert [job.result(PATIENCE_SECONDS).status for job in others] == ["completed", "completed"]
        finally:
            (tmp_path / "there").touch()
        assert [job.result(PATIENCE_SECONDS).status for job in compared] == ["completed", "completed"]
