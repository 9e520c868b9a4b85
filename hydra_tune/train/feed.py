"""`Feed`: the batches of one trial, as a plain loop in a process of its own would draw them, whatever other trials draw.

Knows nothing of models, shards or devices.

Note: skipping. A pass that was under way when a trial was saved is begun again from where all streams and samplers stood at its
beginning, and the batches that the trial has had are drawn and dropped, or where a loader's indices alone tell the next ones,
only those. What is drawn then is drawn beside other training, so it has other random numbers: where the next batches depend on
the ones before by more than the order of torch's samplers, as in a generator that draws, a pass can only be saved at its end.
"""

import weakref
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, IterDataPipe, Sampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

from hydra_tune.errors import TaskError
from hydra_tune.task import Batch, DataHandle
from hydra_tune.train import workers
from hydra_tune.train.drawing import DrawClock
from hydra_tune.train.gathering import Pass, Picks, source_of
from hydra_tune.train.own import OwnCopies


@dataclass(frozen=True, slots=True)
class Skip:
    """Batches that a pass need not give any more.

    Args:
        count: how many.
        then: called when they have been skipped, before the next is drawn.
    """

    count: int
    then: Callable[[], None]


class Feed:
    """Draws a trial's batches.

    Args:
        batch_size: samples per batch, for a handle that is a `Dataset`.
        own_code: returns the context manager in which the user's code runs: with the trial's own random streams.
        mark: another value whenever these streams have moved.
        waiting: returns what is entered while a loader's workers are waited for.

    Attributes:
        may_skip: whether batches of the last pass that was begun, as far as it has come, may be skipped by another.
        gives_picks: whether batches that are a gather are given as `Picks`, for others to gather.
        clock: says for how long the loader has been waited for.
    """

    def __init__(
        self,
        batch_size: int | None,
        own_code: Callable[[], AbstractContextManager[object]],
        mark: Callable[[], Hashable] = int,
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.may_skip = True
        self.gives_picks = False
        self.clock = DrawClock()
        self._mark = mark
        self._batch_size = batch_size
        self._own_code = own_code
        self._waiting = waiting
        self._own = OwnCopies()
        self._with_workers: weakref.WeakSet[Any] = weakref.WeakSet()  # iterators whose workers may run
        self._persistent: weakref.WeakKeyDictionary[Any, DataLoader[Any]] = weakref.WeakKeyDictionary()

    def check(self, handle: DataHandle | None) -> None:
        """Refuse before training what could not be drawn later; take the loader's state as it is now.

        Raises:
            TaskError: a loader that cannot be copied, or whose workers cannot be started.
        """
        if isinstance(handle, DataLoader):
            workers.ready(self._own.loader(handle))
        elif isinstance(handle, Dataset):
            self._own.stream_in(handle)

    def states(self) -> list[Any]:
        """Where the trial's own copies of samplers and generators stand, for `restore`."""
        return self._own.states()

    def restore(self, states: Sequence[Any]) -> None:
        """Have them stand where those of another feed of the same task stood."""
        self._own.restore(states)

    def draw(self, handle: DataHandle, *, shuffle: bool, skip: Skip | None = None) -> Generator[Batch, None, None]:
        """The batches of one pass, each drawn with the trial's own streams and not before it is needed.

        Args:
            handle: a data handle of the task.
            shuffle: whether a `Dataset` is read in random order.
            skip: what of the pass is not wanted.

        Raises:
            TaskError: data that cannot be iterated, or workers that cannot be started; or fewer batches than are to be skipped.
        """
        self.may_skip = True
        with self._drawing(handle, in_process=True):
            batches = self._own.batches(handle, self._batch_size, shuffle=shuffle)
            known = self._begun(batches, skip)
        if known is not None:
            yield from self._gathered(known, skip)
            return
        if isinstance(batches, DataLoader) and batches.num_workers > 0:
            yield from self._draw_from_workers(handle, batches, skip)
            return
        with self._drawing(handle, in_process=True):
            iterator = iter(batches)
        by_index = isinstance(batches, DataLoader) and _has_plain_order(batches)
        if skip is not None and by_index and isinstance(iterator, _SingleProcessDataLoaderIter):
            self._skip(_Indices(iterator), self._drawing(handle, in_process=True), skip)
            skip = None
        yield from self._rest(iterator, self._drawing(handle, in_process=True), skip, watched=not by_index)

    def close(self) -> None:
        """End the workers of every pass that has not ended, and those that stay from pass to pass."""
        for iterator in list(self._with_workers):
            workers.end(iterator)
        for ready in self._persistent.values():
            workers.end(ready._iterator)  # noqa: SLF001 - torch's own, behind a generator of the user's
        self._persistent.clear()

    def _drawing(self, handle: DataHandle, *, in_process: bool) -> "_Draw":
        """What is entered around each draw: the clock, innermost, since nobody is late while he waits for a capture."""
        outer = self._own_code if in_process else self._waiting
        return _Draw(outer, self.clock, handle, in_process=in_process)

    @staticmethod
    def _begun(batches: Iterable[Batch], skip: Skip | None) -> Pass | None:
        """A pass over a loader that is known, begun, with its first index; None where the loader is not."""
        source = source_of(batches) if isinstance(batches, DataLoader) else None
        if source is None:
            return None
        iterator = iter(batches)
        assert type(iterator) is _SingleProcessDataLoaderIter, "it has no workers"
        known = Pass(source, iterator)
        if skip is None:
            known.look()
        return known

    def _gathered(self, known: Pass, skip: Skip | None) -> Iterator[Batch | Picks]:
        """The batches of a loader that is known; the trial's streams are there for the first index alone."""
        if skip is not None:
            with self._own_code():
                number = known.skip(skip.count)
            if number < skip.count:
                raise _fewer_than(skip, number)
            skip.then()
        while True:
            with self._own_code() if known.draws else nullcontext():
                picks = next(known, None)
            if picks is None:
                return
            if self.gives_picks:
                yield picks
            else:
                yield from map(picks.batch, range(len(picks)))

    def _draw_from_workers(self, handle: DataHandle, loader: DataLoader[Any], skip: Skip | None) -> Iterator[Batch]:
        iterator = self._start(handle, loader)
        # Waiting for a worker must not keep other trials from their captures.
        # A class of the user's own may give a generator, which begins to draw at its first batch.
        at_start = type(iterator) is _MultiProcessingDataLoaderIter and _draws_at_its_start_only(loader)
        around = self._drawing(handle, in_process=not at_start)
        try:
            with workers.death_explained():
                for number, batch in enumerate(self._rest(iterator, around, skip, watched=not at_start)):
                    if number == 0:
                        workers.warn_if_slow(iterator)
                    yield batch
        finally:
            if not loader.persistent_workers:
                workers.end(iterator)

    def _start(self, handle: DataHandle, loader: DataLoader[Any]) -> Iterator[Batch]:
        around = self._drawing(handle, in_process=True)
        ready = self._persistent.get(loader)
        if ready is not None:
            with around:
                return iter(ready)
        ready = workers.ready(loader)
        with workers.failed_start_explained(), around:
            iterator = iter(ready)
        self._with_workers.add(iterator)
        if loader.persistent_workers:
            self._persistent[loader] = ready
        return iterator

    def _rest(
        self,
        iterator: Iterator[Batch],
        around: AbstractContextManager[object],
        skip: Skip | None,
        *,
        watched: bool,
    ) -> Iterator[Batch]:
        if skip is not None:
            self._skip(iterator, around, skip)
        before = self._mark() if watched else 0
        while True:
            with around:
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            if watched:
                self.may_skip = watched = self._mark() == before
            yield batch
            before = self._mark() if watched else 0

    @staticmethod
    def _skip(iterator: Iterator[Any], around: AbstractContextManager[object], skip: Skip) -> None:
        for number in range(skip.count):
            with around:
                try:
                    next(iterator)
                except StopIteration:
                    raise _fewer_than(skip, number) from None
        skip.then()


class _Draw:
    """Around one draw after the other: what the user's code or the wait for workers needs, and inside it the clock.

    A class, because one is entered for every batch, and a generator takes twice as long.
    """

    __slots__ = ("_clock", "_handle", "_in_process", "_outer", "_surroundings")

    def __init__(
        self,
        surroundings: Callable[[], AbstractContextManager[object]],
        clock: DrawClock,
        handle: DataHandle,
        *,
        in_process: bool,
    ) -> None:
        self._surroundings, self._clock = surroundings, clock
        self._handle, self._in_process = handle, in_process
        self._outer: AbstractContextManager[object] = nullcontext()

    def __enter__(self) -> None:
        self._outer = self._surroundings()
        self._outer.__enter__()
        self._clock.drawing(self._handle, in_process=self._in_process).__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._clock.__exit__(kind, error, trace)
        except BaseException as given_up:
            self._outer.__exit__(type(given_up), given_up, given_up.__traceback__)
            raise
        self._outer.__exit__(kind, error, trace)


def _fewer_than(skip: Skip, number: int) -> TaskError:
    return TaskError(
        f"the trial was saved after batch {skip.count} of a pass over train, and now the pass has {number}: "
        "the data is not what it was"
    )


class _Indices:
    """The indices of a loader's next batches, in place of the batches."""

    def __init__(self, iterator: _SingleProcessDataLoaderIter) -> None:
        self._iterator = iterator

    def __iter__(self) -> "_Indices":
        return self

    def __next__(self) -> Any:
        self._iterator._num_yielded += 1  # noqa: SLF001 - as its own next() does
        return self._iterator._next_index()  # type: ignore[no-untyped-call]  # noqa: SLF001 - moves the sampler


def _has_plain_order(loader: DataLoader[Any]) -> bool:
    """Whether which samples come next depends on nothing but how far the pass is."""
    return not isinstance(loader.dataset, IterableDataset) and _draws_at_its_start_only(loader)


def _draws_at_its_start_only(loader: DataLoader[Any]) -> bool:
    """Whether a pass with workers draws from the process's random streams in `iter()` and not after."""
    if isinstance(loader.dataset, IterableDataset):
        return not isinstance(loader.dataset, IterDataPipe)
    samplers = [loader.sampler] if loader.batch_sampler is None else [loader.batch_sampler, loader.sampler]
    samplers += [sampler.sampler for sampler in samplers if isinstance(sampler, BatchSampler)]
    # Torch's own samplers draw before their first index, and workers are given theirs by `iter()`.
    return all(type(sampler).__module__ == Sampler.__module__ for sampler in samplers)
