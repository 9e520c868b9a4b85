"""Tasks of some milliseconds a step, that workers of Ray can import."""

from functools import partial

import torch
from torch import nn

from hydra_tune import TrainTask


def network(width, dtype=torch.float32):
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, 1)).to(dtype)


def batches(count=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(8 * count, 6, generator=generator).to(dtype)
    targets = inputs[:, :2].sum(1, keepdim=True)
    return [(inputs[at : at + 8], targets[at : at + 8]) for at in range(0, 8 * count, 8)]


def build(config):
    """A small network; `epochs` reports, or one after every `report_every` steps."""
    dtype = getattr(torch, config.get("dtype", "float32"))
    return TrainTask(
        model=partial(network, config.get("width", 16), dtype),
        optimizer=partial(torch.optim.AdamW, lr=config["lr"]),
        loss=nn.functional.mse_loss,
        train=partial(batches, config.get("batches", 4), dtype),
        epochs=config.get("epochs", 8),
        seed=config.get("seed", 0),
        report_every=config.get("report_every", "epoch"),
    )
