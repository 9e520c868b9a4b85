"""Trials whose state is several times host memory: the rest goes to disk and comes back, and not one bit of the numbers changes."""

import gc
import itertools
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn

from hydra_tune import HydraExecutor, Reported, TrainTask, train_plain
from hydra_tune.errors import BudgetError, ConfigError, SpillError
from hydra_tune.memory.block import Block, Group, Kind
from tests.parity.exact import differences, without_seconds

WIDTH, DEPTH, ROWS = 48, 10, 32
HOST_BYTES = 48 * 1024  # the optimizer state of the largest shard takes 38 KiB
DEVICE_BYTES = 128 * 1024
PATIENCE_SECONDS = 60


def data():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(4 * ROWS, WIDTH, generator=generator), torch.randint(0, 4, (4 * ROWS,), generator=generator)


X, Y = data()


def make_model():
    layers = []
    for _ in range(DEPTH):
        layers += [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 4))


def task(seed=0, **options):
    return TrainTask(
        **{
            "model": make_model,
            "optimizer": partial(torch.optim.AdamW, lr=1e-2),
            "loss": nn.CrossEntropyLoss(),
            "train": lambda: [(X[i : i + ROWS], Y[i : i + ROWS]) for i in range(0, len(X), ROWS)],
            "validate": lambda: [(X[:ROWS], Y[:ROWS])],
            "epochs": 3,
            "seed": seed,
            "scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
        }
        | options
    )


def pool(folder, **options):
    return HydraExecutor(
        **{
            "devices": "cpu:1",
            "device_memory": DEVICE_BYTES,
            "host_memory": HOST_BYTES,
            "spill_dir": folder,
            "num_shards": DEPTH,
        }
        | options
    )


def against_plain(plain, result):
    """Where a result differs from the plain loop's."""
    if result.error is not None:
        raise result.error
    found = [*differences(without_seconds(plain.history), without_seconds(result.history), "history")]
    found += differences(dict(plain.module.state_dict()), dict(result.state_dict()), "state")
    return found + [*differences(plain.optimizer.state_dict(), result.optimizer_state_dict(), "optimizer")]


def one_thread(function):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return function()
    finally:
        torch.set_num_threads(threads)


def state_bytes():
    plain = train_plain(task(epochs=1))
    kept = [t for entry in plain.optimizer.state.values() for t in entry.values()]
    return sum(t.nbytes for t in [*plain.module.state_dict().values(), *kept])


def ours(folder):
    return sorted(folder.glob("hydra-tune-*"))


def files(folder):
    return sorted(folder.glob("hydra-tune-*/block-*.bin"))


def host_bytes_seen(since):
    """Bytes of the host copies of all blocks but the batches' made after this one, counted by their storages."""
    found = [thing for thing in gc.get_objects() if type(thing) in (Block, Group)]
    blocks = [block for block in found if block.number > since.number and block.kind is not Kind.INPUTS]
    return sum(block.host.untyped_storage().nbytes() for block in blocks if block.host is not None)


@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
def test_a_trial_several_times_host_memory_is_exact(tmp_path, devices):
    assert state_bytes() > 4 * HOST_BYTES
    seen, units, first = [], itertools.count(1), Block(Kind.INPUTS, 1, 1)

    @contextmanager
    def instrument():
        yield
        if next(units) % 25 == 0:  # looking through all objects takes long
            seen.append(host_bytes_seen(first))

    with pool(tmp_path, devices=devices, instrument=instrument) as executor:
        (result,) = executor.run([task()])
        disk = executor.stats().disk
    assert against_plain(one_thread(lambda: train_plain(task())), result) == []
    assert result.num_shards == DEPTH
    assert 0 < max(seen) <= HOST_BYTES, "host copies that went to disk must really be gone"
    assert disk.bytes_read > 2 * state_bytes()
    assert disk.bytes_written > state_bytes()
    assert disk.stored_bytes == 0, "a completed trial leaves nothing on disk"
    assert ours(tmp_path) == []


def test_trials_share_host_memory_and_disk(tmp_path):
    with pool(tmp_path, devices="cpu:2", max_concurrent=4) as executor:
        results = executor.run([task(seed) for seed in range(4)])
        assert files(tmp_path) == []
    for seed, result in enumerate(results):
        assert against_plain(one_thread(lambda s=seed: train_plain(task(s))), result) == []
    assert ours(tmp_path) == []
