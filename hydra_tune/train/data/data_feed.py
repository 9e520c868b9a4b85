"""`TrialDataFeed`: the batches of one trial, drawn as a plain loop in its own process would, whatever other trials draw.

`Trial` (`train/trial.py`) draws each training and validation batch through a feed, when the batch is due, or all batches
of a step when the step is due. `MemberTrial` (`fusion/group/member.py`) sets `gives_picks`, and
`fusion/matching/group_timing.py` draws the batches of timed steps. This module knows nothing of models, shards or devices.

Note: contexts. In this process, code of the user's data runs inside the trial's random streams and the capture gate
(`own_code`). A wait for workers runs outside the gate (`waiting`) if the draw cannot use the streams, so that no capture waits
for a loader.

Note: skipping. When a trial was saved during a pass, the resumed trial begins the pass again from the positions that
all streams and samplers had at its beginning, and draws and drops the batches that the trial has trained on. Where the indices
of a loader without workers alone determine the next batches, only the indices are drawn. The repeated draws are not interleaved
with the trial's training, so draws that depend on the training's random numbers differ. A pass can therefore be saved
only at its end where the next batches depend on earlier draws by more than the order of torch's samplers, as in a
generator that draws. The same holds where the pass draws again from a generator that others have moved since, as a
validation does that shares the generator with a sampler which draws its indices in parts.
"""

import weakref
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, IterDataPipe, RandomSampler, Sampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

from hydra_tune.errors import TaskError
from hydra_tune.task import Batch, DataHandle
from hydra_tune.train.data import loader_workers
from hydra_tune.train.data.index_gather import GatherPass, UngatheredBatches, source_of
from hydra_tune.train.data.loader_clock import DrawClock
from hydra_tune.train.data.loader_copies import TrialLoaderCopies

_Drawn = TypeVar("_Drawn")
# Iterators that run no code of the user's, so that a draw needs neither the trial's streams nor the clock.
_WITHOUT_USER_CODE: tuple[type, ...] = (type(iter([])), type(iter(())))
_END = object()  # in the place of a batch: the pass is over
# Indices that a `RandomSampler` with replacement draws at once.
_DRAWN_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class SkippedBatches:
    """Number of batches that a pass skips; `then` is called after these, before the next batch is drawn."""

    count: int
    then: Callable[[], None]


class TrialDataFeed:
    """Draws a trial's batches.

    Args:
        batch_size: samples per batch, for a handle that is a `Dataset`.
        own_code: returns the context manager for the user's code, with the trial's own random streams.
        mark: returns another value whenever the streams have moved.
        waiting: returns the context manager for the wait for a loader's workers.

    Attributes:
        may_skip: whether another pass may skip the batches that the last pass has drawn so far.
        gives_picks: whether batches that are a gather are yielded as `UngatheredBatches`, for the caller to gather.
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
        self._own = TrialLoaderCopies()
        # Iterators whose workers may still run.
        self._with_workers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._persistent: weakref.WeakKeyDictionary[Any, DataLoader[Any]] = weakref.WeakKeyDictionary()
        # Places of the loaders whose persistent workers the trial has started, also before it went on from a checkpoint.
        self._had_workers: set[int] = set()

    def check(self, handle: DataHandle | None) -> None:
        """Refuse data before training that could not be drawn later; copy the loader's present state.

        Raises:
            TaskError: a loader cannot be copied, or its workers cannot be started.
        """
        if handle is None:
            return
        # Callables as well: the order of the handles' first use is then the same in a resumed trial.
        self._own.use(handle)
        if isinstance(handle, DataLoader):
            loader_workers.ready(self._own.loader(handle))
        elif isinstance(handle, Dataset):
            self._own.stream_in(handle)

    def states(self) -> dict[str, list[Any]]:
        """Return the positions of the trial's own copies of samplers and generators, for `restore`."""
        return self._own.states() | ({"had_workers": sorted(self._had_workers)} if self._had_workers else {})

    def restore(self, states: Mapping[str, Sequence[Any]] | Sequence[Any]) -> None:
        """Set the copies to the positions from `states` of another feed of the same task, or from an older checkpoint."""
        self._had_workers = set(states.get("had_workers", ())) if isinstance(states, Mapping) else set()
        self._own.restore(states)

    def draw(
        self, handle: DataHandle, *, shuffle: bool, skip: SkippedBatches | None = None
    ) -> Generator[Batch, None, None]:
        """Draw the batches of one pass, none before the batch is needed; the user's code draws from the trial's own streams.

        Raises:
            TaskError: data that cannot be iterated, workers that cannot be started, or fewer batches than there are to
                skip.
        """
        self.may_skip = True
        drawn = partial(self._drawn, handle)
        batches, gather_pass = drawn(lambda: self._begun(handle, skip, shuffle=shuffle))
        if gather_pass is not None:
            assert isinstance(batches, DataLoader), "only a loader is known"
            yield from self._gathered(gather_pass, skip, self._watch() if _draws_in_parts(batches) else None)
            return
        if isinstance(batches, DataLoader) and batches.num_workers > 0:
            yield from self._draw_from_workers(handle, batches, skip)
            return
        iterator = drawn(partial(iter, batches))
        if skip is None and type(iterator) in _WITHOUT_USER_CODE:
            yield from iterator
            return
        # With torch's own samplers the indices alone tell the next batches, so skipping need not load samples.
        by_index = isinstance(batches, DataLoader) and _has_plain_order(batches)
        if skip is not None and by_index and isinstance(iterator, _SingleProcessDataLoaderIter):
            self._skip(_BatchIndexIterator(iterator), drawn, skip, None)
            skip = None
        yield from self._rest(iterator, drawn, skip, watched=not by_index)

    def close(self) -> None:
        """End the workers of every pass that has not ended, and persistent workers."""
        for iterator in list(self._with_workers):
            loader_workers.end(iterator)
        for loader in self._persistent.values():
            loader_workers.end(loader._iterator)  # noqa: SLF001 - torch's own, behind a generator of the user's
        self._persistent.clear()

    def _drawn(self, handle: DataHandle, draw: Callable[[], _Drawn], *, in_process: bool = True) -> _Drawn:
        """Run a draw; the clock is innermost, so a wait for a capture is not counted."""
        clock = self.clock
        # The clock twice: an interruption that arrives as the inner exit begins is raised there, and the outer exit ends the
        # draw.
        with (
            self._own_code() if in_process else self._waiting(),
            clock.drawing(handle, in_process=in_process),
            clock,
        ):
            return draw()

    def _begun(
        self, handle: DataHandle, skip: SkippedBatches | None, *, shuffle: bool
    ) -> tuple[Iterable[Batch], GatherPass | None]:
        """Return the batches of a pass; a pass over a known loader begins with its first index, and is None otherwise."""
        batches = self._own.batches(handle, self._batch_size, shuffle=shuffle)
        source = source_of(batches) if isinstance(batches, DataLoader) else None
        if source is None:
            return batches, None
        iterator = iter(batches)
        assert type(iterator) is _SingleProcessDataLoaderIter, "it has no workers"
        gather_pass = GatherPass(source, iterator)
        if skip is None:
            # Here, inside the trial's streams: a sampler draws its seed with the first index.
            gather_pass.look()
        return batches, gather_pass

    def _watch(self) -> "_StreamWatch":
        return _StreamWatch(self._own.stream_marks)

    def _gathered(
        self, known: GatherPass, skip: SkippedBatches | None, watch: "_StreamWatch | None"
    ) -> Iterator[Batch | UngatheredBatches]:
        """Yield the batches of a known loader; only the first index is drawn with the trial's streams."""
        if skip is not None:
            with self._own_code():
                number = known.skip(skip.count)
            if number < skip.count:
                raise _fewer_than(skip, number)
            if watch is not None:
                watch.has_drawn()
            skip.then()
        while True:
            if watch is not None:
                watch.draws()
            with self._own_code() if known.draws else nullcontext():
                picks = next(known, None)
            if watch is not None and not watch.has_drawn():
                self.may_skip, watch = False, None
            if picks is None:
                return
            if self.gives_picks:
                yield picks
            else:
                yield from map(picks.batch, range(len(picks)))

    def _draw_from_workers(
        self, handle: DataHandle, loader: DataLoader[Any], skip: SkippedBatches | None
    ) -> Iterator[Batch]:
        iterator = self._start(handle, loader)
        # Waiting for a worker must not keep other trials from their captures. But a subclass of the user's may return a
        # generator, which draws from the streams as late as its first batch.
        at_start = type(iterator) is _MultiProcessingDataLoaderIter and _draws_at_its_start_only(loader)
        drawn = partial(self._drawn, handle, in_process=not at_start)
        try:
            with loader_workers.death_explained():
                watched = not at_start or _draws_in_parts(loader)
                for number, batch in enumerate(self._rest(iterator, drawn, skip, watched=watched)):
                    if number == 0:
                        loader_workers.warn_if_slow(iterator)
                    yield batch
        # Also where a trial leaves the pass early: its workers must not outlive the pass.
        finally:
            if not loader.persistent_workers:
                loader_workers.end(iterator)

    def _start(self, handle: DataHandle, loader: DataLoader[Any]) -> Iterator[Batch]:
        ready_loader = self._persistent.get(loader)
        # Persistent workers belong to the copy made for the first pass; its `iter` resets the workers for the next pass.
        if ready_loader is not None:
            return self._drawn(handle, partial(iter, ready_loader))
        ready_loader = loader_workers.ready(loader)
        is_kept = loader.persistent_workers and isinstance(handle, DataLoader)
        own_generator = ready_loader.generator
        if is_kept and self._own.current_handle in self._had_workers:
            # A first start draws a seed for the workers, and a later pass of the same workers draws none.
            ready_loader.generator = torch.Generator()
        try:
            with loader_workers.failed_start_explained():
                iterator: Iterator[Batch] = self._drawn(handle, partial(iter, ready_loader))
        finally:
            ready_loader.generator = own_generator
        self._with_workers.add(iterator)
        if is_kept:
            self._had_workers.add(self._own.current_handle)
        if loader.persistent_workers:
            self._persistent[loader] = ready_loader
        return iterator

    def _rest(
        self,
        iterator: Iterator[Batch],
        drawn: Callable[[Callable[[], Any]], Any],
        skip: SkippedBatches | None,
        *,
        watched: bool,
    ) -> Iterator[Batch]:
        watch = self._watch() if watched else None
        if skip is not None:
            self._skip(iterator, drawn, skip, watch)
        draw = partial(next, iterator, _END)
        mark_before = self._mark() if watched else 0
        while True:
            if watched and watch is not None:
                watch.draws()
            batch = drawn(draw)
            if batch is _END:
                return
            if watched and watch is not None:
                # A draw from the trial's streams gives other numbers when repeated without the training in between.
                self.may_skip = watched = self._mark() == mark_before and watch.has_drawn()
            yield batch
            # Anew: the training between two draws also moves the streams.
            mark_before = self._mark() if watched else 0

    @staticmethod
    def _skip(
        iterator: Iterator[Any],
        drawn: Callable[[Callable[[], Any]], Any],
        skip: SkippedBatches,
        watch: "_StreamWatch | None",
    ) -> None:
        for number in range(skip.count):
            if drawn(partial(next, iterator, _END)) is _END:
                raise _fewer_than(skip, number)
        if watch is not None:
            watch.has_drawn()
        skip.then()


class _StreamWatch:
    """Tells whether a pass draws from one of the trial's own generators that others have moved since its last draw."""

    def __init__(self, marks: Callable[[], dict[int, Hashable]]) -> None:
        self._marks = marks
        self._last = marks()
        self._moved: set[int] = set()

    def draws(self) -> None:
        """Note the generators that others have moved; the pass is about to draw."""
        self._moved |= self._differing()

    def has_drawn(self) -> bool:
        """Return whether the draw has moved none of those generators."""
        return self._differing().isdisjoint(self._moved)

    def _differing(self) -> set[int]:
        marks, last = self._marks(), self._last
        self._last = marks
        return {key for key, mark in marks.items() if last.get(key) != mark}


def _fewer_than(skip: SkippedBatches, number: int) -> TaskError:
    return TaskError(
        f"the trial was saved after batch {skip.count} of a pass over train, but the pass now ends after {number}: the data "
        "has changed; resume with the data of the checkpoint"
    )


class _BatchIndexIterator:
    """Iterator over the indices of a loader's next batches, in place of the batches."""

    def __init__(self, iterator: _SingleProcessDataLoaderIter) -> None:
        self._iterator = iterator

    def __iter__(self) -> "_BatchIndexIterator":
        return self

    def __next__(self) -> Any:
        self._iterator._num_yielded += 1  # noqa: SLF001 - as its own next() does
        return self._iterator._next_index()  # type: ignore[no-untyped-call]  # noqa: SLF001 - moves the sampler


def _has_plain_order(loader: DataLoader[Any]) -> bool:
    """Whether the order of samples depends only on the position in the pass."""
    is_iterable = isinstance(loader.dataset, IterableDataset)
    return not is_iterable and _draws_at_its_start_only(loader) and not _draws_in_parts(loader)


def _draws_in_parts(loader: DataLoader[Any]) -> bool:
    """Whether a sampler of torch's draws further indices from a generator of the user's within the pass."""
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if type(sampler) is not RandomSampler or sampler.generator is None:
        return False
    return sampler.num_samples > (_DRAWN_AT_ONCE if sampler.replacement else len(sampler.data_source))


def _draws_at_its_start_only(loader: DataLoader[Any]) -> bool:
    """Whether a pass with workers draws from the process's random streams in `iter()` and never later."""
    if isinstance(loader.dataset, IterableDataset):
        return not isinstance(loader.dataset, IterDataPipe)
    samplers = [loader.sampler] if loader.batch_sampler is None else [loader.batch_sampler, loader.sampler]
    samplers += [sampler.sampler for sampler in samplers if isinstance(sampler, BatchSampler)]
    # Torch's own samplers draw before their first index, and workers are given theirs by `iter()`.
    return all(type(sampler).__module__ == Sampler.__module__ for sampler in samplers)
