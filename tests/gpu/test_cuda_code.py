"""Code that itself speaks of CUDA, as scripts do: data, models and batches that it moves to the GPU."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from hydra_tune import HydraExecutor, TrainTask

DEVICE = DEVICES = "cuda:0"
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("deterministic"),
]
GENERATOR = torch.Generator().manual_seed(2)
X, Y = torch.randn(96, 32, generator=GENERATOR), torch.randint(8, (96,), generator=GENERATOR)
EPOCHS, SIZE = 3, 16


def net():
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


def moved_model():
    return net().to(DEVICE)


def batches(device="cpu"):
    return [(x.to(device), y.to(device)) for x, y in zip(X.split(SIZE), Y.split(SIZE), strict=True)]


def error(module, batch):
    return functional.cross_entropy(module(batch[0]), batch[1])


def moving(module, batch):
    inputs, targets = (tensor.to(DEVICE, non_blocking=True) for tensor in batch)
    return functional.cross_entropy(module(inputs), targets)


def moving_to_the_model(module, batch):
    device = next(module.parameters()).device
    return functional.cross_entropy(module(batch[0].to(device)), batch[1].to(device))


def weighing(module, batch):
    weights = torch.linspace(0.5, 1.5, 8, device=DEVICE)
    return functional.cross_entropy(module(batch[0]), batch[1], weight=weights)


def weighing_on(module, batch):
    return functional.cross_entropy(
        module(batch[0]), batch[1], weight=torch.linspace(0.5, 1.5, 8, device=batch[0].device)
    )


WEIGHTS = {}


def weighing_outside(module, batch):
    """With a tensor that the script has put on the GPU."""
    if "weight" not in WEIGHTS:
        WEIGHTS["weight"] = torch.linspace(0.5, 1.5, 8).to(DEVICE)
    return functional.cross_entropy(module(batch[0]), batch[1], weight=WEIGHTS["weight"])


def autocast_without_dtype(module, batch):
    with torch.autocast(DEVICE.partition(":")[0]):
        return functional.cross_entropy(module(batch[0]), batch[1])


def autocast_with_dtype(module, batch):
    with torch.autocast(DEVICE.partition(":")[0], torch.bfloat16):
        return functional.cross_entropy(module(batch[0]), batch[1])


PROGRAMS: dict[str, dict[str, Any]] = {
    "data on the GPU": {"train": partial(batches, DEVICE)},
    "a loader of pinned memory": {"train": lambda: DataLoader(TensorDataset(X, Y), SIZE, pin_memory=True)},
    "a loader with workers": {"train": lambda: DataLoader(TensorDataset(X, Y), SIZE, num_workers=2)},
    "a model on the GPU": {"model": moved_model},
    "both on the GPU": {"model": moved_model, "train": partial(batches, DEVICE)},
    "a step that moves": {"step": moving},
    "a step that moves to the model": {"step": moving_to_the_model},
    "a step with a tensor made on the GPU": {"step": weighing},
    "a step with a tensor made where the batch is": {"step": weighing_on},
    "a step with a tensor of the script": {"step": weighing_outside},
    "autocast without a dtype": {"step": autocast_without_dtype},
    "autocast with a dtype": {"step": autocast_with_dtype},
}


def task(name, seed=5):
    arguments = {"model": net, "train": batches, "step": error} | PROGRAMS[name]
    optimizer = partial(torch.optim.AdamW, lr=0.01)
    return TrainTask(optimizer=optimizer, epochs=EPOCHS, seed=seed, **arguments)


def by_hand(name, seed=5):
    """The losses of epochs, and the weights."""
    described = task(name, seed)
    torch.manual_seed(seed)
    module = described.model().to(DEVICE)
    optimizer = described.optimizer(module.parameters())
    losses = []
    for _ in range(EPOCHS):
        module.train()
        total = 0.0
        for batch in described.train():
            loss = described.step(module, [tensor.to(DEVICE) for tensor in batch])
            total += loss.item() * len(batch[0])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(total / len(X))
    return losses, {key: tensor.cpu() for key, tensor in module.state_dict().items()}


def assert_bits(result, expected):
    if result.error is not None:
        raise result.error
    losses, state = expected
    assert [report["train_loss"] for report in result.history] == losses
    for key, tensor in result.state_dict().items():
        assert torch.equal(tensor.cpu(), state[key]), key


@pytest.mark.parametrize("shards", [None, "layer"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_has_the_bits_of_a_loop(name, shards):
    expected = by_hand(name)
    with HydraExecutor(DEVICES, num_shards=shards) as pool:
        (result,) = pool.run([task(name)], on_error="return")
    assert_bits(result, expected)
    assert (result.num_shards > 1) == (shards == "layer" and "autocast" not in name)  # a region is in one shard


@pytest.mark.parametrize("name", PROGRAMS)
def test_fused_it_is_near_a_loop(name):
    seeds = range(3)
    with HydraExecutor(DEVICES, fusion="on") as pool:
        results = pool.run([task(name, seed) for seed in seeds], on_error="return")
    rtol = 0.05 if "autocast" in name else 1e-3
    for seed, result in zip(seeds, results, strict=True):
        if result.error is not None:
            raise result.error
        losses, _ = by_hand(name, seed)
        assert [report["train_loss"] for report in result.history] == pytest.approx(losses, rel=rtol)
    assert [result.group_size for result in results] == [3] * 3
