"""The user's own `torch.autograd.Function`s by kind, for models that are cut around them, and odd ones that run whole."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Around(nn.Module):
    """Layers with dropout around a middle of any kind."""

    def __init__(self, middle: Callable[["Around", Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.own, self.second, self.last = (
            nn.Linear(8, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 4),
        )
        self.before, self.after = nn.Dropout(0.2), nn.Dropout(0.3)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(torch.tanh(self.first(x)))
        x = self.after(torch.relu(self.second(self.middle(self, x))))
        return self.last(x)


class StraightThrough(Function):
    @staticmethod
    def forward(ctx: Any, x):
        return (x > 0.1).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient):
        return gradient * 0.5


class Product(Function):
    """A linear layer: parameters are among its inputs."""

    @staticmethod
    def forward(ctx: Any, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, gradient):
        x, weight = ctx.saved_tensors
        given = gradient @ weight.to(gradient.dtype) if ctx.needs_input_grad[0] else None
        weights = gradient.t() @ x.to(gradient.dtype) if ctx.needs_input_grad[1] else None
        return given, weights, gradient.sum(0) if ctx.needs_input_grad[2] else None


class Largest(Function):
    """Two outputs, one of them of whole numbers, and an input of whole numbers."""

    @staticmethod
    def forward(ctx: Any, x, order):
        values, places = x[:, order].max(1, keepdim=True)
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(x, values)
        return values, places

    @staticmethod
    def backward(ctx: Any, gradient, _places):
        x, values = ctx.saved_tensors
        return gradient * (x == values), None


class Parts(Function):
    """One of its outputs stays without a gradient."""

    @staticmethod
    def forward(ctx: Any, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3, x.detach().sign()

    @staticmethod
    def backward(ctx: Any, double, triple, _sign):
        return (2 * double if triple is None else 2 * double + 3 * triple) * 1.1


class Optional(Function):
    """None among its outputs, as where a caller has not asked for an output."""

    @staticmethod
    def forward(ctx: Any, x, wants_square):
        ctx.save_for_backward(x)
        return None, x * 2, x * x if wants_square else None, x.detach().abs()

    @staticmethod
    def backward(ctx: Any, _nothing, double, _square, _absolute):
        return 2 * double, None


class SetUp(Function):
    @staticmethod
    def forward(x, power=2):
        return x**power

    @staticmethod
    def setup_context(ctx: Any, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.power = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.sign() * ctx.power, None


class Once(Function):
    @staticmethod
    def forward(ctx: Any, x):
        ctx.save_for_backward(result := torch.sigmoid(x))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient):
        (result,) = ctx.saved_tensors
        return gradient * result


class Transposed(Function):
    """Outputs and gradients that are not contiguous."""

    @staticmethod
    def forward(ctx: Any, x):
        return (x * 2).t().contiguous().t()

    @staticmethod
    def backward(ctx: Any, gradient):
        return (gradient * 3).t().contiguous().t()


class InFloat32(Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x, weight):
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class InLowPrecision(Function):
    """Takes part in autocast."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x, weight):
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient):
        x, weight = ctx.saved_tensors
        return gradient.to(weight.dtype) @ weight, (gradient.t() @ x.to(gradient.dtype)).to(weight.dtype)


class Reversed(Function):
    """The gradient reversal of domain adaptation: its output is a view."""

    @staticmethod
    def forward(ctx: Any, x, alpha):
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient):
        return -ctx.alpha * gradient, None


class Same(Function):
    @staticmethod
    def forward(ctx: Any, x):
        return x

    @staticmethod
    def backward(ctx: Any, gradient):
        return gradient * 0.7


class Keeps(Function):
    """Keeps tensors in its context, not by `save_for_backward`."""

    @staticmethod
    def forward(ctx: Any, x, weight):
        ctx.kept = [x.sign(), weight]
        return x.abs() @ weight

    @staticmethod
    def backward(ctx: Any, gradient):
        sign, weight = (tensor.to(gradient.dtype) for tensor in ctx.kept)
        return gradient @ weight.t() * sign, sign.t() @ gradient


class Outer(Function):
    @staticmethod
    def forward(ctx: Any, x, shifts):
        shifts.append(0.0)  # of its own list
        return StraightThrough.apply(x) + sum(shifts)

    @staticmethod
    def backward(ctx: Any, gradient):
        return Same.apply(gradient) * 2, None


class Weighs(Function):
    """Reads Python state in its backward."""

    weight = 2.0

    @staticmethod
    def forward(ctx: Any, x):
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient):
        return gradient * Weighs.weight


class OwnApply(Function):
    @classmethod
    def apply(cls, x):
        return super().apply(x * 2)

    @staticmethod
    def forward(ctx: Any, x):
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient):
        return gradient * 0.5


straight_through = StraightThrough.apply  # as code often keeps it


def _largest(module: Around, x: Tensor) -> Tensor:
    values, places = Largest.apply(x, torch.arange(15, -1, -1))
    return x * values + places / 16


def _parts(module: Around, x: Tensor) -> Tensor:
    double, triple, sign = Parts.apply(x)
    with torch.no_grad():
        shift = triple + sign
    return double + shift


def _optional(module: Around, x: Tensor) -> Tensor:
    nothing, double, square, absolute = Optional.apply(x, False)
    assert nothing is None
    assert square is None
    return double + absolute.detach()


def _in_a_region(module: Around, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return Product.apply(x.float(), module.own.weight, module.own.bias)


def _twice(module: Around, x: Tensor) -> Tensor:
    for _ in range(3):
        x = x + straight_through(x) * Once.apply(x)
    return x


def _without_gradients(module: Around, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = StraightThrough.apply(x)
    return x * gate + StraightThrough.apply(x)


def _in_a_checkpoint(module: Around, x: Tensor) -> Tensor:
    return checkpoint(lambda x: Once.apply(module.after(module.own(x))), x, use_reentrant=False)


KINDS: dict[str, Callable[[Around, Tensor], Tensor]] = {
    "straight through": lambda module, x: x + StraightThrough.apply(x),
    "parameters": lambda module, x: Product.apply(x, module.own.weight, module.own.bias),
    "several outputs": _largest,
    "outputs without gradients": _parts,
    "outputs of None": _optional,
    "setup_context": lambda module, x: SetUp.apply(x),
    "once differentiable": lambda module, x: Once.apply(x),
    "not contiguous": lambda module, x: Transposed.apply(module.own(x)),
    "custom_fwd in float32": lambda module, x: InFloat32.apply(x, module.own.weight),
    "custom_fwd": lambda module, x: InLowPrecision.apply(x, module.own.weight),
    "a view": lambda module, x: x + Reversed.apply(x, 0.3),
    "its input": lambda module, x: Same.apply(x) * x,
    "tensors in its context": lambda module, x: Keeps.apply(x, module.own.weight),
    "Functions within": lambda module, x: Outer.apply(x, [0.5, 0.25]),
    "in a region": _in_a_region,
    "many calls": _twice,
    "under no_grad too": _without_gradients,
    "an apply of its own": lambda module, x: OwnApply.apply(x),
    "in a checkpoint": _in_a_checkpoint,
}
"""Middles that become nodes of a graph."""

TABLE = torch.linspace(0.5, 1.5, 16)


class ReadsTable(Function):
    @staticmethod
    def forward(ctx: Any, x):
        return x * TABLE

    @staticmethod
    def backward(ctx: Any, gradient):
        return gradient * TABLE


class Draws(Function):
    @staticmethod
    def forward(ctx: Any, x):
        return x + 0.1 * torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, gradient):
        return gradient * 0.9


class DrawsInBackward(Function):
    @staticmethod
    def forward(ctx: Any, x):
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient):
        return gradient * torch.rand_like(gradient)


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient):
        return gradient * 2.5


class Counts(Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x):
        Counts.calls += 1
        return x * (1 + Counts.calls % 3)

    @staticmethod
    def backward(ctx: Any, gradient):
        return gradient * 0.5


class CountsInContext(Function):
    """Counts in the class of its context, and shows the count late."""

    @staticmethod
    def forward(ctx: Any, x):
        type(ctx).calls += 1
        return x * (1 + type(ctx).calls // 5 % 2)

    @staticmethod
    def backward(ctx: Any, gradient):
        return gradient * 0.5


class Clamps(Function):
    most = 100.0

    @staticmethod
    def forward(ctx: Any, x):
        return x.clamp(max=Clamps.most)

    @staticmethod
    def backward(ctx: Any, gradient):
        return gradient * 0.5


class AsksValues(Function):
    @staticmethod
    def forward(ctx: Any, x):
        return x * 2 if x.sum() > 0 else x * 3

    @staticmethod
    def backward(ctx: Any, gradient):
        return gradient * 0.5


class ByNumpy(Function):
    @staticmethod
    def forward(ctx: Any, x):
        return torch.from_numpy(np.tanh(x.detach().float().numpy())).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient):
        return gradient * 0.5


class KeepsAtTimes(Function):
    """Keeps a tensor in its context, but not in a trial without values."""

    @staticmethod
    def forward(ctx: Any, x):
        if type(x) is Tensor:
            ctx.kept = x
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient):
        return gradient * 0.5


class Tagged(Function):
    @staticmethod
    def forward(ctx: Any, x):
        return x * 2, "tag"

    @staticmethod
    def backward(ctx: Any, gradient, _tag):
        return gradient * 0.5


class Calls(Function):
    @staticmethod
    def forward(ctx: Any, x, function):
        return function(x)

    @staticmethod
    def backward(ctx: Any, gradient):
        return gradient * 0.5, None


def _of_a_function(module: Around, x: Tensor) -> Tensor:
    class Scaled(Function):
        @staticmethod
        def forward(ctx: Any, x):
            return x * module.own.bias

        @staticmethod
        def backward(ctx: Any, gradient):
            return gradient * module.own.bias

    return Scaled.apply(x)


def _swallowed(module: Around, x: Tensor) -> Tensor:
    """Takes another way where the Function fails."""
    try:
        return Draws.apply(x)
    except Exception:  # noqa: BLE001
        return x


def _set_for_a_call(module: Around, x: Tensor) -> Tensor:
    """Sets what a Function reads, to a value that makes no difference to these batches."""
    Clamps.most = 50.0
    try:
        return Clamps.apply(x)
    finally:
        Clamps.most = 100.0


ODD: dict[str, Callable[[Around, Tensor], Tensor]] = {
    "reads a tensor of its own": lambda module, x: ReadsTable.apply(x),
    "draws": lambda module, x: Draws.apply(x),
    "draws in backward": lambda module, x: DrawsInBackward.apply(x),
    "overwrites its input": lambda module, x: InPlace.apply(x * 1.5),
    "counts its calls": lambda module, x: Counts.apply(x),
    "counts its calls in its context": lambda module, x: CountsInContext.apply(x),
    "reads what is set for its call": _set_for_a_call,
    "asks for values": lambda module, x: AsksValues.apply(x),
    "computes by numpy": lambda module, x: ByNumpy.apply(x),
    "keeps a tensor at times": lambda module, x: KeepsAtTimes.apply(x),
    "returns a text": lambda module, x: Tagged.apply(x)[0],
    "takes a function": lambda module, x: Calls.apply(x, torch.sin),
    "a class of a function": _of_a_function,
    "an error caught": _swallowed,
}
"""Middles that no node can stand for."""


def _block(module: Around) -> Callable[..., Tensor]:
    return lambda x, *more: sum(more, module.after(torch.tanh(module.own(x)) * x))


def _nested(module: Around, x: Tensor) -> Tensor:
    def outer(x: Tensor) -> Tensor:
        return checkpoint(_block(module), torch.sin(x) * x, use_reentrant=True) + x

    return checkpoint(outer, x, use_reentrant=True) + x


def _with_a_function(module: Around, x: Tensor) -> Tensor:
    region = lambda x: Product.apply(x, module.own.weight, module.own.bias) * x  # noqa: E731
    return checkpoint(region, x, use_reentrant=True)


def _closed_over(module: Around, x: Tensor) -> Tensor:
    weight = module.own.weight * 2
    return checkpoint(lambda x: functional.linear(x, weight), x, use_reentrant=True)


def _used_twice(module: Around, x: Tensor) -> Tensor:
    x = checkpoint(module.own, x, use_reentrant=True)
    return checkpoint(module.own, torch.relu(x), use_reentrant=True)


CHECKPOINTS: dict[str, Callable[[Around, Tensor], Tensor]] = {
    "one input": lambda module, x: x + checkpoint(_block(module), x, use_reentrant=True),
    "two inputs": lambda module, x: checkpoint(_block(module), x, torch.cos(x), use_reentrant=True) * x,
    "nested": _nested,
    "with a Function": _with_a_function,
}
"""Middles with reentrant checkpoints that are cut."""

ODD_CHECKPOINTS: dict[str, Callable[[Around, Tensor], Tensor]] = {
    "reads another tensor": _closed_over,
    "one parameter in two regions": _used_twice,
    "one parameter in a region and outside": lambda module, x: module.own(
        checkpoint(module.own, x, use_reentrant=True)
    ),
    "draws anew": lambda module, x: checkpoint(_block(module), x, use_reentrant=True, preserve_rng_state=False),
}
"""Middles with reentrant checkpoints that run whole."""
