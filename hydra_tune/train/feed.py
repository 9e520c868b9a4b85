"""`Feed`: the batches of one trial, as a plain loop in a process of its own would draw them, whatever other trials draw.

Knows nothing of models, shards or devices.
"""

import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, IterDataPipe, Sampler

from hydra_tune.task import Batch, DataHandle
from hydra_tune.train import workers
from hydra_tune.train.data import make_loader
from hydra_tune.train.own import OwnCopies


class Feed:
    """Draws a trial's batches.

    Args:
        batch_size: samples per batch, for a handle that is a `Dataset`.
        own_code: returns the context manager in which the user's code runs: with the trial's own random streams.
    """

    def __init__(self, batch_size: int | None, own_code: Callable[[], AbstractContextManager[object]]) -> None:
        self._batch_size = batch_size
        self._own_code = own_code
        self._own = OwnCopies()
        self._with_workers: weakref.WeakSet[Any] = weakref.WeakSet()  # iterators whose workers may run

    def check(self, handle: DataHandle | None) -> None:
        """Refuse before training what could not be drawn later; take the loader's state as it is now.

        Raises:
            TaskError: a loader that cannot be copied, or whose workers cannot be started.
        """
        if isinstance(handle, DataLoader):
            workers.ready(self._own.loader(handle))
        elif isinstance(handle, Dataset):
            self._own.stream_in(handle)

    def draw(self, handle: DataHandle, *, shuffle: bool) -> Generator[Batch, None, None]:
        """The batches of one pass, each drawn with the trial's own streams and not before it is needed.

        Args:
            handle: a data handle of the task.
            shuffle: whether a `Dataset` is read in random order.

        Raises:
            TaskError: data that cannot be iterated, or workers that cannot be started.
        """
        with self._own_code():
            given = self._own.stream_in(handle) if isinstance(handle, Dataset) else handle
            batches: Any = make_loader(given, self._batch_size, shuffle)
        if isinstance(batches, DataLoader) and not isinstance(handle, Dataset):
            batches = self._own.loader(batches)
        if isinstance(batches, DataLoader) and batches.num_workers > 0:
            yield from self._draw_from_workers(batches)
            return
        with self._own_code():
            iterator = iter(batches)
        yield from self._rest(iterator, self._own_code)

    def close(self) -> None:
        """End the workers of every pass that has not ended, and those that stay from pass to pass."""
        for iterator in list(self._with_workers):
            workers.end(iterator)

    def _draw_from_workers(self, loader: DataLoader[Any]) -> Iterator[Batch]:
        iterator = self._start(loader)
        # Waiting for a worker must not keep other trials from their streams.
        around = nullcontext if _draws_at_its_start_only(loader) else self._own_code
        try:
            with workers.death_explained():
                yield from self._rest(iterator, around)
        finally:
            if not loader.persistent_workers:
                workers.end(iterator)

    def _start(self, loader: DataLoader[Any]) -> Iterator[Batch]:
        if loader._iterator is not None:  # noqa: SLF001 - persistent workers, of the pass before
            with self._own_code():
                return iter(loader)
        ready = workers.ready(loader)
        with workers.failed_start_explained(), self._own_code():
            iterator = iter(ready)
        self._with_workers.add(iterator)
        loader._iterator = iterator if loader.persistent_workers else None  # noqa: SLF001
        return iterator

    def _rest(self, iterator: Iterator[Batch], around: Callable[[], AbstractContextManager[object]]) -> Iterator[Batch]:
        while True:
            with around():
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch


def _draws_at_its_start_only(loader: DataLoader[Any]) -> bool:
    """Whether a pass with workers draws from the process's random streams in `iter()` and not after."""
    if isinstance(loader.dataset, IterableDataset):
        return not isinstance(loader.dataset, IterDataPipe)
    samplers = [loader.sampler] if loader.batch_sampler is None else [loader.batch_sampler, loader.sampler]
    samplers += [sampler.sampler for sampler in samplers if isinstance(sampler, BatchSampler)]
    # Torch's own samplers draw before their first index, and workers are given theirs by `iter()`.
    return all(type(sampler).__module__ == Sampler.__module__ for sampler in samplers)
