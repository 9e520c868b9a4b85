"""What other threads of the process do beside a pool is nothing to its trials, nor what trials do to them."""

# ruff: noqa: NPY002 - the global functions are what is tested

import gc
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from random import random as raw_random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from hydra_tune import TrainTask, train_plain
from hydra_tune.memory.block import TensorBlock
from hydra_tune.memory.block_release import bring_home
from hydra_tune.pool.job import OVER, EventStream, Reported
from tests.unit.pool.tasks import PATIENCE_SECONDS, against_plain, running, task

pytestmark = pytest.mark.timeout(120)

X = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
Y = X.argmax(1) % 4
MEDDLING = threading.Event()


def meddle() -> None:
    """Another thread draws and seeds, at the worst moment: while a trial's own code runs."""
    if MEDDLING.is_set() and not torch.compiler.is_compiling():
        thread = threading.Thread(target=draw_and_seed)
        thread.start()
        thread.join()


def draw_and_seed() -> None:
    """With a normal number kept before and another one after."""
    torch.rand(3), random.gauss(0, 1), np.random.randn()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    torch.rand(3), random.gauss(0, 1), np.random.randn()


def noise() -> float:
    """An odd count of normal numbers, of which each second one is kept for later."""
    return random.gauss(0, 0.1) + 0.1 * np.random.randn() + 0.1 * raw_random() + random.choice([0.1, 0.2])


class Net(nn.Module):
    """Dropout of both kinds; `whole`, so that no graph can follow it."""

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.meddle = meddle if whole else None  # a captured step that reads the event would be captured again
        meddle()
        self.last.bias.data += noise()

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(self.first(x), 0.3, training=self.training)
        if self.meddle is not None:
            self.meddle()
            x = (x if x.sum() > 0 else -x) + noise()
            self.meddle()
        return self.last(torch.native_dropout(x, 0.3, self.training)[0])


def captured() -> nn.Module:
    return Net(whole=False)


def whole() -> nn.Module:
    return Net(whole=True)


def noisy() -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, 24, 8):
        meddle()
        added = torch.rand(8, 8) + noise()
        meddle()
        yield X[start : start + 8] + added + noise(), Y[start : start + 8]


@pytest.mark.parametrize("model", [captured, whole])
def test_trials_are_the_same_whatever_other_threads_draw_and_seed(model):
    described = task(model=model, train=noisy, validate=noisy)
    MEDDLING.set()
    try:
        with running() as pool:
            result = pool.submit(described).result(PATIENCE_SECONDS)
    finally:
        MEDDLING.clear()
    assert not against_plain(described, result)


@pytest.mark.cases(1 / 3)
def test_trials_beside_a_plain_loop_of_the_same_data():
    """It seeds, draws and computes in another thread; the trials are what they are without it."""
    tasks = [task(model=model, train=noisy_parts, epochs=20) for model in (whole, captured)]
    with running() as pool:
        jobs = [pool.submit(described) for described in tasks]
        runs = 0
        while not runs or any(job.state not in OVER for job in jobs):
            train_plain(replace(tasks[runs % 2], epochs=2))
            runs += 1
        results = [job.result(PATIENCE_SECONDS) for job in jobs]
    for described, result in zip(tasks, results, strict=True):
        assert not against_plain(described, result)


@pytest.mark.parametrize("model", [captured, whole])
def test_trials_run_their_own_code_at_the_same_time(model):
    both = threading.Barrier(2, timeout=PATIENCE_SECONDS)

    def meeting() -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in noisy():
            if MEDDLING.is_set():
                both.wait()
            yield x + noise(), y

    tasks = [task(model=model, train=meeting, seed=seed) for seed in (1, 2)]
    events = EventStream()
    try:
        with running(devices="cpu:2") as pool:
            jobs = [pool.submit(described, events=events) for described in tasks]
            for _ in jobs:
                assert isinstance(events.get(PATIENCE_SECONDS), Reported)
            MEDDLING.set()  # nothing is left to be captured, for which all that runs here is waited for
            for job in jobs:
                job.proceed()
            for _ in jobs:
                assert isinstance(events.get(PATIENCE_SECONDS), Reported)
            for job in jobs:
                job.proceed()
            results = [job.result(PATIENCE_SECONDS) for job in jobs]
    finally:
        MEDDLING.clear()
    for described, result in zip(tasks, results, strict=True):
        assert not against_plain(described, result)


def noisy_parts() -> list[Any]:
    order = np.random.permutation(torch.randperm(3).tolist()).tolist()
    random.shuffle(order)
    return [(X[8 * i : 8 * i + 8], Y[8 * i : 8 * i + 8]) for i in order]


class Standing(nn.Linear):
    """Cannot be captured; overwrites its batch if told so."""

    def __init__(self, *, overwrites: bool) -> None:
        super().__init__(8, 4)
        self.overwrites = overwrites

    def forward(self, x: Tensor) -> Tensor:
        x = x.mul_(0.5) if self.overwrites else x
        x = super().forward(x)
        return x if x.sum() > 0 else -x


def standing(x: Tensor, *, overwrites: bool) -> TrainTask:
    return task(model=lambda: Standing(overwrites=overwrites), train=lambda: [(x, Y[: len(x)])], epochs=2)


@pytest.mark.parametrize("rows", [24, 8])
def test_a_batch_that_the_code_of_a_whole_model_leaves_alone_is_not_written_to(rows):
    """It may be a file that takes no writes; and another thread's autograd may have saved it, which checks that."""
    data = X.clone()
    described = standing(data[:rows], overwrites=False)
    other = nn.Linear(8, 1)
    loss = other(data).sum()
    with running() as pool:
        result = pool.submit(described).result(PATIENCE_SECONDS)
        assert pool.stats().devices["cpu:0"].bytes_out_by_kind.get("inputs", 0) == 0
    loss.backward()
    assert not against_plain(described, result)


@pytest.mark.parametrize("rows", [24, 8])
def test_what_the_code_of_a_whole_model_changes_in_its_batch_shows_there(rows):
    mine, plain = X.clone(), X.clone()
    with running() as pool:
        result = pool.submit(standing(mine[:rows], overwrites=True)).result(PATIENCE_SECONDS)
    assert not against_plain(standing(plain[:rows], overwrites=True), result)
    assert mine.equal(plain)
    assert not mine.equal(X)


class Told:
    """Batches whose code looks at the model that they are for: mining, say, or noise as large as the weights."""

    def __init__(self) -> None:
        self.model: nn.Module | None = None
        self.seen: list[list[bytes]] = []

    def build(self) -> nn.Module:
        layers = [nn.Linear(8, 32), *(nn.Linear(32, 32) for _ in range(6)), nn.Linear(32, 4)]
        self.model = nn.Sequential(*layers)
        return self.model

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, 24, 8):
            self.seen.append([p.detach().numpy().tobytes() for p in self.model.parameters()])
            yield X[start : start + 8], Y[start : start + 8]


@pytest.mark.cases(1 / 3)
def test_a_trials_own_code_reads_its_weights_between_units_wherever_they_are(tmp_path):
    """Beside others that need the room: on devices, on the host, and on disk."""
    found = [Told() for _ in range(3)]
    tasks = [task(model=told.build, train=told.batches, epochs=4, seed=n) for n, told in enumerate(found)]
    options = {"device_memory": "40KiB", "host_memory": "48KiB", "spill_dir": tmp_path, "num_shards": 4}
    with running(devices="cpu:2", **options) as pool:
        results = pool.run(tasks)
        assert pool.stats().disk.bytes_written > 0
    for described, told, result in zip(tasks, found, results, strict=True):
        seen, told.seen = told.seen, []
        assert not against_plain(described, result)
        assert seen == told.seen


class Robbed(Told):
    """While its code reads the weights, another thread moves them: to where they are not being read from."""

    def __init__(self) -> None:
        super().__init__()
        self.stayed: list[bool] = []

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in super().batches():
            yield batch
            weight = next(self.model.parameters())
            read = StorageWeakRef(weight.untyped_storage())  # as an operator that has begun knows it
            groups = [g for g in gc.get_objects() if type(g) is TensorBlock and any(t is weight for t in g.tensors)]
            for group in groups:
                thread = threading.Thread(target=bring_home, args=(group,))
                thread.start()
                thread.join(PATIENCE_SECONDS)
                assert weight.untyped_storage()._cdata != read.cdata, "nothing was moved"
                self.stayed.append(not read.expired())


@pytest.mark.cases(1 / 3)
def test_what_a_trials_own_code_is_reading_stays_when_it_is_moved():
    told = Robbed()
    described = task(model=told.build, train=told.batches, epochs=1)
    with running() as pool:
        result = pool.submit(described).result(PATIENCE_SECONDS)
    assert result.error is None
    assert told.stayed == [True] * 3


class Noisy(torch.optim.SGD):
    """Adds noise to what it has updated, as Langevin dynamics does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for parameter in [p for group in self.param_groups for p in group["params"] if p.grad is not None]:
            parameter.add_(torch.randn_like(parameter) + noise(), alpha=1e-3)


@pytest.mark.parametrize("model", [captured, whole])
@pytest.mark.parametrize(
    "options", [{}, {"optimizer_placement": "host"}, {"devices": "cpu:2"}], ids=["device", "host", "side by side"]
)
def test_an_optimizer_that_draws_draws_from_the_trials_stream(model, options):
    described = task(model=model, optimizer=partial(Noisy, lr=0.1), train=noisy, accumulate=2)
    with running(**options) as pool:
        result = pool.submit(described).result(PATIENCE_SECONDS)
    assert not against_plain(described, result)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_an_optimizer_of_a_fused_member_draws_from_the_members_stream(dropout):
    def net():
        return nn.Sequential(nn.Linear(8, 16), nn.Dropout(dropout), nn.Linear(16, 4))

    members = [
        task(model=net, optimizer=partial(Noisy, lr=lr), train=noisy, seed=seed) for seed, lr in enumerate((0.1, 0.05))
    ]
    with running(fusion="on") as pool:
        results = pool.run(members)
    assert {result.group_size for result in results} == {2}
    for member, result in zip(members, results, strict=True):
        for name, value in train_plain(member).module().state_dict().items():
            torch.testing.assert_close(result.module().state_dict()[name], value, rtol=0, atol=1e-6)


TRIED, DRAWN = threading.Event(), threading.Event()


class Waits(torch.optim.SGD):
    """Waits, when it is first tried, until another thread has drawn."""

    def zero_grad(self, set_to_none=True):
        TRIED.set()
        assert DRAWN.wait(PATIENCE_SECONDS)
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            group["lr"] *= 0.9


def drawn() -> list[float]:
    return [torch.rand(()).item(), random.random(), np.random.random()]


@pytest.mark.parametrize("cut", [None, 2])
def test_what_another_thread_draws_is_not_drawn_again_after_the_pool_has_tried_code(cut):
    """The pool puts random streams back after it has tried an optimizer."""
    TRIED.clear(), DRAWN.clear()
    with running(num_shards=cut) as pool:
        job = pool.submit(task(optimizer=partial(Waits, lr=0.1)))
        assert TRIED.wait(PATIENCE_SECONDS)
        torch.manual_seed(7), random.seed(7), np.random.seed(7)
        seen = drawn()
        DRAWN.set()
        job.result(PATIENCE_SECONDS)
        seen += drawn()
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    assert seen == drawn() + drawn()
