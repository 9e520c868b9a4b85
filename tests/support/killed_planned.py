"""A search of planned steps with checkpoints that may be killed at any moment: a pair, or one group. Started by tests."""

from pathlib import Path
from unittest import mock

import torch

from hydra_tune import HydraExecutor
from hydra_tune.checkpoint.tensors import save_tensors
from hydra_tune.pool.fusion import group_matcher
from tests.unit.pool.fusion.test_planned_steps import task

EPOCHS = 6
MEMORY = {"pair": "280KiB", "group": "390KiB"}
"""Of a device: two groups of two fit it with their steps in turn, or one of four with its step planned."""


def search(pool: HydraExecutor) -> dict[str, torch.Tensor]:
    """Train four trials to the end, from their last checkpoints if there are any; returns all that has to be the same.

    They report after every second and every third step by turns, in the middle of epochs and at their ends.
    """
    found = [None if pool.checkpoint_dir is None else pool.find_checkpoint(str(seed)) for seed in range(4)]
    paths = [None if one is None else one.path for one in found]
    described = [task(seed, epochs=EPOCHS, report_every=2 + seed % 2) for seed in range(4)]
    # A slow machine would have other groups, and other bits.
    with mock.patch.multiple(group_matcher, _SETTLED_SECONDS=2.0, _PATIENCE_SECONDS=60.0):
        jobs = [pool.submit(one, str(seed), resume_from=paths[seed]) for seed, one in enumerate(described)]
        results = [job.result() for job in jobs]
    tensors = {}
    for job, trained in zip(jobs, results, strict=True):
        if trained.error is not None:
            raise trained.error
        tensors[f"{job.name}.members"] = torch.tensor(trained.group_size)
        tensors |= {f"{job.name}.{name}": tensor.contiguous() for name, tensor in trained.state_dict().items()}
        for index, state in trained.optimizer_state_dict()["state"].items():
            tensors |= {f"{job.name}.optimizer.{index}.{key}": torch.as_tensor(value) for key, value in state.items()}
        for key in ("train_loss", "val_loss"):
            losses = [entry[key] for entry in trained.history]
            tensors[f"{job.name}.{key}"] = torch.tensor(losses, dtype=torch.float64)
    return tensors


def main(folder: Path, result: Path, kind: str) -> None:
    """The search in a device of which its groups need more, saved after every second step as well."""
    torch.set_num_threads(1)
    with HydraExecutor(
        devices="cpu:1",
        device_memory=MEMORY[kind],
        fusion="on",
        fusion_size=4,
        fusion_planner="on",
        checkpoint_dir=folder,
        checkpoint_every=2,
    ) as pool:
        tensors = search(pool)
    save_tensors(result, tensors)
