"""What a user sets on a loader's parts between two passes counts, though a trial draws from copies of them."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from hydra_tune import HydraExecutor, TrainTask, train_plain

EPOCHS = 3


class Numbered(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.full((4,), index / 16), torch.full((1,), float(index % 3))


class Shifted(IterableDataset):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for index in range(16):
            yield torch.full((4,), index / 16 + self.epoch), torch.full((1,), float(index % 3))


def sampled():
    data = Numbered()
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, 1, 0, shuffle=True, seed=0))
    return loader, loader.sampler.set_epoch


def streamed():
    loader = DataLoader(Shifted(), batch_size=4)
    return loader, loader.dataset.set_epoch


def model():
    return nn.Linear(4, 1)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01)


def by_hand(loader, set_epoch):
    torch.manual_seed(0)
    module, losses = model(), []
    optimizer = sgd(module.parameters())
    for epoch in range(EPOCHS):
        set_epoch(epoch)
        total = 0.0
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(module(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item() * len(inputs)
        losses.append(total / 16)
    return losses


def described(loader, set_epoch):
    epochs = iter(range(EPOCHS))

    def train():
        set_epoch(next(epochs))
        return loader

    return TrainTask(model=model, optimizer=sgd, train=train, loss=nn.functional.mse_loss, epochs=EPOCHS)


@pytest.mark.parametrize("made", [sampled, streamed])
def test_set_epoch_of_a_loader_that_a_callable_gives_again(made):
    expected = by_hand(*made())
    assert len(set(expected)) == EPOCHS
    plain = train_plain(described(*made()))
    assert [report["train_loss"] for report in plain.history] == expected
    with HydraExecutor(devices="cpu:1") as pool:
        result = pool.run(described(*made()))
    assert [report["train_loss"] for report in result.history] == expected


class Mining(Sampler):
    """Samples by losses that the user's code notes, in a tensor or a list."""

    def __init__(self, losses):
        self.losses, self.passes = losses, []

    def __len__(self):
        return 16

    def __iter__(self):
        self.passes.append(1)
        return iter(torch.multinomial(torch.as_tensor(self.losses), 16, replacement=True).tolist())


def mine(sampler, epoch):
    for index in range(4):
        sampler.losses[index] += 9.0 * (epoch + 1)


def weigh(sampler, epoch):
    sampler.weights = torch.arange(16.0) ** (epoch + 1)


def weigh_in_place(sampler, epoch):
    sampler.weights[:8] += 9 * (epoch + 1)


def grow(sampler, epoch):
    sampler.indices = list(range(4 * (epoch + 2)))


@pytest.mark.parametrize(
    ("sampler", "change"),
    [
        (lambda: WeightedRandomSampler(torch.ones(16), 16), weigh),
        (lambda: WeightedRandomSampler(torch.ones(16), 16), weigh_in_place),
        (lambda: SubsetRandomSampler(list(range(4))), grow),
        (lambda: Mining(torch.ones(16)), mine),
        (lambda: Mining([1.0] * 16), mine),
        (lambda: Mining(np.ones(16)), mine),
    ],
)
def test_a_sampler_that_the_users_code_changes_after_each_report(sampler, change):
    def made():
        loader = DataLoader(Numbered(), batch_size=4, sampler=sampler())
        return loader, lambda epoch: change(loader.sampler, epoch)

    def described(loader, changed):
        loss = nn.functional.mse_loss
        stop = lambda history: changed(len(history) - 1)  # noqa: E731
        return TrainTask(model=model, optimizer=sgd, train=loader, loss=loss, epochs=EPOCHS, stop=stop)

    def weights_by_hand(loader, changed):
        torch.manual_seed(0)
        module = model()
        optimizer = sgd(module.parameters())
        for epoch in range(EPOCHS):
            for inputs, targets in loader:
                nn.functional.mse_loss(module(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
            changed(epoch)
        return module.weight

    expected = weights_by_hand(*made())
    assert torch.equal(train_plain(described(*made())).module().weight, expected)
    with HydraExecutor(devices="cpu:1") as pool:
        assert torch.equal(pool.run(described(*made())).module().weight, expected)
