"""Batches cut into pieces, for `split_batches`: what the pieces are, and which tasks they would change.

Like `train/data.py` this is shared by the plain loop and the pool, so that both train on the same pieces.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hydra_tune.errors import TaskError
from hydra_tune.shard.steps import training_loss
from hydra_tune.shard.streams import preserved_streams
from hydra_tune.task import Batch, TrainTask
from hydra_tune.train.data import num_samples

_ROUNDINGS = 100
_MAX_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a batch.

    Attributes:
        batch: these samples, in the batch's structure.
        samples: how many they are.
        share: the part of the batch's samples that they are.
        is_last: whether it is the batch's last.
    """

    batch: Batch
    samples: int
    share: float
    is_last: bool


def pieces(batch: Batch, count: int) -> Iterator[Piece]:
    """Cut a batch along the first dimension of its tensors, into pieces of sizes that differ by one at most.

    Args:
        batch: the batch; tensors without dimensions and other values are in every piece.
        count: pieces; a batch of fewer samples has as many pieces as samples. With 1 the batch itself is the piece.

    Raises:
        TaskError: tensors whose first dimensions differ, or that are not dense.
    """
    samples = num_samples(batch)
    count = min(count, samples)
    if count <= 1:
        yield Piece(batch=batch, samples=samples, share=1.0, is_last=True)
        return
    stop = 0
    for index in range(count):
        start, stop = stop, stop + samples // count + (index < samples % count)
        size = stop - start
        cut = _cut(batch, slice(start, stop), samples)
        yield Piece(batch=cut, samples=size, share=size / samples, is_last=index == count - 1)


def check_pieces(task: TrainTask, module: nn.Module, batch: Batch, count: int) -> None:
    """Try the first batch, whole and in pieces, on a copy of the module; leaves streams, module and batch as they are.

    Args:
        task: describes the step.
        module: as its factory has made it.
        batch: the first batch.
        count: pieces.

    Raises:
        TaskError: the pieces would not give what the whole batch gives: a forward that looks at other samples or overwrites
            buffers, or a loss that is not the mean over samples.
    """
    refuse_batch_norm(task, module)
    loss = training_loss(task)
    # A module that trains on a GPU is tried on the host, where the batch still is.
    elsewhere = [t for t in (*module.parameters(), *module.buffers()) if not t.is_cpu]
    twin = copy.deepcopy(module, {id(t): _on_host(t) for t in elsewhere})
    with preserved_streams(), torch.no_grad():
        before = {name: buffer.clone() for name, buffer in twin.named_buffers()}
        loss(twin.train(), copy.deepcopy(batch))
        changed = [name for name, buffer in twin.named_buffers() if not _is_same(buffer, before.get(name))]
        if changed:
            raise TaskError(
                f"split_batches={task.split_batches!r} would change buffer {changed[0]!r}, which each forward overwrites; "
                "leave split_batches out"
            )
        twin.eval()
        whole = float(loss(twin, copy.deepcopy(batch)))
        parts = sum(float(loss(twin, p.batch)) * p.share for p in pieces(batch, count))
    tolerance = _tolerance(module)
    if math.isfinite(whole) and not math.isclose(whole, parts, rel_tol=tolerance, abs_tol=tolerance):
        raise TaskError(
            f"split_batches={task.split_batches!r} needs a loss that is the mean over a batch's samples, but that of the first "
            f"batch is {whole:g}, and the mean over its pieces {parts:g}; average over samples, or leave split_batches out"
        )


def refuse_batch_norm(task: TrainTask, module: nn.Module) -> None:
    """What can be told of a module without running it.

    Raises:
        TaskError: it looks at other samples of a batch.
    """
    name = next((name for name, m in module.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)), None)  # noqa: SLF001
    if name is not None:
        raise TaskError(
            f"split_batches={task.split_batches!r} would change what {name!r} normalizes by: it looks at all samples of a "
            "batch; leave split_batches out, or use a normalization of single samples (LayerNorm, GroupNorm)"
        )


def _on_host(tensor: Tensor) -> Tensor:
    """A copy of a parameter or buffer."""
    found = tensor.detach().cpu()
    return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


def _tolerance(module: nn.Module) -> float:
    """How far rounding may take two ways of computing one loss apart."""
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
                f"split_batches cuts the first dimension of a batch's tensors, which must be the samples: one has {samples}, "
                f"another {value.size(0)}"
            )
        return value[part].clone()  # in memory of its own: kernels may round differently by where it lies
    if isinstance(value, Mapping):
        return {key: _cut(item, part, samples) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cut(item, part, samples) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_cut(item, part, samples) for item in value)
    return value
