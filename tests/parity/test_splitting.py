"""Batches of one step on several devices give the bits that they give one after the other, and those of the plain loop."""

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional

from hydra_tune import Result, TrainTask, train_plain
from hydra_tune.pool.job import EventStream, Failed, Finished, Job, Reported
from hydra_tune.train.loop import optimizer_step
from hydra_tune.train.parallel import cost_model
from hydra_tune.train.parallel.cost_model import DATA_PARALLEL, ONE_DEVICE, PIPELINED
from hydra_tune.train.parallel.ordered_queues import QueuedParallelStep
from hydra_tune.train.parallel.parallel_step import ParallelUnit
from tests.parity import models
from tests.support.parallel import PARALLEL
from tests.support.tracker import StorageTracker
from tests.unit.pool.tasks import SAMPLES, X, Y, against_plain, mlp, running, task

pytestmark = pytest.mark.usefixtures("captured_once")

PATIENCE_SECONDS = 60.0


class Meeting:
    """Entered around units: those after the first `skip` wait until `count` are under way at once, until that has been."""

    def __init__(self, count: int = 2, skip: int = 5) -> None:
        self._barrier = threading.Barrier(count)
        self._lock = threading.Lock()
        self._skip = skip
        self.was_held = False
        self.threads: set[str] = set()
        self.inside: Callable[[], object] = list

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self.threads.add(threading.current_thread().name)
            self._skip -= 1
            meets = self._skip < 0 and not self.was_held
        if meets:
            self._barrier.wait(PATIENCE_SECONDS)
            self.was_held = True
            self.inside()
        yield


def noisy() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 16), nn.Dropout(0.1), nn.Linear(16, 4)
    )


class Whole(nn.Module):
    """Cannot be captured: draws from Python's stream."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * (1.0 + 0.1 * random.random())
        return self.inner(x) if float(x.sum()) > -1e9 else x[:, :4]


class Shaped(nn.Module):
    """Cannot be captured, and gives the same for each sample whatever is beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.inner(row) for row in torch.tensor(x.tolist())])


class NormedTwice(nn.Module):
    """Two shards overwrite one buffer: a batch's second use comes before the next batch's first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.second(self.norm(self.first(x)))))


class Noise(nn.Module):
    """Normal numbers: how many a generator draws for them depends on where it stands."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x + 0.1 * torch.randn_like(x))


class Tied(nn.Module):
    """The first and the last shard share a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.inner = nn.Sequential(nn.ReLU(), nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(self.first(x)))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def normed_and_dropped() -> nn.Module:
    layers: list[nn.Module] = []
    for width in (8, 16, 16):
        layers += [nn.Linear(width, 16), nn.BatchNorm1d(16, momentum=0.3), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(16, 4))


def accumulating(**changes: Any) -> TrainTask:
    """Four epochs of one step: four batches of five samples, and one of four."""
    return task(**({"accumulate": 5, "batch_size": 5, "epochs": 4, "report_every": 1} | changes))


SPLIT = {
    "adamw": partial(accumulating),
    "dropout": partial(accumulating, model=noisy),
    "clipped": partial(accumulating, model=noisy, max_grad_norm=0.1),
    "float16": partial(accumulating, precision="float16"),
    "bfloat16 clipped": partial(accumulating, model=noisy, precision="bfloat16", max_grad_norm=0.1),
    "in several rounds": partial(accumulating, model=noisy, accumulate=24, batch_size=1, epochs=2),
    "left over": partial(accumulating, accumulate=3, model=noisy),
    "pieces": partial(accumulating, accumulate=1, split_batches=3, model=noisy, report_every=2),
    "pieces of several batches": partial(accumulating, accumulate=2, split_batches=2, model=noisy, max_grad_norm=0.1),
    "tied": partial(accumulating, model=Tied),
    "gpt2": partial(models.build, "gpt2", accumulate=3, epochs=3),
}
NORMED = {
    "normed": partial(accumulating, model=normed),
    "normed and dropped": partial(accumulating, model=normed_and_dropped, max_grad_norm=0.1),
}
IN_ORDER = {
    "normed twice": partial(accumulating, model=NormedTwice),
    "whole": partial(accumulating, model=Whole),
    "whole in pieces": partial(accumulating, model=Shaped, split_batches=2),
    "noise": partial(accumulating, model=Noise),
    "native dropout": partial(models.build, "mlp_native", accumulate=4, epochs=2, report_every="epoch"),
}


def run(described: TrainTask, way: str | None = None, **options: Any) -> tuple[Result, int]:
    """Train alone, steps split this way only; returns the result and how many devices had a part in it."""
    tracker = StorageTracker()
    with running(instrument=tracker, **options) as pool:
        result = pool.submit(replace(described, parallel=PARALLEL[way])).result(PATIENCE_SECONDS)
        stats = pool.stats()
    devices = list(stats.devices.values())
    assert way is None or set(stats.steps_by_way) <= {way, ONE_DEVICE}
    for seen, device in zip(sorted(tracker.peak_bytes), sorted(d.peak_bytes for d in devices if d.units), strict=True):
        assert seen <= device <= max(d.budget_bytes for d in devices)
    return result, sum(device.units > 0 for device in devices)


# Of each of the others there is one with more to it, but for gpt2, which takes seconds to capture.
IN_TEAMS = {"bfloat16 clipped", "in several rounds", "pieces of several batches"}
IN_EVERY_RUN = IN_TEAMS | {"float16", "left over", "tied", "normed and dropped"}


def on_devices(names: Iterable[str], *pools: tuple[str, Any]) -> list[Any]:
    """Each of the tasks on each of the pools; in every run of the tests the pools take turns, with some of the tasks."""
    return [
        pytest.param(
            *(name, devices, cut),
            marks=[pytest.mark.slow] * (name not in IN_EVERY_RUN or (row + column) % len(pools) > 0),
        )
        for row, name in enumerate(names)
        for column, (devices, cut) in enumerate(pools)
    ]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "devices", "cut"), on_devices(SPLIT, ("cpu:2", 1), ("cpu:3", 3)))
def test_a_trial_on_several_devices_is_bitwise(name, devices, cut):
    described = SPLIT[name]()
    result, count = run(described, DATA_PARALLEL, devices=devices, num_shards=cut)
    assert against_plain(described, result) == []
    assert count > 1, "no device has helped"


@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "devices", "cut"), on_devices(SPLIT | NORMED, ("cpu:3", "layer"), ("cpu:2", 2)))
def test_a_pipelined_trial_is_bitwise(name, devices, cut):
    described = (SPLIT | NORMED)[name]()
    result, count = run(described, PIPELINED, devices=devices, num_shards=cut)
    assert against_plain(described, result) == []
    assert count == int(devices[-1]), "each device is home to a shard"


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in IN_TEAMS)) for name in SPLIT]
)
def test_a_trial_whose_batches_go_through_each_shard_in_teams_is_bitwise(monkeypatch, name):
    monkeypatch.setattr(cost_model, "fits", lambda *_: False)
    monkeypatch.setattr(cost_model, "_SHARDS_FOR_EACH", 1)
    made = mock.Mock(wraps=optimizer_step.GroupedDataParallelStep)
    monkeypatch.setattr(optimizer_step, "GroupedDataParallelStep", made)
    described = SPLIT[name]()
    result, count = run(described, DATA_PARALLEL, devices="cpu:2", num_shards="layer")
    assert against_plain(described, result) == []
    assert count == 2, "no device has helped"
    assert made.call_count > 0


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "native dropout")) for name in IN_ORDER]
)
def test_a_trial_whose_batches_depend_on_each_other_runs_in_order(name):
    described = IN_ORDER[name]()
    result, count = run(described, devices="cpu:2", num_shards=None if "whole" in name else 3)
    assert against_plain(described, result) == []
    assert count == 1


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_units_of_one_trial_are_under_way_at_once(count):
    meeting, described = Meeting(count, skip=6), accumulating(parallel=PARALLEL[DATA_PARALLEL])
    with running(devices=f"cpu:{count}", instrument=meeting, num_shards=1) as pool:
        result = pool.submit(described).result(PATIENCE_SECONDS)
    assert meeting.was_held
    assert len(meeting.threads) == count
    assert against_plain(described, result) == []
    assert result.units_run == 6 * 4, "as many as without help"


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", [DATA_PARALLEL, PIPELINED])
def test_a_trial_is_cut_for_a_device_and_its_copies_lie_under_the_budget(way):
    described = accumulating(model=deep, **wide())
    result, count = run(described, way, devices="cpu:2", device_memory="160KiB")
    assert against_plain(described, result) == []
    assert result.num_shards > 1
    assert count == 2


def deep() -> nn.Module:
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])


def loaded(way: str, **options: Any) -> list[int]:
    """Bytes of parameters that came to a device until the end of the second step, and in the two after it."""
    found = []
    for epochs in (2, 4):
        with running(devices="cpu:2", **options) as pool:
            result = pool.submit(accumulating(model=deep, epochs=epochs, parallel=PARALLEL[way], **wide())).result(
                PATIENCE_SECONDS
            )
            stats = pool.stats()
        assert result.num_shards > 2
        assert stats.steps_by_way == {way: epochs - 1}
        counts = [c for d in stats.devices.values() for c in (d.bytes_in_by_kind, d.bytes_across_by_kind)]
        found.append(sum(count.get("parameters", 0) for count in counts))
    return [found[0], found[1] - found[0]]


def test_a_pipeline_leaves_parameters_where_they_are():
    _, copied = loaded(DATA_PARALLEL, num_shards=4)
    first, later = loaded(PIPELINED, num_shards=4)
    parameters = 8 * 4 * (64 * 64 + 64)
    assert copied >= 2 * parameters, "a copy for each of two steps"
    assert first < 2 * parameters, "each shard comes to a device, and half of them go to the other"
    assert later == 0


@pytest.mark.cases(1 / 3)
def test_behind_a_slow_link_large_parameters_are_not_copied():
    """The pool has measured its link by the second step."""
    inputs = torch.randn(20, 256, generator=torch.Generator().manual_seed(5))
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(dim=1))
    described = accumulating(model=lambda: nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]), train=data)
    with running(devices="cpu:2", num_shards=4, link_bandwidth="5MB/s") as pool:
        result = pool.submit(described).result(PATIENCE_SECONDS)
        told = pool.stats().steps_by_way
    assert against_plain(described, result) == []
    assert sum(told.values()) == 3
    assert DATA_PARALLEL not in told


def test_a_pipeline_loads_parameters_that_do_not_fit_less_often():
    """A shard is loaded for all forwards and for all backwards and the update, not for each unit of five batches."""
    memory = "160KiB"
    apart, piped = loaded(DATA_PARALLEL, device_memory=memory)[1], loaded(PIPELINED, device_memory=memory)[1]
    parameters = 2 * 8 * 4 * (64 * 64 + 64)  # in two steps
    assert piped <= 3 * parameters
    assert apart > 2 * piped


@pytest.fixture
def order(monkeypatch) -> list[tuple[str, int]]:
    """Kinds and shards of the units that pipelines have run, in the order in which they ended."""
    found: list[tuple[str, int]] = []
    after = QueuedParallelStep._after

    def noting(self: QueuedParallelStep, rank: int, device: str) -> list[ParallelUnit]:
        found.append((self._running[rank].kind, self._running[rank].shard))
        return after(self, rank, device)

    monkeypatch.setattr(QueuedParallelStep, "_after", noting)
    return found


def test_a_pipeline_updates_a_shard_as_soon_as_all_its_backwards_have_run(order):
    result, _ = run(accumulating(model=deep, epochs=2, **wide()), PIPELINED, devices="cpu:2", num_shards=4)
    assert result.status == "completed"
    last = 0
    for shard in reversed(range(4)):
        backwards = [place for place, unit in enumerate(order) if unit == ("backward", shard)]
        assert len(backwards) == 4
        assert order.index(("update", shard)) > backwards[-1] > last
        last = backwards[-1]
    assert order.index(("update", 3)) < last, "while there is more to do"


def test_a_pipeline_has_no_updates_before_all_gradients_are_known(order):
    described = accumulating(model=deep, epochs=2, max_grad_norm=0.1, **wide())
    assert run(described, PIPELINED, devices="cpu:2", num_shards=4)[0].status == "completed"
    assert {kind for kind, _ in order} == {"forward", "backward"}


class Watching(torch.optim.SGD):
    """Looks again and again which parameters have a gradient while it steps; notes how often it saw something else."""

    def __init__(self, params: Any, seen: list[int]) -> None:
        super().__init__(params, lr=0.1)
        self.note = seen.append

    def step(self, closure: Any = None) -> None:
        looks = set()
        for _ in range(20):
            looks.add(tuple(p.grad is not None for group in self.param_groups for p in group["params"]))
            time.sleep(0.0005)
        self.note(len(looks))
        super().step(closure)


@pytest.mark.cases(1 / 3)
def test_an_update_finds_no_gradients_of_what_runs_at_the_same_time():
    """The optimizer steps whatever has a gradient, and the other device makes some meanwhile."""
    seen: list[int] = []
    options = wide() | {"activations": "recompute"}  # a graph that is kept has stand-ins of its own
    described = accumulating(model=deep, optimizer=partial(Watching, seen=seen), **options)
    result, _ = run(described, PIPELINED, devices="cpu:2", num_shards=8)
    assert len(seen) == 7 * 4, (
        "one of each of 4 steps' updates, of which two shards share one; none of the pool's tries"
    )
    assert set(seen) == {1}
    assert against_plain(described, result) == []


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("way", "name"),
    [
        (PIPELINED, "normed and dropped"),
        pytest.param(PIPELINED, "gpt2", marks=pytest.mark.slow),
        pytest.param(PIPELINED, "float16", marks=pytest.mark.slow),
        (DATA_PARALLEL, "dropout"),
    ],
)
def test_units_in_queues_give_the_same_bits_wherever_they_run(way, name, monkeypatch):
    """What is due is exact by itself: no order comes from which device is free when."""
    if way == DATA_PARALLEL:
        monkeypatch.setattr(cost_model, "fits", lambda *_: False)
        monkeypatch.setattr(cost_model, "_SHARDS_FOR_EACH", 1)
    due, stream = QueuedParallelStep._due, random.Random(4)

    def anywhere(self: QueuedParallelStep, home: str) -> ParallelUnit | None:
        found = due(self, home)
        return None if found is None else replace(found, near=f"cpu:{stream.randrange(3)}")

    monkeypatch.setattr(QueuedParallelStep, "_due", anywhere)
    described = (SPLIT | NORMED)[name]()
    result, count = run(described, way, devices="cpu:3", num_shards="layer")
    assert against_plain(described, result) == []
    assert count == 3


def wide() -> dict[str, Any]:
    """Samples for a model of width 64."""
    inputs = torch.randn(20, 64, generator=torch.Generator().manual_seed(5))
    return {"train": torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(dim=1))}


@pytest.mark.parametrize("way", [pytest.param(DATA_PARALLEL, marks=pytest.mark.slow), PIPELINED])
def test_a_second_trial_in_the_middle_changes_no_bit_of_either(way):
    parallel = PARALLEL[way]
    first = accumulating(model=noisy, epochs=6, parallel=parallel)
    second = accumulating(model=noisy, seed=8, parallel=parallel)
    with running(devices="cpu:2", num_shards=3) as pool:
        events = EventStream()
        one, other = pool.submit(first, events=events), None
        while one.state not in ("completed", "failed"):
            event = events.get(PATIENCE_SECONDS)
            assert event is not None
            if isinstance(event, Reported):
                other = other or (pool.submit(second) if event.step == 2 else None)
                event.job.proceed()
        assert other is not None
        results = one.result(PATIENCE_SECONDS), other.result(PATIENCE_SECONDS)
    assert against_plain(first, results[0]) == []
    assert against_plain(second, results[1]) == []


def test_it_is_told_how_steps_ran():
    with running(devices="cpu:2", num_shards=2) as pool:
        pool.submit(accumulating()).result(PATIENCE_SECONDS)
        told = pool.stats().steps_by_way
    assert sum(told.values()) == 3, "all but the first, of which it is not known how long it takes"
    assert set(told) <= {ONE_DEVICE, DATA_PARALLEL, PIPELINED}


def test_with_enough_trials_none_is_split():
    tasks = [accumulating(seed=seed, report_every="epoch") for seed in range(2)]
    sums: list[str] = []
    with running(devices="cpu:1", instrument=partial(_noted, sums)) as pool:
        results = pool.run(tasks)
    assert [against_plain(*pair) for pair in zip(tasks, results, strict=True)] == [[], []]
    assert len(sums) == 2 * 6 * 4, "no unit beyond those of batches one after the other"


@contextmanager
def _noted(units: list[str]) -> Iterator[None]:
    units.append(threading.current_thread().name)
    yield


def test_no_batch_is_split_off_that_the_host_has_no_room_for():
    described = accumulating()
    with running(devices="cpu:2", host_memory="17KiB") as pool:
        result = pool.submit(described).result(PATIENCE_SECONDS)
        units = [device.units for device in pool.stats().devices.values()]
    assert against_plain(described, result) == []
    assert sorted(units) == [0, 24]


ONE_STEP = {
    DATA_PARALLEL: 6,
    PIPELINED: 18,
}  # units until two may be under way: a step that is not split, of one shard or two
CUT = {DATA_PARALLEL: 1, PIPELINED: 2}


@pytest.mark.parametrize(
    ("way", "end"), [(DATA_PARALLEL, Job.prune), (DATA_PARALLEL, Job.cancel), (PIPELINED, Job.prune)]
)
def test_a_trial_that_is_stopped_while_two_of_its_units_run_leaves_nothing(way, end):
    meeting, jobs = Meeting(skip=ONE_STEP[way]), list[Job]()
    meeting.inside = lambda: [end(job) for job in jobs]
    with running(devices="cpu:2", instrument=meeting, num_shards=CUT[way]) as pool:
        jobs.append(pool.submit(accumulating(epochs=50, parallel=PARALLEL[way])))
        result = jobs[0].result(PATIENCE_SECONDS)
        after = pool.submit(accumulating(seed=9)).result(PATIENCE_SECONDS)
    assert meeting.was_held
    assert result.status in ("pruned", "cancelled")
    assert against_plain(accumulating(seed=9), after) == []


@pytest.mark.parametrize("way", [DATA_PARALLEL, PIPELINED])
def test_a_unit_that_fails_beside_another_ends_its_trial_alone(way):
    meeting = Meeting(skip=ONE_STEP[way])

    def fail() -> None:
        if threading.current_thread().name == "hydra-cpu:1":
            raise RuntimeError("the device has a fault")

    meeting.inside = fail
    with running(devices="cpu:2", instrument=meeting, num_shards=CUT[way]) as pool:
        events = EventStream()
        failing = pool.submit(accumulating(report_every="epoch", epochs=50, parallel=PARALLEL[way]), events=events)
        told = []
        while not any(isinstance(event, Failed | Finished) for event in told):
            event = events.get(PATIENCE_SECONDS)
            assert event is not None
            told.append(event)
            if isinstance(event, Reported):
                event.job.proceed()
        after = pool.submit(accumulating(seed=9)).result(PATIENCE_SECONDS)
    assert [isinstance(event, Failed) for event in told].count(True) == 1
    assert "the device has a fault" in str(failing.result().error)
    assert against_plain(accumulating(seed=9), after) == []


@pytest.mark.parametrize("way", [DATA_PARALLEL, PIPELINED])
def test_a_paused_trial_goes_on_with_all_its_batches(way):
    meeting, jobs = Meeting(skip=ONE_STEP[way]), list[Job]()
    described = accumulating(model=noisy, parallel=PARALLEL[way])
    meeting.inside = lambda: [job.pause() for job in jobs]
    with running(devices="cpu:2", instrument=meeting, num_shards=CUT[way]) as pool:
        jobs.append(pool.submit(described))
        other = accumulating(seed=4, epochs=1)
        assert against_plain(other, pool.submit(other).result(PATIENCE_SECONDS)) == []
        while not jobs[0].paused:
            time.sleep(0.01)
        assert jobs[0].state == "running"
        jobs[0].unpause()
        result = jobs[0].result(PATIENCE_SECONDS)
    assert against_plain(described, result) == []


def broken_in(epoch: int, batch: int, what: Any) -> Callable[[], Iterator[Any]]:
    """Passes over the samples, in one of which a batch is another one, or an error."""
    passes = iter(range(1000))

    def draw() -> Iterator[Any]:
        now = next(passes)
        for index, start in enumerate(range(0, 24, 5)):
            if (now, index) == (epoch, batch):
                if isinstance(what, Exception):
                    raise what
                yield what
            else:
                yield X[start : start + 5], Y[start : start + 5]

    return draw


def bad(scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    return X[:5] * scale, Y[:5]


@pytest.mark.parametrize(
    ("way", "batch"),
    [
        pytest.param(DATA_PARALLEL, 0, marks=pytest.mark.slow),
        pytest.param(DATA_PARALLEL, 2, marks=pytest.mark.slow),
        (DATA_PARALLEL, 4),
        (PIPELINED, 2),
    ],
)
def test_a_bad_loss_ends_the_trial_where_a_plain_loop_ends_it(way, batch):
    def described(on_bad_loss: str) -> TrainTask:
        return accumulating(
            train=broken_in(2, batch, bad(float("nan"))), on_bad_loss=on_bad_loss, parallel=PARALLEL[way]
        )

    with running(devices="cpu:2", num_shards=2) as pool:
        failed, pruned = (pool.submit(described(way)).result(PATIENCE_SECONDS) for way in ("fail", "prune"))
        units = [device.units for device in pool.stats().devices.values()]
    assert min(units) > 0
    assert "the training loss is nan in step 3 (epoch 2)" in str(failed.error)
    expected = train_plain(described("prune"))
    assert pruned.status == expected.status == "pruned"
    assert pruned.metrics == expected.metrics


def test_an_error_of_the_data_comes_after_the_batches_before_it():
    """A loss that ends the trial as pruned comes before an error of the batch after it, as in a plain loop."""

    drawn: list[int] = []

    def train() -> Iterator[Any]:
        for index, start in enumerate(range(0, 24, 5)):
            drawn.append(index)
            if len(drawn) == 8:
                raise RuntimeError("the disk is gone")
            yield bad(float("nan")) if len(drawn) == 7 else (X[start : start + 5], Y[start : start + 5])

    described = accumulating(train=train, on_bad_loss="prune")
    result, count = run(described, DATA_PARALLEL, devices="cpu:2")
    assert (result.status, result.error) == ("pruned", None)
    assert count == 2
    assert len(drawn) == 8, "the batch after it was drawn ahead"


def reusing() -> Iterator[Any]:
    """Draws every batch into the same memory."""
    inputs, targets = X[:8].clone(), Y[:8].clone()
    for start in range(0, 24, 8):
        inputs.copy_(X[start : start + 8])
        targets.copy_(Y[start : start + 8])
        yield inputs, targets


def drawing() -> Iterator[Any]:
    """Moves the streams with every batch."""
    for start in range(0, 24, 8):
        yield X[start : start + 8] + 0.1 * torch.rand(8, 8) + 0.01 * random.random(), Y[start : start + 8]


@pytest.mark.parametrize(
    ("way", "data"),
    [
        (DATA_PARALLEL, drawing),
        (PIPELINED, reusing),
        pytest.param(DATA_PARALLEL, reusing, marks=pytest.mark.slow),
        pytest.param(PIPELINED, drawing, marks=pytest.mark.slow),
    ],
)
def test_batches_that_are_drawn_ahead_are_those_of_a_plain_loop(way, data):
    described = accumulating(model=noisy, train=data, accumulate=3)
    result, count = run(described, way, devices="cpu:2", num_shards=2)
    assert against_plain(described, result) == []
    assert count == 2


@pytest.mark.parametrize("way", [pytest.param(DATA_PARALLEL, marks=pytest.mark.slow), PIPELINED])
def test_validation_between_helped_steps(way):
    described = accumulating(model=noisy, validate=SAMPLES, max_grad_norm=0.5, epochs=5)
    result, count = run(described, way, devices="cpu:3", num_shards=3)
    assert against_plain(described, result) == []
    assert count == 3


@pytest.mark.parametrize("way", [DATA_PARALLEL, pytest.param(PIPELINED, marks=pytest.mark.slow)])
def test_helped_and_unhelped_steps_take_turns(way):
    """Each report waits for an answer, and another trial comes and goes: steps are split or not as devices are free."""
    described = accumulating(model=noisy, epochs=8, parallel=PARALLEL[way])
    with running(devices="cpu:2", num_shards=2) as pool:
        events = EventStream()
        job = pool.submit(described, events=events)
        others = []
        while job.state not in ("completed", "failed"):
            event = events.get(PATIENCE_SECONDS)
            assert event is not None
            if isinstance(event, Reported):
                if event.step % 3 == 0:
                    others.append(pool.submit(task(loss=functional.cross_entropy, seed=event.step)))
                event.job.proceed()
        assert all(other.result(PATIENCE_SECONDS).status == "completed" for other in others)
        assert against_plain(described, job.result(PATIENCE_SECONDS)) == []
