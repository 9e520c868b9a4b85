"""A fused search whose members wait at a report until it is killed; `python -m tests.support.killed_group FOLDER PRECISION`."""

import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import TensorDataset

from hydra_tune import EventStream, HydraExecutor, Reported, TrainTask
from hydra_tune.task import Precision

SEEDS = range(4)
HELD_STEPS = 300
_GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(96, 32, generator=_GENERATOR, dtype=torch.float64)
Y = torch.randint(4, (96,), generator=_GENERATOR)


def model(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4)).to(dtype)


def described(seed: int, precision: Precision = "float32") -> TrainTask:
    """150 epochs of twelve steps, with a report after every fifth step; without autocast in float64."""
    dtype = torch.float64 if precision == "float32" else torch.float32
    return TrainTask(
        model=partial(model, dtype),
        optimizer=partial(torch.optim.AdamW, lr=1e-3 * (seed + 1)),
        scheduler=partial(ExponentialLR, gamma=0.99),
        train=TensorDataset(X.to(dtype), Y),
        validate=TensorDataset(X[:24].to(dtype), Y[:24]),
        batch_size=8,
        loss=functional.cross_entropy,
        epochs=150,
        report_every=5,
        seed=seed,
        precision=precision,
    )


def main(folder: str, precision: Precision) -> None:
    """Train all members up to a report, save them there, and wait until somebody kills this process.

    Members that are saved at different steps would end at different times, and a smaller group has other last digits.
    """
    torch.set_num_threads(1)
    events, held = EventStream(), 0
    with HydraExecutor(devices="cpu:1", checkpoint_dir=Path(folder), fusion="on") as pool:
        jobs = [pool.submit(described(seed, precision), str(seed), events) for seed in SEEDS]
        while held < len(jobs):
            event = events.get()
            if isinstance(event, Reported) and event.step == HELD_STEPS:
                held += 1
            elif isinstance(event, Reported):
                event.job.proceed()
        for job in jobs:
            job.checkpoint()
        print("saved", flush=True)  # noqa: T201 - to the process that kills this one
        jobs[0].result()


if __name__ == "__main__":
    main(*sys.argv[1:])
