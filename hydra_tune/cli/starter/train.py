"""The task of space.yaml: a small classifier of two spirals. Put your own model and data in their places.

`hydra-tune init` copies the file. `hydra-tune check`, `hydra-tune plan` and `hydra-tune sweep` import the file, and call
`build` with the parameters of a trial. The import must train nothing, because each command begins with the import.
"""

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hydra_tune import TrainTask


def spirals(num_points: int, seed: int) -> TensorDataset:
    """Return points on two spirals, (num_points, 2) float32, and their labels, (num_points,) int64."""
    source = torch.Generator().manual_seed(seed)
    labels = torch.arange(num_points) % 2
    turns = torch.rand(num_points, generator=source)
    angles = 2 * math.pi * turns + math.pi * labels
    points = torch.stack([turns * angles.cos(), turns * angles.sin()], dim=1)
    return TensorDataset(points + 0.03 * torch.randn(num_points, 2, generator=source), labels)


# Made once, for all trials. A DataLoader, or a function that returns batches, will do as well.
TRAIN, VALID = spirals(1024, seed=0), spirals(512, seed=1)


def network(width: int, dropout: float) -> nn.Module:
    """Return the model. The model stays on the CPU here; hydra-tune moves the model to a device."""
    return nn.Sequential(
        nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 2)
    )


def evaluate(module: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return the metrics of one validation batch; reports have their means, as val_loss and val_accuracy."""
    points, labels = batch
    logits = module(points)
    loss = nn.functional.cross_entropy(logits, labels)
    return {"loss": loss, "accuracy": (logits.argmax(1) == labels).float().mean()}


def build(lr: float, width: int, dropout: float, epochs: int) -> TrainTask:
    """Describe one trial; the arguments are the parameters of space.yaml.

    No loop, no backward and no .to(device) is needed: hydra-tune trains, with the numbers of a plain loop.
    """
    return TrainTask(
        model=partial(network, width, dropout),
        optimizer=partial(torch.optim.AdamW, lr=lr),
        loss=nn.functional.cross_entropy,
        train=TRAIN,
        validate=VALID,
        evaluate=evaluate,
        batch_size=64,
        epochs=epochs,
    )
