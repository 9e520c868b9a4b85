"""Batches that are a gather: what loaders of plain tensors draw and collate is known, so only their indices are drawn.

A `DataLoader` of a `TensorDataset` takes each sample apart and stacks them all again; the same bits are `tensor[indices]`. The
indices come from the loader's own samplers, which draw what they draw when they draw it.

Note: what is known. The loader, its samplers, its data and its collation are exactly torch's own, none a class of the user's,
and it has no workers: there is no code of the user's in it. Everything else is drawn by the loader itself.

Note: when a pass draws. Torch draws the base seed of workers in `iter()`, and a sampler without a generator its own seed with
the first index, both from the trial's streams; nothing is drawn from them after that. Where a sampler has no generator all
indices are taken with the first. One with a generator of the user's may draw from it between batches and at its end, so its
indices are taken as they are needed.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, Subset, TensorDataset
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate, default_collate_fn_map
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from hydra_tune.shard import batch as batches
from hydra_tune.shard.batch import Leaves
from hydra_tune.task import Batch

_MOST_AT_ONCE = 1 << 22  # indices of a pass that are taken with the first


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Data whose batches are a gather.

    Attributes:
        tensors: samples along the first dimension.
        chosen: which of them there are, in order; None: all.
        is_bare: whether a batch is the one tensor itself, and not a list.
    """

    tensors: tuple[Tensor, ...]
    chosen: Tensor | None
    is_bare: bool

    def __len__(self) -> int:
        return len(self.tensors[0] if self.chosen is None else self.chosen)

    def gather(self, indices: Tensor) -> list[Tensor]:
        """Samples by their indices in `tensors`, each tensor in memory of its own."""
        return [tensor.index_select(0, indices) for tensor in self.tensors]

    def leaves(self, size: int) -> Leaves:
        """What batches of a size are like, without tensors; the same object for all sources that are alike."""
        kinds = tuple((tensor.shape[1:], tensor.dtype) for tensor in self.tensors)
        return _leaves(kinds, size, is_bare=self.is_bare)

    def batch(self, indices: Tensor) -> Batch:
        """A batch as the loader would give it."""
        made = self.gather(indices)
        return made[0] if self.is_bare else made

    def is_of(self, other: "Source") -> bool:
        """Whether indices mean the same samples in both."""
        if self is other:
            return True
        if self.is_bare != other.is_bare or len(self.tensors) != len(other.tensors):
            return False
        return all(a is b or _is_same_memory(a, b) for a, b in zip(self.tensors, other.tensors, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Pick:
    """A batch that has not been gathered.

    Attributes:
        source: of what data.
        indices: of its samples in the source's tensors.
    """

    source: Source
    indices: Tensor

    @property
    def size(self) -> int:
        """Its samples."""
        return self.indices.numel()

    def batch(self) -> Batch:
        """The batch, as the loader would give it."""
        return self.source.batch(self.indices)


def source_of(loader: DataLoader[Any]) -> Source | None:
    """The data of a loader whose batches are a gather; None where that is not known.

    Args:
        loader: a trial's own.
    """
    if type(loader) is not DataLoader or loader.num_workers or loader.pin_memory:
        return None
    is_collated = loader.collate_fn is default_collate and default_collate_fn_map.get(Tensor) is collate_tensor_fn
    if not is_collated or type(loader.batch_sampler) is not BatchSampler:
        return None
    sampler = loader.batch_sampler.sampler
    if type(sampler) is not RandomSampler and type(sampler) is not SequentialSampler:
        return None
    source = _source(loader.dataset)
    return source if source is not None and len(sampler.data_source) == len(source) else None


class Picks:
    """The batches of a pass over a known loader, not gathered.

    Args:
        source: of the loader.
        iterator: the loader's, which has given nothing yet.
    """

    def __init__(self, source: Source, iterator: _SingleProcessDataLoaderIter) -> None:
        self._source = source
        self._iterator = iterator
        sampler = iterator._index_sampler.sampler  # noqa: SLF001
        has_generator = getattr(sampler, "generator", None) is not None
        self._takes_all = not has_generator and len(sampler) <= _MOST_AT_ONCE
        self._taken: Iterator[Tensor] | None = None
        self.draws = True

    def __iter__(self) -> "Picks":
        return self

    def __next__(self) -> Pick:
        """The next batch; only while `draws`, with the trial's streams."""
        self.draws = False
        if not self._takes_all:
            return Pick(self._source, self._chosen(_tensor(self._next_index())))
        if self._taken is None:
            self._taken = self._all()
        return Pick(self._source, next(self._taken))

    def _next_index(self) -> list[int]:
        self._iterator._num_yielded += 1  # noqa: SLF001 - as its own next() does
        found: list[int] = self._iterator._next_index()  # type: ignore[no-untyped-call]  # noqa: SLF001
        return found

    def _all(self) -> Iterator[Tensor]:
        lists = list(self._iterator._sampler_iter)  # noqa: SLF001
        if not lists:
            return iter(())
        indices = _tensor([index for one in lists for index in one])
        parts: tuple[Tensor, ...] = self._chosen(indices).split(len(lists[0]))  # type: ignore[no-untyped-call]  # untyped
        return iter(parts)

    def _chosen(self, indices: Tensor) -> Tensor:
        return indices if self._source.chosen is None else self._source.chosen[indices]


@functools.lru_cache(maxsize=256)
def _leaves(kinds: tuple[tuple[torch.Size, torch.dtype], ...], size: int, *, is_bare: bool) -> Leaves:
    made = [torch.empty((size, *shape), dtype=dtype, device="cpu") for shape, dtype in kinds]
    return batches.flatten(made[0] if is_bare else made).without_tensors()


def _source(dataset: object) -> Source | None:
    if "__getitems__" in getattr(dataset, "__dict__", {}):
        return None
    if type(dataset) is Subset:
        inner = _source(dataset.dataset)
        return None if inner is None else _narrowed(inner, dataset.indices)
    held: tuple[object, ...] = dataset.tensors if type(dataset) is TensorDataset else (dataset,)
    tensors = tuple(tensor for tensor in held if _is_plain(tensor))
    if not held or len(tensors) < len(held):
        return None
    return Source(tensors, None, is_bare=type(dataset) is not TensorDataset)


def _is_plain(tensor: object) -> TypeGuard[Tensor]:
    """Whether stacked samples of it are what a gather makes, strides included."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.dim() > 0
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


def _narrowed(source: Source, indices: object) -> Source | None:
    """The part of a source that a `Subset` has; None where its indices are not plain."""
    if not isinstance(indices, list | tuple | range) or not all(type(index) is int for index in indices):
        return None
    total = len(source)
    if not all(-total <= index < total for index in indices):
        return None
    own = _tensor([index % total for index in indices])
    return replace(source, chosen=own if source.chosen is None else source.chosen[own])


def _tensor(indices: list[int]) -> Tensor:
    return torch.tensor(indices, dtype=torch.int64, device="cpu")


def _is_same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
