"""Checks whether an optimizer trains a tensor in pieces like the whole, that is, updates each element by itself.

The check steps small stand-ins instead of recognizing optimizers by name, like `separable_optimizers.py`, so that the
check works for a user's class; the trial's optimizer is never stepped. `SplitOperators`
(`shard/operators/operator_splitting.py`) checks an optimizer just built for a model with split operators, and joins the
states of the pieces at the end. The steps of stand-ins run inside `trying` (`shard/cost/update_pilot.py`), which puts back
random streams and shared objects, and results are compared bit by bit.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hydra_tune.errors import TaskError
from hydra_tune.shard.capture.batch import same_bits
from hydra_tune.shard.cost.update_pilot import stand_in_for, trying, use_rates
from hydra_tune.shard.operators.split_modules import TensorCut

_STEPS = 3
_SHAPES = {1: (128,), 2: (8, 16)}  # halves of these shapes are whole SIMD vectors on any processor
_UNEQUAL = 100.0


class _PieceStateMismatchError(Exception):
    """The states of the pieces are not the state of a single tensor."""


def whole_state(states: Sequence[Mapping[str, Any]], cut: TensorCut) -> dict[str, Any]:
    """Join the optimizer's states of a parameter's pieces, in order, into the state of the whole parameter.

    Raises:
        TaskError: the states do not belong to a single tensor; the optimizer does not update each element by itself.
    """
    try:
        return _joined(states, cut)
    except _PieceStateMismatchError as error:
        raise TaskError(f"the optimizer's state of the pieces of a parameter differs: {error}") from None


def _joined(states: Sequence[Mapping[str, Any]], cut: TensorCut) -> dict[str, Any]:
    if any(state.keys() != states[0].keys() for state in states):
        raise _PieceStateMismatchError("some have entries that others have not")
    return {key: _one(key, [state[key] for state in states], cut) for key in states[0]}


def _one(key: str, values: list[Any], cut: TensorCut) -> Any:
    """Join a single entry: concatenate tensors of the pieces' shape, or take the value common to all pieces."""
    first = values[0]
    # A tensor with the dimension of the cut holds a number per element; a scalar belongs to the parameter as a whole.
    if isinstance(first, Tensor) and first.dim() > cut.dim:
        if [value.shape[cut.dim] for value in values] != list(cut.sizes):
            raise _PieceStateMismatchError(f"{key!r} is not of the pieces' shape")
        return torch.cat(values, cut.dim)
    if not all(_is_same(first, value) for value in values[1:]):
        raise _PieceStateMismatchError(f"{key!r} is not the same")
    return first


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same_bits(one, other)
    return type(one) is type(other) and bool(one == other)


def check_elementwise(optimizer: Optimizer, members: Sequence[tuple[str, int, int, Tensor]]) -> None:
    """Refuse an optimizer that would train pieces differently from the whole.

    Args:
        optimizer: a trial's optimizer; only read.
        members: name, parameter group, dimension of the cut, and a piece of each cut parameter.

    Raises:
        TaskError: the update of an element depends on other elements.
    """
    tried_kinds: set[object] = set()
    for name, group, dim, piece in members:
        kind = (group, dim, piece.dim(), piece.dtype)
        if kind not in tried_kinds and not _updates_alike(optimizer, group, dim, piece):
            raise TaskError(
                f"{type(optimizer).__name__} does not update each element by itself, so training {name!r} in the pieces of "
                "split_operators would give other results than training it whole; remove split_operators, or use an optimizer "
                "whose update is per element (SGD, Adam, AdamW, RMSprop, ...)"
            )
        tried_kinds.add(kind)


def _updates_alike(optimizer: Optimizer, group: int, dim: int, piece: Tensor) -> bool:
    """Whether a few steps of a small tensor and of its halves leave the same bits."""
    shape = _SHAPES[piece.dim()]
    cut = TensorCut(dim=dim, sizes=(shape[dim] // 2,) * 2)
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(shape, generator=generator, dtype=torch.float64).to(piece.dtype)
    whole = [values.clone().requires_grad_()]
    halves = [part.clone().requires_grad_() for part in torch.split(values, list(cut.sizes), dim)]
    # Halves of unequal scale have different norms, so an update that depends on a norm shows.
    scale = torch.ones(shape, dtype=torch.float64)
    scale.narrow(dim, 0, cut.sizes[0]).fill_(_UNEQUAL)
    # A user's optimizer may draw random numbers, which the trial must not miss, and count.
    with trying(optimizer):
        steppers = [_small(optimizer, group, leaves) for leaves in (whole, halves)]
        for _ in range(_STEPS):
            gradient = (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(piece.dtype)
            _step(steppers[0], whole, [gradient])
            _step(steppers[1], halves, list(torch.split(gradient, list(cut.sizes), dim)))
    try:
        joined = _joined([steppers[1].state[half] for half in halves], cut)
        is_same = all(_is_same(joined[key], value) for key, value in steppers[0].state[whole[0]].items())
    except (_PieceStateMismatchError, KeyError):  # `KeyError`: the halves lack an entry of the whole
        return False
    return is_same and same_bits(whole[0], torch.cat(halves, dim))


def _small(optimizer: Optimizer, group: int, leaves: list[Tensor]) -> Optimizer:
    stand_in = stand_in_for(optimizer, [("", group)] * len(leaves), leaves)
    use_rates(stand_in)
    return stand_in


def _step(optimizer: Optimizer, leaves: list[Tensor], gradients: list[Tensor]) -> None:
    for leaf, gradient in zip(leaves, gradients, strict=True):
        # In memory of its own and contiguous, as autograd leaves the gradient of a contiguous parameter.
        leaf.grad = gradient.clone(memory_format=torch.contiguous_format)
    optimizer.step()
