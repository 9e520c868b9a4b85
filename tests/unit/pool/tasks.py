"""Small tasks, and a pool that cannot block a test: every wait here ends."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hydra_tune import HydraExecutor, Result, TrainTask, train_plain
from tests.parity.exact import differences, without_seconds
from tests.support.together import together

PATIENCE_SECONDS = 60.0
_GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(24, 8, generator=_GENERATOR)
Y = torch.randint(4, (24,), generator=_GENERATOR)
SAMPLES = TensorDataset(X, Y)


def mlp() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise([8, 16, 16, 16, 4]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def one_batch() -> list[Any]:
    return [(X[:8].clone(), Y[:8].clone())]


def task(**changes: Any) -> TrainTask:
    """A classifier on 24 samples: 2 epochs of 3 steps."""
    arguments = {
        "model": mlp,
        "optimizer": partial(torch.optim.AdamW, lr=1e-2),
        "train": SAMPLES,
        "batch_size": 8,
        "loss": functional.cross_entropy,
        "epochs": 2,
        "seed": 3,
    }
    arguments |= changes
    if not isinstance(arguments["train"], TensorDataset) and not isinstance(arguments.get("validate"), TensorDataset):
        arguments["batch_size"] = None
    return TrainTask(**arguments)


def short(**changes: Any) -> TrainTask:
    """One step an epoch."""
    return task(**({"train": one_batch} | changes))


def until(condition: Callable[[], Any]) -> None:
    """Wait for that."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


class Held:
    """Given as `instrument=`: no unit begins before `go` is called."""

    def __init__(self) -> None:
        self._may_begin = threading.Event()

    def go(self) -> None:
        self._may_begin.set()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        assert self._may_begin.wait(PATIENCE_SECONDS)
        yield


@contextmanager
def running(**options: Any) -> Iterator[HydraExecutor]:
    """A pool of captured trials, unless told otherwise; its shutdown must end, and must leave nothing on any device.

    One that fuses finds what is run at once together.
    """
    pool = HydraExecutor(**({"devices": "cpu:1", "num_shards": 1} | options))

    def run(tasks: Iterable[TrainTask]) -> list[Result]:
        tasks = list(tasks)
        pool._prepare_workers(tasks)
        with together():
            jobs = [pool.submit(one) for one in tasks]
        return [job.result() for job in jobs]

    if options.get("fusion", "off") != "off":
        pool._run = run  # type: ignore[method-assign]
    try:
        yield pool
    finally:
        ending = threading.Thread(target=pool.shutdown, daemon=True)
        ending.start()
        ending.join(PATIENCE_SECONDS)
        assert not ending.is_alive(), "shutdown() does not end"
    assert {name: device.resident_bytes for name, device in pool.stats().devices.items()} == dict.fromkeys(
        pool.stats().devices, 0
    )


def train(described: TrainTask, **options: Any) -> Result:
    """Train one task in a pool of its own."""
    with running(**options) as pool:
        return pool.submit(described).result(PATIENCE_SECONDS)


def against_plain(described: TrainTask, result: Result) -> list[str]:
    """Where a result is not what the plain loop gives, to the last bit."""
    if result.error is not None:
        raise result.error
    plain = train_plain(described)
    expected = {
        "history": without_seconds(plain.history),
        "state": dict(plain.state_dict()),
        "optimizer": plain.optimizer_state_dict(),
    }
    actual = {
        "history": without_seconds(result.history),
        "state": dict(result.state_dict()),
        "optimizer": result.optimizer_state_dict(),
    }
    return list(differences(expected, actual))
