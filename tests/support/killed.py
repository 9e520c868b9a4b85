"""A process that trains with checkpoints and may be killed at any moment; started by tests, some as a script.

Run as `python -m tests.support.killed FOLDER RESULT`: goes on from what is in FOLDER, and writes the trained weights to RESULT.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from hydra_tune import HydraExecutor, SharedModule, TrainTask
from hydra_tune.checkpoint.tensors import save_tensors

NAMES = ("first", "second")
WITH_BASE = (*NAMES, "on a base")


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(32, 512), nn.ReLU(), nn.Dropout(0.2), nn.Linear(512, 256), nn.BatchNorm1d(256), nn.Linear(256, 4)
    )


BASE = SharedModule(model)


def probe() -> nn.Module:
    """A new head on the shared base."""
    made = BASE.module()
    made[-1] = nn.Linear(256, 4)
    return made


def described(seed: int, epochs: int) -> TrainTask:
    made = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(96, 32, generator=made), torch.randint(4, (96,), generator=made))
    return TrainTask(
        model=probe if seed == len(NAMES) else model,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        train=DataLoader(data, 8, shuffle=True, generator=torch.Generator().manual_seed(seed)),
        loss=functional.cross_entropy,
        scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=12 * epochs),
        scheduler_interval="step",
        epochs=epochs,
        report_every=5,
        seed=seed,
    )


def train(
    pool: HydraExecutor, epochs: int, *, names: Sequence[str] = NAMES, begun: Callable[[], object] = int
) -> dict[str, torch.Tensor]:
    """Train all to the end, from the last checkpoints if the pool has any; returns all that has to be the same."""
    jobs = []
    for seed, name in enumerate(names):
        found = None if pool.checkpoint_dir is None else pool.find_checkpoint(name)
        jobs.append(pool.submit(described(seed, epochs), name, resume_from=None if found is None else found.path))
    begun()
    tensors = {}
    for job in jobs:
        trained = job.result()
        if trained.error is not None:
            raise trained.error
        assert len(trained.history) == 12 * epochs // 5
        tensors |= {f"{job.name}.{name}": tensor.contiguous() for name, tensor in trained.state_dict().items()}
        for index, state in trained.optimizer_state_dict()["state"].items():
            tensors |= {f"{job.name}.optimizer.{index}.{key}": value for key, value in state.items()}
        losses = [entry["train_loss"] for entry in trained.history]
        tensors[f"{job.name}.losses"] = torch.tensor(losses, dtype=torch.float64)
    return tensors


def main(folder: str, result: str, epochs: str, devices: str) -> None:
    """Train to the end, from the last checkpoints."""
    torch.set_num_threads(1)
    with HydraExecutor(devices=devices, checkpoint_dir=folder, checkpoint_every=3, num_shards=2) as pool:
        # Whoever kills waits for the line.
        tensors = train(pool, int(epochs), names=WITH_BASE, begun=lambda: print("begun", flush=True))  # noqa: T201
    save_tensors(Path(result), tensors)


def main_short_of_memory(folder: Path, result: Path, epochs: int, devices: str) -> None:
    """The same where most of what is not in use has to lie on disk."""
    torch.set_num_threads(1)
    spill = folder / "spill"
    spill.mkdir(parents=True, exist_ok=True)
    with HydraExecutor(
        devices=devices,
        device_memory="3700KiB",
        host_memory="2MiB",
        spill_dir=spill,
        checkpoint_dir=folder / "saved",
        checkpoint_every=3,
        num_shards=2,
    ) as pool:
        tensors = train(pool, epochs)
    save_tensors(result, tensors)


if __name__ == "__main__":
    main(*sys.argv[1:])
