"""Loops of the user's own on a GPU: the bits of the same function called outside of a pool."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hydra_tune import HydraExecutor, LoopTask, train_plain

DEVICE, DEVICES = "cuda", "cuda:0"
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("deterministic"),
]
INPUTS = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
CLASSES = INPUTS[:, :3].argmax(dim=1)


def train(loop, width=16, lr=0.01, steps=12, moves=False):
    """Draw from the streams of the host and of the device."""
    model = nn.Sequential(nn.Linear(8, width), nn.Dropout(0.3), nn.ReLU(), nn.Linear(width, 3))
    if moves:
        model.to(loop.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    loop.register(model, optimizer, steps=steps)
    for number in range(loop.start_step, steps):
        rows = torch.randperm(len(INPUTS))[:24]
        loss = cross_entropy(model(INPUTS[rows].to(loop.device)), CLASSES[rows].to(loop.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 3 == 2:
            loop.report(loss.item(), step=number)
        loop.step()


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("memory", ["64MiB", "48MiB"])
def test_loops_side_by_side_have_the_bits_of_each_alone(memory, moves):
    """In the smaller memory one loop fits at a time: the state of the others is on the host between their units."""
    width = 16 if memory == "64MiB" else 60_000
    tasks = [LoopTask(partial(train, width=width, lr=lr, moves=moves)) for lr in (0.01, 0.02, 0.03)]
    plain = [train_plain(task, device=DEVICE) for task in tasks]
    with HydraExecutor(DEVICES, device_memory=memory) as pool:
        results = pool.run(tasks)
    for result, alone in zip(results, plain, strict=True):
        assert result.metrics == alone.metrics
        for mine, other in zip(result.module().parameters(), alone.module().parameters(), strict=True):
            assert torch.equal(mine.cpu(), other.cpu())
