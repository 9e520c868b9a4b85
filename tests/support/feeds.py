"""Data handles of every kind, as tasks: what the pool draws is held against a plain loop in a fresh process.

Run as `python -m tests.support.feeds OUTPUT`, it trains each with the plain loop. All of it can be pickled.
"""

import random
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from hydra_tune import TrainTask
from hydra_tune.task import DataHandle
from hydra_tune.train.data.handles import make_loader
from hydra_tune.train.data.loader_copies import TrialLoaderCopies
from hydra_tune.train.loop.reference_loop import train_plain
from tests.parity.exact import without_seconds

Pair = namedtuple("Pair", ["features", "label"])  # noqa: PYI024 - as users write it

ROWS = 26
_ROWS = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(5))
_LABELS = torch.arange(ROWS) % 4
PLAIN = TensorDataset(_ROWS, _LABELS)


class Augmented(Dataset[Any]):
    """Draws from all three random streams for each sample."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.rand(8) + random.random() + float(np.random.rand())  # noqa: NPY002 - the stream under test
        return _ROWS[index] + noise, _LABELS[index]

    def __len__(self) -> int:
        return ROWS


class WithStream(Augmented):
    """Draws from a stream of its own."""

    def __init__(self) -> None:
        self.stream = np.random.default_rng(3)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return _ROWS[index] + float(self.stream.random()), _LABELS[index]


class Sharded(IterableDataset[Any]):
    """Each worker reads its share, in an order that it draws."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        rows = list(range(ROWS)) if info is None else list(range(info.id, ROWS, info.num_workers))
        random.shuffle(rows)
        return ((_ROWS[row], _LABELS[row]) for row in rows)


class KeepsPlace(IterableDataset[Any]):
    """Its own iterator, and of a length it does not know."""

    def __iter__(self) -> "KeepsPlace":
        self.place = 0
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        self.place += 1
        if self.place > ROWS:
            raise StopIteration
        return _ROWS[self.place - 1], _LABELS[self.place - 1]

    def __len__(self) -> int:
        raise NotImplementedError


class CountsPasses(IterableDataset[Any]):
    """Another order in each pass, from how many there were."""

    passes = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.passes += 1
        return ((_ROWS[row], _LABELS[row]) for row in torch.randperm(ROWS, generator=_seeded(self.passes)).tolist())


class Turning(Sampler[int]):
    """Starts where the last pass ended, then swaps by a stream of its own."""

    def __init__(self, data: Dataset[Any]) -> None:
        self.data, self.passes, self.stream = data, 0, random.Random(2)

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        order = [(row + self.passes) % ROWS for row in range(ROWS)]
        self.stream.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return ROWS


class DrawsAsItGoes(Sampler[int]):
    """Draws each index from the process's stream when it is asked for."""

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(ROWS, ())) for _ in range(ROWS))

    def __len__(self) -> int:
        return ROWS


class NoisyCollate:
    """Draws from a generator that it holds."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(8)

    def __call__(self, samples: list[Any]) -> list[Tensor]:
        rows, labels = default_collate(samples)
        return [rows + torch.rand(8, generator=self.generator), labels]


def as_dict(samples: list[Any]) -> dict[str, Any]:
    """A dict of a named tuple and a nesting."""
    rows, labels = default_collate(samples)
    return {"pair": Pair(rows, labels), "more": [(rows * 2,), {"weight": 0.5}]}


def nested_loss(module: nn.Module, batch: Any) -> Tensor:
    """For batches of `as_dict`."""
    loss = functional.cross_entropy(module(batch["pair"].features + batch["more"][0][0]), batch["pair"].label)
    return loss * batch["more"][1]["weight"]


def _seeded(seed: int = 4) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _changing_lengths() -> list[Any]:
    return [(_ROWS[a:b].clone(), _LABELS[a:b].clone()) for a, b in ((0, 8), (8, 11), (11, 19), (19, 20))]


def _reused_buffer() -> Iterator[Any]:
    rows, labels = torch.empty(8, 8), torch.empty(8, dtype=torch.int64)
    for start in (0, 8, 16):
        rows.copy_(_ROWS[start : start + 8])
        labels.copy_(_LABELS[start : start + 8])
        yield rows, labels
    rows.fill_(torch.nan)


def _loader(dataset: Dataset[Any] = PLAIN, **options: Any) -> dict[str, Any]:
    return {"train": DataLoader(dataset, **({"batch_size": 8} | options))}


def _one_generator() -> dict[str, Any]:
    stream = _seeded()
    samples = RandomSampler(PLAIN, generator=stream)
    return _loader(shuffle=True, generator=stream) | {"validate": DataLoader(PLAIN, 8, sampler=samples)}


def _from_callable(**options: Any) -> dict[str, Any]:
    loader = DataLoader(Augmented(), 8, shuffle=True, generator=_seeded(), **options)
    return {"train": lambda: loader}


def _new_each_pass() -> dict[str, Any]:
    stream = _seeded()
    return {"train": lambda: DataLoader(Augmented(), 8, shuffle=True, generator=stream, num_workers=1)}


def _augmented(**options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: _loader(Augmented(), shuffle=True, num_workers=2, **options)


FEEDS: dict[str, Callable[[], dict[str, Any]]] = {
    "workers": _augmented(),
    "workers_generator": lambda: _loader(Augmented(), shuffle=True, num_workers=2, generator=_seeded()),
    "workers_persistent": lambda: _loader(
        Augmented(), shuffle=True, num_workers=2, persistent_workers=True, generator=_seeded()
    ),
    "workers_drawing_sampler": lambda: _loader(Augmented(), sampler=DrawsAsItGoes(), num_workers=2),
    "workers_iterable": lambda: _loader(Sharded(), num_workers=2),
    "workers_dataset_with_stream": lambda: _loader(WithStream(), num_workers=1),
    "workers_validate": lambda: _loader() | {"validate": DataLoader(Augmented(), 8, num_workers=1)},
    "workers_nested": lambda: (
        _loader(Augmented(), collate_fn=as_dict, num_workers=1) | {"loss": None, "step": nested_loss}
    ),
    "iterable": lambda: _loader(Sharded()),
    "iterable_keeps_place": lambda: _loader(KeepsPlace(), drop_last=True),
    "iterable_counts_passes": lambda: {"train": CountsPasses(), "batch_size": 8},
    "dataset": lambda: {"train": PLAIN, "validate": Subset(PLAIN, range(9)), "batch_size": 8},
    "dataset_with_stream": lambda: {"train": Subset(WithStream(), range(20)), "batch_size": 8},
    "datasets_with_streams": lambda: _loader(ConcatDataset([WithStream(), PLAIN, WithStream()]), shuffle=True),
    "iterables_that_count_passes": lambda: {"train": ChainDataset([CountsPasses(), CountsPasses()]), "batch_size": 8},
    "generator": lambda: _loader(shuffle=True, generator=_seeded()),
    "one_generator": _one_generator,
    "drop_last": lambda: _loader(shuffle=True, drop_last=True),
    "weighted": lambda: _loader(sampler=WeightedRandomSampler([1.0, 2.0] * 13, 20, generator=_seeded())),
    "replacement": lambda: _loader(sampler=RandomSampler(PLAIN, replacement=True, num_samples=40, generator=_seeded())),
    "batch_sampler": lambda: _loader(
        batch_size=1, batch_sampler=BatchSampler(SubsetRandomSampler(range(20), generator=_seeded()), 8, False)
    ),
    "own_sampler": lambda: _loader(sampler=Turning(PLAIN)),
    "collate_with_generator": lambda: _loader(collate_fn=NoisyCollate()),
    "nested": lambda: _loader(collate_fn=as_dict) | {"loss": None, "step": nested_loss},
    "from_callable": _from_callable,
    "workers_from_callable": lambda: _from_callable(num_workers=1, persistent_workers=True),
    "workers_new_each_pass": _new_each_pass,
    "changing_lengths": lambda: {"train": _changing_lengths},
    "reused_buffer": lambda: {"train": _reused_buffer, "validate": _reused_buffer},
    "pinned": lambda: _loader(shuffle=True, pin_memory=True),
}


def mlp() -> nn.Module:
    """Eight features, four classes, with dropout, which draws between the batches."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))


def build(name: str, **changes: Any) -> TrainTask:
    """A task over newly made data."""
    arguments = {
        "model": mlp,
        "optimizer": partial(torch.optim.AdamW, lr=1e-2),
        "loss": functional.cross_entropy,
        "epochs": 3,
        "seed": 3,
    }
    return TrainTask(**(arguments | FEEDS[name]() | changes))


def _without_copies(_own: TrialLoaderCopies, handle: DataHandle, batch_size: int | None, *, shuffle: bool) -> Any:
    return make_loader(handle, batch_size, shuffle)


def main(output: str) -> None:
    """Train each with the plain loop and save what it gives.

    It draws from the objects themselves, as a loop that anyone writes: what copies give is held against that.
    """
    torch.set_num_threads(1)
    results = {}
    for name in FEEDS:
        with mock.patch.object(TrialLoaderCopies, "batches", _without_copies):
            result = train_plain(build(name))
        results[name] = {
            "history": without_seconds(result.history),
            "state": dict(result.state_dict()),
            "optimizer": result.optimizer_state_dict(),
        }
    torch.save(results, Path(output))


if __name__ == "__main__":
    main(*sys.argv[1:])
