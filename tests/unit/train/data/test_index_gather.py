"""Batches that are gathered are bit for bit those of the loader, and leave every random stream where it leaves them."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from hydra_tune.errors import TaskError
from hydra_tune.shard.capture.batch import same_bits
from hydra_tune.train.data.data_feed import SkippedBatches, TrialDataFeed
from hydra_tune.train.data.index_gather import UngatheredBatches, source_of
from hydra_tune.train.data.loader_copies import TrialLoaderCopies
from hydra_tune.train.rng.rng_streams import RandomStreams

_GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(23, 3, 2, generator=_GENERATOR)
X[4, 1, 1] = float("nan")
Y = torch.randint(5, (23,), generator=_GENERATOR)
DATA = TensorDataset(X, Y)
PART = Subset(Subset(DATA, list(range(22, 1, -1))), [3, -1, 5, 7, 0, 11, 2, 3, 9])


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def shared(stream: torch.Generator) -> DataLoader:
    """A loader and its sampler that draw from one generator, the sampler also between batches."""
    return DataLoader(DATA, 4, sampler=RandomSampler(DATA, num_samples=60, generator=stream), generator=stream)


KNOWN = {
    "a Dataset": lambda: DATA,
    "in order": lambda: DataLoader(DATA, 4),
    "shuffled": lambda: DataLoader(DATA, 4, shuffle=True),
    "the last dropped": lambda: DataLoader(DATA, 4, shuffle=True, drop_last=True),
    "all in one": lambda: DataLoader(DATA, 50, shuffle=True),
    "none but a part": lambda: DataLoader(DATA, 50, drop_last=True),
    "with a generator": lambda: DataLoader(DATA, 4, shuffle=True, generator=seeded()),
    "one generator": lambda: shared(seeded()),
    "more than there are": lambda: DataLoader(DATA, 4, sampler=RandomSampler(DATA, num_samples=60)),
    "with replacement": lambda: DataLoader(DATA, 4, sampler=RandomSampler(DATA, replacement=True, generator=seeded())),
    "batches": lambda: DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 6, drop_last=False)),
    "a part of a part": lambda: DataLoader(PART, 4, shuffle=True),
    "a split": lambda: random_split(DATA, [15, 8], generator=seeded())[0],
    "one tensor": lambda: DataLoader(X, 4, shuffle=True),
}


class Own(TensorDataset):
    """Somebody's own, which draws."""

    def __getitem__(self, index):
        return tuple(tensor[index] + torch.rand(()) for tensor in self.tensors)


class Counted(TensorDataset):
    """Somebody's own, which draws when it is asked how long it is."""

    def __len__(self):
        numbers()
        return super().__len__()


def with_getitems() -> Dataset:
    data = TensorDataset(X, Y)
    data.__getitems__ = lambda indices: [data[index] for index in reversed(indices)]
    return data


UNKNOWN = {
    "a class of one's own": lambda: DataLoader(Own(X), 4, shuffle=True),
    "a length that draws": lambda: Counted(X, Y),
    "a part of a length that draws": lambda: DataLoader(Subset(Counted(X), [3, 1, 2, 5, 8]), 4, shuffle=True),
    "samples taken together": lambda: DataLoader(with_getitems(), 4, shuffle=True),
    "a collation of one's own": lambda: DataLoader(DATA, 4, collate_fn=lambda rows: [row[0] for row in rows]),
    "another sampler": lambda: DataLoader(DATA, 4, sampler=WeightedRandomSampler([1.0] * 23, 9)),
    "single samples": lambda: DataLoader(DATA, batch_size=None),
    "rows that are not in order": lambda: DataLoader(TensorDataset(X.transpose(1, 2)), 4),
    "with gradients": lambda: DataLoader(TensorDataset(torch.ones(9, requires_grad=True)), 4),
    "an order of somebody else's": lambda: DataLoader(DATA, 4, sampler=RandomSampler(range(10))),
    "a part by numpy's numbers": lambda: DataLoader(Subset(DATA, np.arange(9)), 4),
    "a list of samples": lambda: DataLoader(list(zip(X, Y, strict=True)), 4),
}


def numbers():
    """What dropout, numpy and Python would draw between two batches."""
    return torch.rand(3).tolist(), np.random.random(), random.random()  # noqa: NPY002


def plainly(make, passes=3):
    """What a plain loop draws, in a process of its own as it were."""
    streams, own, found = RandomStreams(7), TrialLoaderCopies(), []
    with streams.everything():
        handle = make()
        for _ in range(passes):
            found += [(batch, numbers(), own.states()) for batch in own.batches(handle, 4, shuffle=True)]
            found.append((None, numbers(), own.states()))
    return found


def by_feed(make, passes=3, *, gives_picks=False):
    streams, found = RandomStreams(7), []
    with streams.everything():
        handle = make()
    drawn = TrialDataFeed(4, streams.everything, streams.moves)
    drawn.gives_picks = gives_picks
    for _ in range(passes):
        for given in drawn.draw(handle, shuffle=True):
            for batch in map(given.batch, range(len(given))) if isinstance(given, UngatheredBatches) else [given]:
                with streams.everything():
                    found.append((batch, numbers(), drawn.states()))
        with streams.everything():
            found.append((None, numbers(), drawn.states()))
    return found


def assert_same(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
        assert same_bits(found, expected)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key])
    else:
        assert found == expected


@pytest.mark.parametrize("gives_picks", [False, True])
@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in (KNOWN | UNKNOWN).items()])
def test_batches_streams_and_generators_are_the_loaders(make, gives_picks):
    """Whatever else is drawn between batches, and wherever the generators stand then."""
    assert_same(by_feed(make, gives_picks=gives_picks), plainly(make))


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in KNOWN.items()])
def test_what_is_known_is_gathered(make):
    drawn = TrialDataFeed(4, RandomStreams(7).everything)
    drawn.gives_picks = True
    assert all(isinstance(picks, UngatheredBatches) for picks in drawn.draw(make(), shuffle=True))


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in UNKNOWN.items()])
def test_what_may_run_code_of_the_users_or_be_laid_out_otherwise_is_not(make):
    assert source_of(make()) is None


def test_a_loader_with_workers_or_of_a_class_of_ones_own_is_not_known():
    class Loader(DataLoader):
        pass

    assert source_of(DataLoader(DATA, 4, num_workers=1)) is None
    assert source_of(Loader(DATA, 4)) is None


def test_streams_are_swapped_in_for_the_beginning_of_a_pass_alone():
    streams, entered = RandomStreams(7), []

    def own_code():
        entered.append(None)
        return streams.everything()

    assert len(list(TrialDataFeed(4, own_code).draw(DataLoader(DATA, 4, shuffle=True), shuffle=True))) == 6
    assert len(entered) == 1


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in KNOWN.items()])
def test_a_pass_that_is_gone_on_with_gives_the_batches_that_are_left(make):
    whole = plainly(make, passes=1)
    for count in (1, 3):
        if len(whole) - 1 < count:
            continue
        streams = RandomStreams(7)
        with streams.everything():
            handle = make()
        drawn, skipped = TrialDataFeed(4, streams.everything), []
        rest = list(drawn.draw(handle, shuffle=True, skip=SkippedBatches(count, lambda: skipped.append(None))))  # noqa: B023
        assert skipped == [None]
        assert_same(rest, [batch for batch, *_ in whole[count:-1]])


def test_tensors_that_are_replaced_within_a_pass_are_seen_by_the_next_batch():
    data = TensorDataset(X, Y)
    streams = RandomStreams(7)
    drawn = iter(TrialDataFeed(4, streams.everything, streams.moves).draw(Subset(data, range(3, 20)), shuffle=False))
    assert_same(next(drawn), [X[3:7], Y[3:7]])
    data.tensors = (X + 1, Y)
    assert_same(next(drawn), [X[7:11] + 1, Y[7:11]])
    data.tensors = (X.double(), Y)
    with pytest.raises(TaskError, match="replaced within a pass"):
        next(drawn)
