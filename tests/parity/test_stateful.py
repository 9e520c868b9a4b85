"""Programs that change their own Python state come to a plain loop's weights, buffers, losses and reports, bit for bit.

The plain loop is written here, and shares nothing with the package.
"""

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hydra_tune import HydraExecutor, TrainTask, train_plain
from tests.parity.exact import differences, without_seconds
from tests.parity.stateful import PROGRAMS, Program

pytestmark = [
    pytest.mark.filterwarnings("ignore:Lazy modules are a new feature"),
    pytest.mark.filterwarnings("ignore:.*non-writable"),
]


def _batches(handle: Any, size: int | None, *, shuffle: bool) -> Iterable[Any]:
    if isinstance(handle, DataLoader):
        return handle
    if isinstance(handle, Dataset):
        return DataLoader(handle, size, shuffle=shuffle and not isinstance(handle, IterableDataset))
    return handle()


def _on(device: str, values: Any) -> Any:
    if device == "cpu":
        return values  # itself, as steps may change it
    return tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, values)


def _evaluated(task: TrainTask, module: Any, device: str) -> dict[str, float]:
    if task.validate is None:
        return {}
    totals: dict[str, float] = {}
    samples = 0
    module.eval()
    with torch.no_grad():
        for drawn in _batches(task.validate, task.batch_size, shuffle=False):
            batch = _on(device, drawn)
            values = (
                {"loss": task.loss(module(batch[0]), batch[1])}
                if task.evaluate is None
                else task.evaluate(module, batch)
            )
            samples += len(batch[0])
            for name, value in values.items():
                totals[name] = totals.get(name, 0.0) + float(value) * len(batch[0])
    module.train()
    return {f"val_{name}": total / samples for name, total in totals.items()}


def by_hand(made: Program, device: str = "cpu") -> dict[str, Any]:
    """Train a program as its script would, on a device of torch's."""
    task = made.task
    torch.manual_seed(task.seed)
    random.seed(task.seed)
    np.random.seed(task.seed)  # noqa: NPY002
    module = task.model().to(device)
    optimizer = task.optimizer(task.param_groups(module) if task.param_groups else list(module.parameters()))
    scheduler = task.scheduler(optimizer) if task.scheduler else None
    history = []
    for epoch in range(task.epochs):
        module.train()
        total, samples = 0.0, 0
        for drawn in _batches(task.train, task.batch_size, shuffle=True):
            batch = _on(device, drawn)
            loss = task.step(module, batch) if task.step else task.loss(module(batch[0]), batch[1])
            total += loss.item() * len(batch[0])
            samples += len(batch[0])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None and task.scheduler_interval == "step":
                scheduler.step()
        history.append(
            {"step": epoch, "epoch": epoch, "train_loss": total / samples, **_evaluated(task, module, device)}
        )
        if scheduler is not None and task.scheduler_interval == "epoch":
            scheduler.step()
    return outcome(made, history, module.state_dict())


def by_train_plain(made: Program) -> dict[str, Any]:
    result = train_plain(made.task)
    return outcome(made, without_seconds(result.history), result.module().state_dict())


def by_pool(made: Program) -> dict[str, Any]:
    with HydraExecutor(devices="cpu:1") as pool:
        (result,) = pool.run([made.task])
    if result.error is not None:
        raise result.error
    return outcome(made, without_seconds(result.history), result.state_dict())


def outcome(made: Program, history: list[dict[str, float]], state: Any) -> dict[str, Any]:
    return {"history": history, "state": dict(state), "seen": made.seen()}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_pool_gives_the_plain_loops_bits(name):
    assert list(differences(by_hand(PROGRAMS[name]()), by_pool(PROGRAMS[name]()))) == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_train_plain_gives_the_plain_loops_bits(name):
    assert list(differences(by_hand(PROGRAMS[name]()), by_train_plain(PROGRAMS[name]()))) == []
