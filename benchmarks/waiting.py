"""Trials whose units take a given time without using a core: layers that sleep, so that many devices fit few cores."""

import time
from functools import partial

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hydra_tune import TrainTask

BATCH_SIZE = 2


@torch.library.custom_op("hydra_benchmark::wait", mutates_args=())
def wait(x: torch.Tensor, seconds: float) -> torch.Tensor:
    """Zeros, later."""
    time.sleep(seconds)
    return torch.zeros_like(x)


@wait.register_fake
def _(x, seconds):  # noqa: ARG001
    return torch.empty_like(x)


class WaitingLayer(nn.Module):
    """A linear layer that takes `seconds` forward. No module inside, so that it is cut as one.

    The backward does not wait: an operator with a backward of its own would have the model run whole.
    """

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.bias = nn.Parameter(torch.zeros(width))
        self.seconds = seconds

    def forward(self, x):  # noqa: D102
        y = functional.relu(functional.linear(x, self.weight, self.bias))
        return y + wait(y.detach(), self.seconds)


def model(num_layers: int, width: int, seconds: float) -> nn.Module:
    return nn.Sequential(*[WaitingLayer(width, seconds) for _ in range(num_layers)])


def build(num_layers: int, width: int, seconds: float, num_steps: int) -> TrainTask:
    """A trial of `num_steps` steps. A forward unit takes `seconds`, and so does a backward unit, which runs it again."""
    x = torch.randn(num_steps * BATCH_SIZE, width, generator=torch.Generator().manual_seed(0))
    return TrainTask(
        model=partial(model, num_layers, width, seconds),
        optimizer=partial(torch.optim.AdamW, lr=1e-4),
        loss=functional.mse_loss,
        train=TensorDataset(x, x),
        batch_size=BATCH_SIZE,
        report_every=num_steps,
    )
