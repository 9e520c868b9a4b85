"""Data handles: batches from a task's data, and counts known before drawing.

`TrialLoaderCopies` (`loader_copies.py`) calls `make_loader` at the start of each pass, in the plain loop and in the
pool, so both draw the same batches from the same random streams: iterating moves the streams, once per `iter()` and
perhaps once per batch. Trials (`train/trial.py`, `train/trial_figures.py`, `train/single_trial.py`,
`train/own_code_trial.py`), steps by the user's own code (`train/loop/direct.py`), pieces of batches
(`train/loop/microbatches.py`, `train/loop/microbatch_choice.py`), the plain loop (`train/loop/reference_loop.py`) and fused
members (`fusion/group/member.py`) count, refuse, move and group batches by the other functions. The module must not know
models, steps, trials or the pool's devices.
"""

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hydra_tune.errors import TaskError
from hydra_tune.shard.capture.batch import fields_of, rebuilt
from hydra_tune.task import Batch, DataHandle, length_of


def make_loader(handle: DataHandle, batch_size: int | None, shuffle: bool) -> Iterable[Batch]:
    """Turn a data handle into an iterable of batches for one pass: a `DataLoader`, or the result of a callable.

    `batch_size` and `shuffle` are for a `Dataset` only: a smaller last batch is kept, and an `IterableDataset` keeps its own
    order.

    Raises:
        TaskError: a `Dataset` without `batch_size`, or a callable whose result cannot be iterated.
    """
    if isinstance(handle, DataLoader):
        return cast("Iterable[Batch]", handle)
    if isinstance(handle, Dataset):
        if batch_size is None:
            raise TaskError(f"{type(handle).__name__} is a Dataset, so batch_size is needed; or give a DataLoader")
        return DataLoader(handle, batch_size, shuffle=shuffle and not isinstance(handle, IterableDataset))
    batches = handle()
    if not isinstance(batches, Iterable):
        raise TaskError(
            f"the data callable {handle!r} returned {type(batches).__name__}, which cannot be iterated; return a list, "
            "a generator or a DataLoader of batches"
        )
    return batches


def in_windows(batches: Iterable[Batch], length: int) -> Iterator[list[Batch]]:
    """Draw batches `length` at a time; the last window may have fewer."""
    iterator = iter(batches)
    while window := list(itertools.islice(iterator, length)):
        yield window


def num_batches(handle: DataHandle, batch_size: int | None = None) -> int | None:
    """Count the batches of one pass without drawing any or calling a callable; None where only iterating would tell."""
    length = length_of(handle)
    if length is None or isinstance(handle, DataLoader) or not isinstance(handle, Dataset):
        return length
    return None if batch_size is None else -(-length // batch_size)


def no_batch(name: str, handle: DataHandle, epoch: int | None = None) -> TaskError:
    """Return the error for a pass of `train` or `validate` (`name`) without a single batch."""
    where = "" if epoch is None else f" in epoch {epoch}"
    if isinstance(handle, Dataset | DataLoader):
        return TaskError(
            f"{name} yielded no batch{where}: {type(handle).__name__} is empty; every pass needs at least one"
        )
    return TaskError(
        f"{name} yielded no batch{where}; every pass needs at least one. The callable is called anew for each pass and must "
        "return batches that can be iterated again, not an iterator that an earlier pass, or another trial, has used up"
    )


def num_samples(batch: Batch) -> int:
    """Return the samples in a batch: the first dimension of its first tensor whose first dimension is not 0.

    A batch has 1 sample without a tensor with dimensions, and 0 if all first dimensions are 0.
    """
    if isinstance(batch, tuple | list) and batch and isinstance(first_leaf := batch[0], Tensor) and first_leaf.dim():
        # The usual case, kept short because every batch is asked.
        size = first_leaf.size(0)
        if size:
            return size
    sizes = [leaf.size(0) for leaf in tensors_of(batch) if leaf.dim() > 0]
    return next((size for size in sizes if size), 0 if sizes else 1)


def refuse_empty(batch: Batch, name: str, number: int, epoch: int | None = None) -> int:
    """Refuse a batch without samples: such a batch has no mean loss and no weight in averages. Return the samples.

    For the message, `name` is `train` or `validate`, and `number` the place of the batch in its pass, from 0.

    Raises:
        TaskError: the batch has tensors with dimensions, and the first dimension of each is 0.
    """
    if samples := num_samples(batch):
        return samples
    where = "of the pass" if epoch is None else f"in epoch {epoch}"
    raise TaskError(
        f"{name} yielded a batch of 0 samples (number {number} {where}, counted from 0), and every batch needs at least one; "
        "leave such batches out where they are made (the batch sampler, the callable), or have collate_fn keep a sample of each"
    )


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    else:
        fields = fields_of(value)
        for item in value if isinstance(value, tuple | list) else () if fields is None else fields.values():
            yield from tensors_of(item)


def moved(value: Any, place: torch.device) -> Any:
    """Move the tensors of a batch to another device; rebuild containers, and call `to` on objects that have the method."""
    if isinstance(value, Tensor):
        return value.to(place)
    if isinstance(value, dict):
        # Copied and then updated, because a subclass such as defaultdict is more than its items.
        moved_dict = copy.copy(value)
        moved_dict.update((key, moved(item, place)) for key, item in value.items())
        return moved_dict
    # For example the batch of a tokenizer or of a graph library.
    to = getattr(value, "to", None)
    return to(place) if callable(to) else rebuilt(value, lambda item: moved(item, place))


def on_host(batch: Batch) -> Batch:
    """Return a batch with its tensors on the host; the batch itself unless a tensor is on a GPU."""
    has_left = any(tensor.is_cuda for tensor in tensors_of(batch))
    return moved(batch, torch.device("cpu")) if has_left else batch
