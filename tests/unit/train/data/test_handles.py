"""Data handles become batches the same way everywhere."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hydra_tune.errors import TaskError
from hydra_tune.train.data.handles import make_loader, num_batches, num_samples

ROWS = TensorDataset(torch.arange(10))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(5))


class Unsized(Stream):
    def __len__(self):
        raise NotImplementedError


class Endless:
    def __iter__(self):
        return iter(range(5))


def rows(loader):
    return [batch[0].tolist() for batch in loader]


def test_a_dataset_is_shuffled_only_where_asked_and_keeps_its_last_batch():
    assert rows(make_loader(ROWS, 4, shuffle=False)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    torch.manual_seed(0)
    shuffled = rows(make_loader(ROWS, 4, shuffle=True))
    torch.manual_seed(0)
    assert shuffled == rows(DataLoader(ROWS, batch_size=4, shuffle=True))
    assert shuffled != rows(make_loader(ROWS, 4, shuffle=False))


def test_an_iterable_dataset_has_only_its_own_order():
    assert [batch.tolist() for batch in make_loader(Stream(), 2, shuffle=True)] == [[0, 1], [2, 3], [4]]


def test_a_loader_is_used_as_it_is_and_a_callable_called():
    loader = DataLoader(ROWS, batch_size=3)
    assert make_loader(loader, None, shuffle=True) is loader
    batches = [torch.ones(1)]
    assert make_loader(lambda: batches, None, shuffle=True) is batches


def test_what_cannot_be_iterated_is_named():
    with pytest.raises(TaskError, match="returned NoneType, which cannot be iterated"):
        make_loader(lambda: None, None, shuffle=False)
    with pytest.raises(TaskError, match="TensorDataset is a Dataset, so batch_size is needed"):
        make_loader(ROWS, None, shuffle=False)


def test_batches_are_counted_where_that_needs_no_drawing():
    assert num_batches(ROWS, 4) == 3
    assert num_batches(ROWS, 5) == 2
    assert num_batches(DataLoader(ROWS, batch_size=4)) == 3
    assert num_batches(DataLoader(Stream(), batch_size=4)) is None
    assert num_batches(Stream(), 2) is None
    assert num_batches(DataLoader(ROWS, sampler=Endless())) is None
    assert num_batches(DataLoader(Unsized(), batch_size=4)) is None
    assert num_batches(lambda: pytest.fail("called")) is None


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.zeros(3, 2), 3),
        ((torch.zeros(5), torch.zeros(2)), 5),
        ({"weight": torch.tensor(0.5), "x": [torch.zeros(4)]}, 4),
        ({"weight": 0.5}, 1),
        (torch.tensor(1.0), 1),
        ({"boxes": torch.zeros(0, 4), "x": torch.zeros(6, 2)}, 6),
        ((torch.zeros(0, 4), torch.zeros(0)), 0),
    ],
)
def test_samples_are_the_first_dimension_of_the_first_tensor_that_has_one(batch, count):
    assert num_samples(batch) == count
