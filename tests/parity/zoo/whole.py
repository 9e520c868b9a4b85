"""Models whose step is no graph: they must run whole, with the same numbers, or be cut where that is the same."""

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from tests.parity.zoo.entry import Entry, accuracy, vectors


class Base(nn.Module):
    """Two layers, with something in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def middle(self, x):
        return x

    def forward(self, x):
        return self.head(torch.relu(self.second(self.middle(torch.relu(self.first(x))))))


class Branching(Base):
    """Which way depends on the values."""

    def middle(self, x):
        return x * 1.5 if x.sum() > x.numel() * 0.27 else x.flip(1)


class AsksBatch(Base):
    """Which way, and how often, depends on values of the batch alone."""

    def forward(self, x):
        x = x * 1.5 if x.sum() > 0 else x.flip(1)
        for _ in range(int((x.abs() > 2).sum(1).max())):
            x = torch.tanh(x) + x
        return super().forward(x)


class Loops(Base):
    """How often depends on the values."""

    def middle(self, x):
        while x.norm() > 4:
            x = x * 0.7
        return x


class RandomDepth(Base):
    """Stochastic depth with Python's generator."""

    def middle(self, x):
        return x if self.training and random.random() < 0.4 else x + torch.tanh(self.second(x))


class NumpyNoise(Base):
    """Noise from numpy's global generator."""

    def middle(self, x):
        return x + 0.1 * torch.from_numpy(np.random.randn(*x.shape)).to(x) if self.training else x  # noqa: NPY002


class Counter(Base):
    """A schedule kept in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def middle(self, x):
        if self.training:
            self.calls += 1
        return x * (1 + 0.1 * self.calls)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x):
        return (x > 0.5).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient):
        return gradient * 0.5


class CustomFunction(Base):
    """A backward of its own, which a trace of the forward would lose."""

    def middle(self, x):
        return x + StraightThrough.apply(x)


class AsksRequiresGrad(Base):
    """Other arithmetic where gradients are wanted."""

    def middle(self, x):
        return x * 2 if x.requires_grad else x * 3


class AsksGradEnabled(Base):
    """Other arithmetic where gradients are recorded."""

    def middle(self, x):
        return x * 2 if torch.is_grad_enabled() else x * 3


class Hooked(Base):
    """Changes its gradients by a hook."""

    def middle(self, x):
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return x


class ParameterHooks(Base):
    """Hooks on parameters, as for masks of pruned weights."""

    def __init__(self) -> None:
        super().__init__()
        self.second.weight.register_hook(lambda gradient: gradient.tril())


class SharedParameterHooks(Base):
    """A hook on a parameter that is used twice: it must see the whole gradient, once."""

    def __init__(self) -> None:
        super().__init__()
        self.second.weight.register_hook(lambda gradient: gradient * 0.5 + 1e-3)

    def middle(self, x):
        return torch.tanh(self.second(x))


class ModuleHooks(Base):
    """Hooks on modules, forward and backward, that change what passes."""

    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_hook(lambda module, inputs, output: output + 0.1)
        self.second.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))


class Detached(Base):
    """Part of the forward is under no_grad, part is detached."""

    def middle(self, x):
        with torch.no_grad():
            target = torch.tanh(self.second(x))
        return x + target + torch.sigmoid(x).detach()


def penalized(module, batch):
    """A penalty on the gradient of the output with respect to the input."""
    x = batch[0].detach().clone().requires_grad_()
    output = module(x)
    (gradient,) = torch.autograd.grad(output.logsumexp(1).sum(), x, create_graph=True)
    return functional.cross_entropy(output, batch[1]) + 0.1 * gradient.pow(2).sum(1).mean()


def _entry(name: str, what: str, model, **changes: Any) -> Entry:
    arguments = {"name": name, "what": what, "model": model, "samples": vectors, "evaluate": accuracy}
    return Entry(**(arguments | {"train": "whole", "evaluation": "cut"} | changes))


ENTRIES = [
    _entry("branching", "control flow that depends on values", Branching, evaluation="whole"),
    _entry("asks_batch", "control flow that depends on the batch's values", AsksBatch, train="cut"),
    _entry("value_loop", "a loop whose length depends on values", Loops, evaluation="whole"),
    _entry("random_depth", "Python's `random` in forward", RandomDepth),
    _entry("numpy_noise", "numpy's generator in forward", NumpyNoise),
    _entry("counter", "a counter in forward", Counter),
    _entry("custom_function", "a custom `autograd.Function`", CustomFunction, train="cut"),
    _entry("asks_requires_grad", "code that asks `requires_grad`", AsksRequiresGrad, train="cut"),
    _entry("asks_grad_enabled", "code that asks whether gradients are recorded", AsksGradEnabled, train="cut"),
    _entry("hooked", "`register_hook` in forward", Hooked),
    _entry("parameter_hooks", "hooks on parameters", ParameterHooks, train="refused"),
    _entry("shared_parameter_hooks", "a hook on a parameter used twice", SharedParameterHooks, train="refused"),
    _entry("module_hooks", "forward and backward hooks on modules", ModuleHooks, train="refused"),
    _entry("detached", "`no_grad` and `detach` in forward", Detached, train="cut"),
    _entry("gradient_penalty", "`torch.autograd.grad` in the step", Base, step=penalized, evaluate=accuracy),
]
