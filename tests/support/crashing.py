"""Trials of which one ends its process, however that is asked for; `crashing` is imported by sweeps, too."""

import ctypes
import os
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

from hydra_tune import TrainTask
from tests.support.losable import fail_otherwise_with_all, fail_with_all, fail_with_own

NUM_TRIALS, BAD, EPOCHS = 8, 3, 3
torch.manual_seed(0)
X = torch.randn(64, 8)
Y = X.sum(1, keepdim=True)


def fault():
    """A segmentation fault."""
    ctypes.string_at(0)


def wait():
    """No crash: time for one from outside."""
    Path("there").touch()
    while not Path("go").exists():
        time.sleep(0.01)


WAYS = {
    "fault": fault,
    "exit": partial(os._exit, 0),
    "lose": fail_with_all,
    "lose own": fail_with_own,
    "lose otherwise": fail_otherwise_with_all,
    "wait": wait,
    "none": None,
}


def batches():
    return [(X[at : at + 16], Y[at : at + 16]) for at in range(0, 64, 16)]


class Net(nn.Sequential):
    """Counts its batches, as a buffer."""

    def __init__(self):
        super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))


def step(crash, module, batch):
    module.seen += 1
    if (
        crash is not None and module.seen == 10
    ):  # the second of the second epoch, after eight of training and validation
        crash()
    return nn.functional.mse_loss(module(batch[0]), batch[1])


def task_of(number, way="none"):
    """The task of one of the trials; the bad one ends its process."""
    return TrainTask(
        model=Net,
        optimizer=partial(torch.optim.AdamW, lr=1e-3 * (1 + number)),
        step=partial(step, WAYS[way] if number == BAD else None),
        train=batches,
        validate=batches,
        epochs=EPOCHS,
        seed=number,
    )
