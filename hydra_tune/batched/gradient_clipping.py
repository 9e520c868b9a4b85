"""Clip by the global norm of each member's gradients, for plain steps and planned steps of groups alike.

`GroupGradients` (`fusion/group/group_step.py`) clips just before the optimizer steps; when a step is planned,
`planner/trace/grad_clip_graph.py` and `planner/trace/optimizer_graph.py` trace the same functions into its graph.

The module must not know groups, trials or plans.

Note: the norm. As in `train/loop/gradient_rules.py`, each tensor has its own norm, and the norm of these norms is the
global norm. Plain and planned steps must get the same bits, and no member's norm may depend on another member.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grads_with_norm_


def norms_of(gradient: Tensor) -> Tensor:
    """Return the norm of each member's part of a gradient (members, ...): (members,), float64."""
    rows = gradient.flatten(1) if gradient.dim() > 1 else gradient.unsqueeze(1)
    # A contiguous copy fixes the order of the sum, so gradients of any layout have the same norm
    # to the last bit. Plain and planned steps, which lay gradients out differently, then agree.
    norms: Tensor = torch.linalg.vector_norm(rows.contiguous(), dim=1)
    return norms.double()


def factors_of(norms: Sequence[Tensor], limits: Tensor) -> Tensor:
    """Return the factor that clips each member's gradients.

    Args:
        norms: results of `norms_of`, in the order of the module's parameters.
        limits: (members,), float64: each member's largest global norm; infinity for members without clipping.

    Returns:
        (members,), float64.
    """
    totals: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)), dim=0)
    factors = (limits / (totals + _EPSILON)).clamp(max=1.0)
    return factors.masked_fill(limits.isinf(), 1.0)  # exactly 1, even for an infinite or NaN norm


def clip_(gradient: Tensor, factors: Tensor) -> None:
    """Multiply each member's part of a gradient (members, ...) by its factor, in place."""
    gradient.mul_(factors.to(gradient).view(-1, *[1] * (gradient.dim() - 1)))
