"""The optimizers of the registry, and those that are tried with one model only."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import optim


class Lion(optim.Optimizer):
    """An optimizer as a user writes one: the sign of a mix of gradient and momentum (Chen et al., 2023)."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            near, far = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
                momentum = self.state[p]["momentum"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.sign(momentum * near + p.grad * (1 - near)), alpha=-group["lr"])
                momentum.mul_(far).add_(p.grad, alpha=1 - far)


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "adamw": partial(optim.AdamW, lr=3e-3),
    "sgd": partial(optim.SGD, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "adam": partial(optim.Adam, lr=3e-3, amsgrad=True),
    "adagrad": partial(optim.Adagrad, lr=1e-2),
    "rmsprop": partial(optim.RMSprop, lr=1e-3, momentum=0.9, centered=True),
    "lion": partial(Lion, lr=1e-3, weight_decay=0.1),
}
"""Crossed with models and features."""

OTHERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "adafactor": partial(optim.Adafactor, lr=1e-2),
    "nadam": partial(optim.NAdam, lr=3e-3),
    "radam": partial(optim.RAdam, lr=3e-3),
    "adadelta": partial(optim.Adadelta, lr=1.0),
    "adamax": partial(optim.Adamax, lr=3e-3),
    "asgd": partial(optim.ASGD, lr=1e-2),
    "rprop": partial(optim.Rprop, lr=1e-3),
    "muon": lambda params: optim.Muon([p for p in params if p.dim() == 2], lr=1e-2),  # takes matrices only
    "adamw_fused": partial(optim.AdamW, lr=3e-3, fused=True),
    "adamw_foreach": partial(optim.AdamW, lr=3e-3, foreach=True),
    "adamw_capturable_rate": lambda params: optim.AdamW(params, lr=torch.tensor(3e-3), foreach=False),
}
"""Tried with one model: all else in `torch.optim` whose update is per parameter."""
