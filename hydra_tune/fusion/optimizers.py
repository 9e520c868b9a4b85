"""Optimizers of stacked members: one step for all of them, each with its own rates.

The arithmetic is that of `torch.optim`'s single-tensor functions, with a tensor of N numbers in the place of each rate. The
rates are read from the members' own optimizers before each step, where their own schedulers put them. How a member's step count
stands is a number of its own too, so that members may begin and pause apart.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from hydra_tune.errors import UnfusableError

_IMPLEMENTATIONS = frozenset(
    {"params", "foreach", "fused", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}
)
_REFUSED = {"amsgrad": False, "maximize": False, "capturable": False, "differentiable": False}


class Rates:
    """The members' options of one parameter group, as numbers and as tensors to multiply stacked tensors with.

    Args:
        groups: each member's own parameter group.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self._groups = groups
        self._known: dict[tuple[float, ...], dict[tuple[int, torch.dtype, torch.device], Tensor]] = {}
        self._made: dict[Hashable, list[float]] = {}

    def read(self) -> None:
        """A step begins: schedulers may have changed the options since the last one."""
        self._made.clear()

    def __call__(self, name: str) -> list[float]:
        """An option of each member."""
        return self.made(name, lambda: [float(group[name]) for group in self._groups])

    def made(self, key: Hashable, make: Callable[[], list[float]]) -> list[float]:
        """Numbers that are made once in a step, of one for each member."""
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = make()
        return found

    def betas(self) -> tuple[list[float], list[float]]:
        """Adam's pair of each member."""
        first = self.made("beta1", lambda: [float(group["betas"][0]) for group in self._groups])
        return first, self.made("beta2", lambda: [float(group["betas"][1]) for group in self._groups])

    def beside(self, values: Sequence[float], like: Tensor) -> Tensor:
        """One number for each member, in a shape that multiplies a stacked tensor; remembered while it is of use."""
        known = self._known.setdefault(tuple(values), {})
        key = like.dim(), like.dtype, like.device
        if key not in known:
            if len(self._known) > 256:  # noqa: PLR2004 - schedules give new numbers at each step
                self._known.clear()
                known = self._known.setdefault(tuple(values), {})
            one = torch.tensor(values, dtype=like.dtype, device=like.device)
            known[key] = one.view(-1, *[1] * (like.dim() - 1))
        return known[key]


def _sgd(p: Tensor, gradient: Tensor, state: dict[str, Any], rates: Rates) -> None:
    gradient = _decayed(p, gradient, rates)
    momentum = rates("momentum")
    if any(momentum) or "momentum_buffer" in state:
        buffer = state.setdefault("momentum_buffer", None)
        if buffer is None:
            buffer = state["momentum_buffer"] = torch.zeros_like(p)
        dampening = rates("dampening")
        begun: list[bool] = state.setdefault("begun", [False] * len(momentum))
        fresh = [1 - d if b and m else 1.0 for d, b, m in zip(dampening, begun, momentum, strict=True)]
        added = gradient if all(f == 1 for f in fresh) else gradient * rates.beside(fresh, p)
        buffer.mul_(rates.beside(momentum, p)).add_(added)
        state["begun"] = [b or (bool(m) and a) for b, m, a in zip(begun, momentum, state["active"], strict=True)]
        gradient = torch.addcmul(gradient, buffer, rates.beside(momentum, p)) if state["nesterov"] else buffer
    p.addcmul_(gradient, rates.beside([-rate for rate in rates("lr")], p))


def _adam(p: Tensor, gradient: Tensor, state: dict[str, Any], rates: Rates) -> None:
    _adam_step(p, _decayed(p, gradient, rates), state, rates)


def _adamw(p: Tensor, gradient: Tensor, state: dict[str, Any], rates: Rates) -> None:
    kept = rates.made(
        "kept", lambda: [1 - lr * decay for lr, decay in zip(rates("lr"), rates("weight_decay"), strict=True)]
    )
    if any(k != 1 for k in kept):
        p.mul_(rates.beside(kept, p))
    _adam_step(p, gradient, state, rates)


def _adam_step(p: Tensor, gradient: Tensor, state: dict[str, Any], rates: Rates) -> None:
    if "exp_avg" not in state:
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
    mean, square = state["exp_avg"], state["exp_avg_sq"]
    first, second = rates.betas()
    done = state["steps"]
    sizes = rates.made(
        ("sizes", *done), lambda: [-lr / (1 - b ** (n + 1)) for lr, b, n in zip(rates("lr"), first, done, strict=True)]
    )
    roots = rates.made(
        ("roots", *done), lambda: [(1 - b ** (n + 1)) ** -0.5 for b, n in zip(second, done, strict=True)]
    )
    mean.lerp_(gradient, rates.beside([1 - beta for beta in first], p))
    square.mul_(rates.beside(second, p)).add_((gradient * gradient).mul_(rates.beside([1 - b for b in second], p)))
    denominator = square.sqrt().mul_(rates.beside(roots, p)).add_(rates.beside(rates("eps"), p))
    p.add_(torch.div(mean, denominator, out=denominator).mul_(rates.beside(sizes, p)))


def _rmsprop(p: Tensor, gradient: Tensor, state: dict[str, Any], rates: Rates) -> None:
    gradient = _decayed(p, gradient, rates)
    if "square_avg" not in state:
        state["square_avg"] = torch.zeros_like(p)
    square, alpha = state["square_avg"], rates("alpha")
    rest = rates.beside([1 - a for a in alpha], p)
    square.mul_(rates.beside(alpha, p)).add_((gradient * gradient).mul_(rest))
    if state["centered"]:
        mean = state.setdefault("grad_avg", None)
        if mean is None:
            mean = state["grad_avg"] = torch.zeros_like(p)
        mean.lerp_(gradient, rest)
        root = torch.addcmul(square, mean, mean, value=-1).sqrt_()
    else:
        root = square.sqrt()
    scaled = gradient / root.add_(rates.beside(rates("eps"), p))
    momentum = rates("momentum")
    if any(momentum) or "momentum_buffer" in state:
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        scaled = state["momentum_buffer"].mul_(rates.beside(momentum, p)).add_(scaled)
    p.addcmul_(scaled, rates.beside([-rate for rate in rates("lr")], p))


def _adagrad(p: Tensor, gradient: Tensor, state: dict[str, Any], rates: Rates) -> None:
    gradient = _decayed(p, gradient, rates)
    slower = zip(rates("lr"), rates("lr_decay"), state["steps"], strict=True)
    sizes = [-rate / (1 + step * decay) for rate, decay, step in slower]
    root = state["sum"].addcmul_(gradient, gradient).sqrt().add_(rates.beside(rates("eps"), p))
    p.add_(torch.div(gradient, root, out=root).mul_(rates.beside(sizes, p)))


def _begin_adagrad(p: Tensor, state: dict[str, Any], rates: Rates) -> None:
    state["sum"] = torch.zeros_like(p).add_(rates.beside(rates("initial_accumulator_value"), p))


def _decayed(p: Tensor, gradient: Tensor, rates: Rates) -> Tensor:
    decay = rates("weight_decay")
    return torch.addcmul(gradient, p, rates.beside(decay, p)) if any(decay) else gradient


_Step = Callable[[Tensor, Tensor, dict[str, Any], Rates], None]

_STEPS: dict[type[Optimizer], _Step] = {SGD: _sgd, Adam: _adam, AdamW: _adamw, RMSprop: _rmsprop, Adagrad: _adagrad}
_COUNTS = (Adam, AdamW, RMSprop, Adagrad)  # have a "step" in their state
_SWITCHES = ("nesterov", "centered", "decoupled_weight_decay")


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer that has no stacked form here.

    Raises:
        UnfusableError: with what it is that has none.
    """
    kind = type(optimizer)
    if kind not in _STEPS:
        names = ", ".join(sorted(one.__name__ for one in _STEPS))
        raise UnfusableError(f"its optimizer is {kind.__name__}, which has no stacked form; {names} have one")
    for group in optimizer.param_groups:
        for name, allowed in _REFUSED.items():
            if group.get(name, allowed) != allowed:
                raise UnfusableError(f"its {kind.__name__} has {name}={group[name]!r}, which has no stacked form")
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)  # noqa: SLF001
    if any(hooks):
        raise UnfusableError("its optimizer has hooks around its step, which a stacked step would not call")


class StackedOptimizer(Optimizer):
    """Steps stacked parameters as the members' own optimizers would step each of them.

    Args:
        members: the members' own optimizers, alike but for their rates; they are read, and never stepped.
        groups: for each parameter group the stacked parameters, in the order of the members'.

    Attributes:
        active: whether each member takes the next steps.
    """

    active: list[bool]
    _options: ClassVar[dict[str, Any]] = {}

    def __init__(self, members: Sequence[Optimizer], groups: Sequence[Sequence[Tensor]]) -> None:
        first = members[0]
        super().__init__([{"params": list(group)} for group in groups], dict(self._options))
        self.active = [True] * len(members)
        self._step = _STEPS[type(first)]
        self._members = list(members)
        self._begin = _begin_adagrad if isinstance(first, Adagrad) else None
        self._counts = isinstance(first, _COUNTS)
        self._rates = [Rates([m.param_groups[number] for m in members]) for number in range(len(groups))]
        self._switches = [{name: group[name] for name in _SWITCHES if name in group} for group in first.param_groups]
        if type(first) is Adam and first.param_groups[0].get("decoupled_weight_decay"):
            self._step = _adamw

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        """Step the parameters that have gradients, for the members that are active."""
        assert closure is None, "a stacked step has its gradients"
        everybody = all(self.active)
        for member in self._members:
            member._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 - or its scheduler would warn
        for group, rates, switches in zip(self.param_groups, self._rates, self._switches, strict=True):
            rates.read()
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["steps"] = [0] * len(self.active)
                    if self._begin is not None:
                        self._begin(p, state, rates)
                state |= switches | {"active": self.active}
                held = None if everybody else self._held(p, state)
                self._step(p, p.grad, state, rates)
                if held is not None:
                    self._put_back(p, state, *held)
                state["steps"] = [step + a for step, a in zip(state["steps"], self.active, strict=True)]

    def member_state(self, p: Tensor, index: int) -> dict[str, Any]:
        """What a member's own optimizer would have as the state of its part of a parameter."""
        state = self.state.get(p, {})
        if not state or not state["steps"][index]:
            return {}
        found: dict[str, Any] = {
            name: value[index].clone() for name, value in state.items() if isinstance(value, Tensor)
        }
        if self._counts:
            found["step"] = torch.tensor(float(state["steps"][index]), dtype=torch.get_default_dtype())
        return found

    def _held(self, p: Tensor, state: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The part of those who take no step."""
        resting = torch.tensor([i for i, active in enumerate(self.active) if not active], device=p.device)
        kept = {name: value[resting] for name, value in state.items() if isinstance(value, Tensor)}
        return resting, p[resting], kept

    @staticmethod
    def _put_back(
        p: Tensor, state: dict[str, Any], resting: Tensor, before: Tensor, kept: Mapping[str, Tensor]
    ) -> None:
        p[resting] = before
        for name, value in state.items():
            if isinstance(value, Tensor):
                value[resting] = kept[name] if name in kept else torch.zeros_like(value[resting])


def options_key(optimizer: Optimizer) -> tuple[Any, ...]:
    """What members' optimizers must have in common; every rate may be another one for each."""
    groups = tuple(
        tuple((name, bool(group[name])) for name in _SWITCHES if name in group) for group in optimizer.param_groups
    )
    return (type(optimizer), groups)
