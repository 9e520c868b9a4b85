"""Clipping by the norm of all of one member's gradients, for steps of groups as they are (`steps.py`) and planned ones alike.

Note: the norm. As in `train/gradients.py`, each tensor's norm is taken by itself, and the norm of those is that of all.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grads_with_norm_


def norms_of(gradient: Tensor) -> Tensor:
    """The norm of each member's part of a gradient, however it lies in memory.

    Args:
        gradient: (members, ...).

    Returns:
        (members,), float64.
    """
    rows = gradient.flatten(1) if gradient.dim() > 1 else gradient.unsqueeze(1)
    norms: Tensor = torch.linalg.vector_norm(rows.contiguous(), dim=1)
    return norms.double()


def factors_of(norms: Sequence[Tensor], limits: Tensor) -> Tensor:
    """What the gradients of each member are multiplied with.

    Args:
        norms: of `norms_of`, in the order of the optimizer's parameters.
        limits: (members,), float64: the most that each one's norm of all may be; without end for those that do not clip.

    Returns:
        (members,), float64.
    """
    totals: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)), dim=0)
    factors = (limits / (totals + _EPSILON)).clamp(max=1.0)
    return factors.masked_fill(limits.isinf(), 1.0)  # whatever the norm is


def clip_(gradient: Tensor, factors: Tensor) -> None:
    """Multiply each member's part of a gradient with its factor, in place.

    Args:
        gradient: (members, ...).
        factors: (members,).
    """
    gradient.mul_(factors.to(gradient).view(-1, *[1] * (gradient.dim() - 1)))
