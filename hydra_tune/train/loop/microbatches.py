"""Batches cut into pieces, for `split_batches`: the cutting, and the check that cutting changes no result.

The plain loop (`reference_loop.py`) and the pool's trials (`train/single_trial.py`, `train/own_code_trial.py`) share this
module, like `train/data/handles.py`, so that both train on the same pieces: both check the first batch before the first step,
and cut every batch. `piece_count` (`microbatch_choice.py`) cuts a batch, too. A change of the sizes or of the order of pieces
changes the last bits of both.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hydra_tune.errors import TaskError
from hydra_tune.shard.capture.batch import rebuilt
from hydra_tune.shard.capture.step_capture import copied_model
from hydra_tune.shard.capture.step_module import training_loss
from hydra_tune.shard.cost.microbatch_search import whole_batch_layer
from hydra_tune.shard.verify.process_state import preserved_streams
from hydra_tune.task import Batch, TrainTask
from hydra_tune.train.data.handles import num_samples

# Allowed relative difference between whole and pieces: so many roundings of the parameters' type, at most 5%.
_ROUNDINGS = 100
_MAX_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """A piece of a batch, in the batch's structure; `share` is the fraction of the batch's samples."""

    batch: Batch
    samples: int
    share: float
    is_last: bool


def pieces(batch: Batch, count: int) -> Iterator[MicroBatch]:
    """Cut a batch along the first dimension of its tensors, into pieces of nearly equal size (at most 1 apart).

    Args:
        batch: the batch; tensors without dimensions and other values are in every piece.
        count: number of pieces; a batch of fewer samples has as many pieces as samples. With 1, the batch itself is the
            piece.

    Raises:
        TaskError: tensors differ in their first dimensions, or are not dense.
    """
    samples = num_samples(batch)
    count = min(count, samples)
    if count <= 1:
        yield MicroBatch(batch=batch, samples=samples, share=1.0, is_last=True)
        return
    stop = 0
    for index in range(count):
        start, stop = stop, stop + samples // count + (index < samples % count)
        size = stop - start
        cut = _cut(batch, slice(start, stop), samples)
        yield MicroBatch(batch=cut, samples=size, share=size / samples, is_last=index == count - 1)


def check_pieces(task: TrainTask, module: nn.Module, batch: Batch, count: int) -> None:
    """Try the first batch, whole and in pieces, on a copy of the module; streams, module and batch stay unchanged.

    The step's own Python values, such as counters, may change: the step runs once whole to find overwritten buffers, once
    whole and once for each piece to compare losses.

    Raises:
        TaskError: the pieces would give another result than the whole batch: a forward depends on other samples or
            overwrites buffers, or a loss is not the mean over samples.
    """
    refuse_batch_norm(task, module)
    loss = training_loss(task)
    # A module that trains on a GPU is tried on the host, where the batch still is.
    elsewhere = [t for t in (*module.parameters(), *module.buffers()) if not t.is_cpu]
    twin = copied_model(module, {id(t): _on_host(t) for t in elsewhere})
    with preserved_streams(), torch.no_grad():
        buffers_before = {name: buffer.clone() for name, buffer in twin.named_buffers()}
        loss(twin.train(), copy.deepcopy(batch))
        buffers = [name for name, buffer in twin.named_buffers() if not _is_same(buffer, buffers_before.get(name))]
        if buffers:
            raise TaskError(
                f"split_batches={task.split_batches!r} would change buffer {buffers[0]!r}, which each forward overwrites; "
                "leave split_batches out"
            )
        # Dropout would draw other masks for the pieces than for the whole batch.
        twin.eval()
        whole = float(loss(twin, copy.deepcopy(batch)))
        parts = sum(float(loss(twin, p.batch)) * p.share for p in pieces(batch, count))
    tolerance = _tolerance(module)
    if math.isfinite(whole) and not math.isclose(whole, parts, rel_tol=tolerance, abs_tol=tolerance):
        raise TaskError(
            f"split_batches={task.split_batches!r} needs a loss that is the mean over a batch's samples, but the loss of the "
            f"first batch is {whole:g}, and the mean over its pieces {parts:g}; average over samples, or leave "
            "split_batches out"
        )


def refuse_batch_norm(task: TrainTask, module: nn.Module) -> None:
    """Refuse a module with batch normalization, without running the module.

    Raises:
        TaskError: a layer normalizes over the samples of a batch.
    """
    name = whole_batch_layer(module)
    if name is not None:
        raise TaskError(
            f"split_batches={task.split_batches!r} would change the statistics of {name!r}, which normalizes over all "
            "samples of a batch; leave split_batches out, or normalize each sample by itself (LayerNorm, GroupNorm)"
        )


def _on_host(tensor: Tensor) -> Tensor:
    host_tensor = tensor.detach().cpu()
    return nn.Parameter(host_tensor, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else host_tensor


def _tolerance(module: nn.Module) -> float:
    """Return the relative difference that rounding may cause between two ways of computing a loss."""
    dtypes = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    return min(_MAX_TOLERANCE, max((_ROUNDINGS * torch.finfo(dtype).eps for dtype in dtypes), default=_MAX_TOLERANCE))


def _is_same(buffer: Tensor, before: Tensor | None) -> bool:
    return before is not None and buffer.shape == before.shape and torch.equal(buffer, before)


def _cut(value: Any, part: slice, samples: int) -> Any:
    if isinstance(value, Tensor):
        if value.is_nested or value.layout is not torch.strided:
            raise TaskError(
                "split_batches cuts dense tensors, and one of the batch's is "
                f"{'nested' if value.is_nested else f'of layout {value.layout}'}; pad it or make it dense in the loader's "
                "collate_fn, or leave split_batches out"
            )
        if not value.dim():
            return value
        if value.size(0) != samples:
            raise TaskError(
                f"split_batches cuts the first dimension of a batch's tensors, which must be the samples: one tensor "
                f"has {samples}, another {value.size(0)}"
            )
        # Memory of its own, because kernels may round differently by the alignment of their input.
        return value[part].clone()
    return rebuilt(value, lambda item: _cut(item, part, samples))
