"""Batches as a gather: for loaders of plain tensors, only indices are drawn, because torch's own collation is known.

A `DataLoader` of a `TensorDataset` takes each sample apart and stacks the samples again; `tensor[indices]` gives the
same bits. The indices come from the loader's own samplers, which draw the same numbers at the same time as in a plain
loop. `TrialDataFeed` (`data_feed.py`) calls `source_of` at the start of each pass over a `DataLoader`, and draws only
indices if the loader is known. Members of fused groups (`fusion/group/member.py`) get the indices themselves, and
`fusion/group/batched_inputs.py` gathers the batches of all members at once. The module must not know models, steps or the
pool's devices, and takes no lock, because one thread at a time draws for a trial.

Note: known loaders. A loader is known if the loader, its samplers, its data and its collation are exactly torch's own classes,
the tensors are plain (`_is_plain`), and the loader has no workers and pins no memory, so that no code of the user's is
involved. Every other loader draws its batches itself.

Note: time of draws. Torch draws the base seed of workers in `iter()`, and a `RandomSampler` without a generator draws its own
seed with the first index, both from the trial's streams; later indices draw nothing from the streams. So with a sampler
without a generator, all indices are taken with the first, up to a limit. A sampler with a generator of the user's may
draw from the generator between batches and at the end of the pass, so its indices are taken as needed.
"""

import functools
import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, Subset, TensorDataset
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate, default_collate_fn_map
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from hydra_tune.devices.own_generator import drawing_from
from hydra_tune.errors import TaskError
from hydra_tune.shard.capture import batch as batches
from hydra_tune.shard.capture.batch import BatchLeaves
from hydra_tune.task import Batch

# Most indices of a pass taken at once; a longer pass would cost noticeable time and memory at its start.
_MOST_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class GatherSource:
    """Data whose batches are a gather.

    Attributes:
        first_tensors: samples along the first dimension, at the start of the pass.
        chosen: indices of the present samples, in order; None: all.
        data: the data set that holds `first_tensors`; None: a batch is the bare tensor, and not a list.
    """

    first_tensors: tuple[Tensor, ...]
    chosen: Tensor | None
    data: TensorDataset | None

    @property
    def is_bare(self) -> bool:
        """Whether a batch is the bare tensor, and not a list."""
        return self.data is None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Samples along the first dimension; code of the user's may put other tensors into the data set within a pass.

        Raises:
            TaskError: the other tensors have samples of other kinds.
        """
        first, data = self.first_tensors, self.data
        if data is None or (len(data.tensors) == len(first) and all(map(operator.is_, data.tensors, first))):
            return first
        tensors = tuple(data.tensors)
        if not all(map(_is_plain, tensors)) or _kinds(tensors) != _kinds(first):
            raise TaskError(
                "TensorDataset.tensors was replaced within a pass, by tensors whose samples have other shapes or types, or "
                "that are not contiguous on the CPU; replace the tensors between passes, or use a Dataset class of your own"
            )
        return tensors

    def __len__(self) -> int:
        return len(self.first_tensors[0] if self.chosen is None else self.chosen)

    def gather(self, indices: Tensor) -> list[Tensor]:
        """Gather samples by their indices in `tensors`, each tensor into memory of its own."""
        return [tensor.index_select(0, indices) for tensor in self.tensors]

    def leaves(self, size: int) -> BatchLeaves:
        """Return the leaves of a batch of a given size, without tensors; sources that are alike mostly share the object."""
        return _leaves(_kinds(self.first_tensors), size, is_bare=self.is_bare)

    def batch(self, indices: Tensor) -> Batch:
        """Return a batch as the loader would."""
        samples = self.gather(indices)
        return samples[0] if self.is_bare else samples

    def is_of(self, other: "GatherSource") -> bool:
        """Whether indices select the same samples in both sources."""
        if self is other:
            return True
        own, others = self.tensors, other.tensors
        if self.is_bare != other.is_bare or len(own) != len(others):
            return False
        return all(a is b or _is_same_memory(a, b) for a, b in zip(own, others, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class UngatheredBatches:
    """Consecutive batches of equal size that have not been gathered.

    Attributes:
        indices: indices of the samples in the source's tensors, of shape (batches, samples).
    """

    source: GatherSource
    indices: Tensor

    def __len__(self) -> int:
        return self.indices.size(0)

    @property
    def size(self) -> int:
        """Samples of a batch."""
        return self.indices.size(1)

    def batch(self, number: int = 0) -> Batch:
        """Gather one of the batches, as the loader would return it."""
        return self.source.batch(self.indices[number])

    def part(self, begin: int, end: int | None = None) -> "UngatheredBatches":
        """Return a slice of the batches."""
        if not begin and (end is None or end >= len(self)):
            return self
        return UngatheredBatches(self.source, self.indices[begin:end])


def source_of(loader: DataLoader[Any]) -> GatherSource | None:
    """Return the data of a loader whose batches are a gather; None for any other loader."""
    sampler = _known_sampler(loader)
    source = None if sampler is None else _source(loader.dataset)
    # A sampler over other data may yield indices that the source does not have.
    return source if sampler is not None and source is not None and len(sampler.data_source) == len(source) else None


def _known_sampler(loader: DataLoader[Any]) -> RandomSampler | SequentialSampler | None:
    """Return the sampler of a loader that is torch's own, but for its data, without workers and pinned memory; else None."""
    if type(loader) is not DataLoader or loader.num_workers or loader.pin_memory:
        return None
    # A user may have registered another collation of tensors in torch's map.
    is_collated = loader.collate_fn is default_collate and default_collate_fn_map.get(Tensor) is collate_tensor_fn
    if not is_collated or type(loader.batch_sampler) is not BatchSampler:
        return None
    sampler = loader.batch_sampler.sampler
    return sampler if type(sampler) is RandomSampler or type(sampler) is SequentialSampler else None


class GatherPass:
    """Ungathered batches of a pass over a known loader, as many at once as may be drawn together.

    Args:
        iterator: iterator of the loader, before its first batch.

    Attributes:
        draws: whether the next batches may draw from the trial's streams: until the first `look`.
    """

    def __init__(self, source: GatherSource, iterator: _SingleProcessDataLoaderIter) -> None:
        self._source = source
        self._iterator = iterator
        self._sampler = sampler = iterator._index_sampler.sampler  # noqa: SLF001
        has_generator = getattr(sampler, "generator", None) is not None
        self._takes_all = not has_generator and len(sampler) <= _MOST_AT_ONCE
        self._taken: Iterator[UngatheredBatches] | None = None
        self._first: list[int] | None = None
        self.draws = True

    def __iter__(self) -> "GatherPass":
        return self

    def __next__(self) -> UngatheredBatches:
        """Return the next batches; while `draws` is set, call this inside the trial's streams."""
        self.look()
        if self._taken is not None:
            return next(self._taken)
        if self._first is None:
            return self._picks([self._next_index()])
        first_index, self._first = self._first, None
        return self._picks([first_index])

    def look(self) -> None:
        """Draw the indices of the first batch, unless done before; all later indices, too, if the sampler has no generator."""
        if not self.draws:
            return
        self.draws = False
        if self._takes_all:
            self._taken = self._all()
        else:
            self._first = next(self._iterator._sampler_iter, None)  # noqa: SLF001

    def skip(self, count: int) -> int:
        """Skip the next batches, inside the trial's streams; return the number of batches skipped."""
        num_left = count
        while num_left and (picks := next(self, None)) is not None:
            if num_left < len(picks):
                # The skip ends inside a run of batches: the rest of the run comes first.
                self._taken = itertools.chain([picks.part(num_left)], self._taken or ())
            num_left -= min(num_left, len(picks))
        return count - num_left

    def _next_index(self) -> list[int]:
        self._iterator._num_yielded += 1  # noqa: SLF001 - as its own next() does
        indices: list[int] = self._iterator._next_index()  # type: ignore[no-untyped-call]  # noqa: SLF001
        return indices

    def _all(self) -> Iterator[UngatheredBatches]:
        """Return all full batches, and the rest."""
        order = _order(self._sampler)
        if order is not None:
            return self._cut(order)
        lists = list(self._iterator._sampler_iter)  # noqa: SLF001
        full = [indices for indices in lists if len(indices) == len(lists[0])]
        return iter([self._picks(equal_lists) for equal_lists in (full, lists[len(full) :]) if equal_lists])

    def _cut(self, order: Tensor) -> Iterator[UngatheredBatches]:
        by = self._iterator._index_sampler  # noqa: SLF001
        # Full batches share one index tensor; a smaller last batch needs another shape.
        full = len(order) // by.batch_size * by.batch_size
        chosen = order if self._source.chosen is None else self._source.chosen[order]
        parts = [chosen[:full].view(-1, by.batch_size), chosen[full:].view(1, -1)]
        return iter(
            [UngatheredBatches(self._source, part) for part in parts[: 1 if by.drop_last else 2] if part.numel()]
        )

    def _picks(self, lists: list[list[int]]) -> UngatheredBatches:
        indices = torch.tensor(lists, dtype=torch.int64, device="cpu")
        return UngatheredBatches(self._source, indices if self._source.chosen is None else self._source.chosen[indices])


def _order(sampler: RandomSampler | SequentialSampler) -> Tensor | None:
    """Return the order of a whole pass of a sampler without a generator; None where the sampler's order is not known here."""
    if type(sampler) is SequentialSampler:
        return torch.arange(len(sampler), device="cpu")
    assert isinstance(sampler, RandomSampler), "nothing else is known"
    if sampler.replacement or sampler.num_samples != len(sampler.data_source) or not _shuffles_as_known():
        return None
    return _shuffled(sampler.num_samples)


def _shuffled(count: int) -> Tensor:
    """Shuffle as `RandomSampler` does: draw a seed from the process's stream, and permute by the seed."""
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


@functools.cache
def _shuffles_as_known() -> bool:
    """Whether torch's sampler shuffles as `_shuffled` does; tested once, on a stream apart from all trials."""
    outcomes = []
    for draw in (lambda: list(RandomSampler(range(9))), lambda: _shuffled(9).tolist()):
        stream = torch.Generator().manual_seed(5)
        with drawing_from(stream):
            # The streams' positions are compared too, because the trial's next draw continues from there.
            outcomes.append((draw(), stream.get_state().tolist()))
    return outcomes[0] == outcomes[1]


def _kinds(tensors: tuple[Tensor, ...]) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    return tuple((tensor.shape[1:], tensor.dtype) for tensor in tensors)


@functools.lru_cache(maxsize=256)
def _leaves(kinds: tuple[tuple[torch.Size, torch.dtype], ...], size: int, *, is_bare: bool) -> BatchLeaves:
    tensors = [torch.empty((size, *shape), dtype=dtype, device="cpu") for shape, dtype in kinds]
    return batches.flatten(tensors[0] if is_bare else tensors).without_tensors()


def _source(dataset: object) -> GatherSource | None:
    # An instance attribute would replace the class's own way of taking samples.
    if "__getitems__" in getattr(dataset, "__dict__", {}):
        return None
    if type(dataset) is Subset:
        inner = _source(dataset.dataset)
        return None if inner is None else _narrowed(inner, dataset.indices)
    data = dataset if type(dataset) is TensorDataset else None
    candidates: tuple[object, ...] = (dataset,) if data is None else tuple(data.tensors)
    tensors = tuple(tensor for tensor in candidates if _is_plain(tensor))
    if not candidates or len(tensors) < len(candidates):
        return None
    return GatherSource(tensors, None, data)


def _is_plain(tensor: object) -> TypeGuard[Tensor]:
    """Whether stacked samples of the tensor equal a gather, strides included."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.dim() > 0
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


def _narrowed(source: GatherSource, indices: object) -> GatherSource | None:
    """Return the part of a source that a `Subset` selects; None where the indices are not plain."""
    if not isinstance(indices, list | tuple | range) or not all(type(index) is int for index in indices):
        return None
    total = len(source)
    if not all(-total <= index < total for index in indices):
        return None
    # Negative indices count from the end in a dataset, but not in `index_select`.
    positions = _tensor([index % total for index in indices])
    return replace(source, chosen=positions if source.chosen is None else source.chosen[positions])


def _tensor(indices: list[int]) -> Tensor:
    return torch.tensor(indices, dtype=torch.int64, device="cpu")


def _is_same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
