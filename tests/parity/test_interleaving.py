"""A trial's bits are its own: alone or among others, on any device, beside trials that are pruned and one that crashes."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from hydra_tune import HydraExecutor, Result, TrainTask
from hydra_tune.pool.job import EventStream, Reported
from hydra_tune.schedule.policies.policy import JobView
from tests.parity.observe import Seen, difference, reference_of
from tests.parity.registry import Spec, build

WATCHED = (Spec("gpt2", "ragged"), Spec("resnet", "evaluation", "sgd"), Spec("random_depth", "plateau", "lion"))
NEIGHBOURS = (
    Spec("mlp", "long", seed=1),
    Spec("cnn", "evaluation", seed=2),
    Spec("numpy_noise", seed=3),
    Spec("lstm", "shapes", seed=4),
    Spec("moving_average", "iterable", seed=6),
    Spec("spectral_norm", "one cycle", "sgd", seed=7),
    Spec("counter", "evaluation", seed=8),
)
PATIENCE_SECONDS = 120


class AnyOrder:
    """Chooses at random, from a seed: the order of units is another one each time."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, device: str, candidates: Sequence[JobView]) -> JobView:
        return self._random.choice(sorted(candidates, key=lambda view: view.order))


class Blockade:
    """Holds the first unit that runs until it is let go, so that its device takes no other."""

    def __init__(self) -> None:
        self.held, self.go, self.others = threading.Event(), threading.Event(), set[str]()
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            first = not self.held.is_set()
            self.held.set()
        if first:
            assert self.go.wait(PATIENCE_SECONDS)
        elif not self.go.is_set():
            self.others.add(threading.current_thread().name)
        yield


@pytest.fixture(scope="module")
def references():
    return reference_of(WATCHED)


def pool(instrument: Callable[[], AbstractContextManager[Any]] = nullcontext, **options: Any) -> HydraExecutor:
    return HydraExecutor(
        **({"devices": "cpu:2", "device_memory": "64MiB", "num_shards": 3} | options), instrument=instrument
    )


def assert_same(result: Result, reference: dict[str, Any]) -> None:
    if result.error is not None:
        raise result.error
    assert difference(Seen(result), reference) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", [pytest.param(spec, marks=[pytest.mark.slow] * (spec.model != "random_depth")) for spec in WATCHED], ids=str
)
def test_alone_on_either_device(references, spec):
    with pool(devices="cpu:1") as executor:
        (first,) = executor.run([build(spec)])
        assert len(executor.device_names) == 1
    assert_same(first, references[spec])
    blockade = Blockade()
    with pool(blockade) as executor:
        blocker = executor.submit(build(NEIGHBOURS[0]))
        try:
            assert blockade.held.wait(PATIENCE_SECONDS)
            second = executor.submit(build(spec)).result(PATIENCE_SECONDS)
        finally:
            blockade.go.set()
        blocker.result(PATIENCE_SECONDS)
    assert len(blockade.others) == 1, "one device was held, so all other units ran on the other one"
    assert_same(second, references[spec])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_among_seven_others_in_any_order(references, seed):
    for spec in WATCHED:
        tasks = [build(spec), *map(build, NEIGHBOURS)]
        order = random.Random(seed).sample(range(8), k=8)
        with pool(policy=AnyOrder(seed), max_concurrent=8) as executor:
            results = executor.run([tasks[index] for index in order])
        assert [result.status for result in results] == ["completed"] * 8
        assert_same(results[order.index(0)], references[spec])


def crashing(task: TrainTask) -> TrainTask:
    """The same, but its data ends in an error in the second epoch."""
    passes = iter((task.train, None))

    def train() -> Iterator[Any]:
        handle = next(passes)
        if handle is None:
            raise RuntimeError("the disk is gone")
        yield from torch.utils.data.DataLoader(handle, task.batch_size)

    return replace(task, train=train, batch_size=None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", [pytest.param(spec, marks=[pytest.mark.slow] * (spec.model != "random_depth")) for spec in WATCHED], ids=str
)
def test_beside_pruned_and_crashing_neighbours(references, spec):
    with pool(policy=AnyOrder(3), max_concurrent=8) as executor:
        events = EventStream()
        pruned = [executor.submit(build(neighbour), events=events) for neighbour in NEIGHBOURS[:4]]
        crashed = executor.submit(crashing(build(Spec("mlp", seed=9))))
        watched = executor.submit(build(spec))
        for _ in range(3 * len(pruned)):
            event = events.get(PATIENCE_SECONDS)
            if isinstance(event, Reported):
                event.job.proceed() if event.step < 2 else event.job.prune()
            if all(job.state == "pruned" for job in pruned):
                break
        result = watched.result(PATIENCE_SECONDS)
        assert [job.result(PATIENCE_SECONDS).status for job in pruned] == ["pruned"] * 4
        assert "the disk is gone" in str(crashed.result(PATIENCE_SECONDS).error)
    assert_same(result, references[spec])
