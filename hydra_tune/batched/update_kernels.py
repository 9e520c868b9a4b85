"""Arithmetic of stacked optimizers: the single-tensor functions of `torch.optim`, for all members at once.

Every update takes parameters that lie contiguously in memory (`StackedParameterUpdate`) with their gradients, which
the update overwrites. Every rate is either common to all members or separate for each member.

`BatchedOptimizer` (`batched_optimizer.py`) runs these functions for each plain step of a fused group whose optimizers
`is_stackable` accepts. `UpdateTracer` (`planner/trace/optimizer_graph.py`) traces the same functions as nodes of a graph
when a step is planned, and runs the functions without tensors to ask for the rates of each planned step, with subclasses of
`StackedParameterUpdate`. The module must not know groups, trials, plans or schedulers: rates arrive as `MemberRates`.

Note: bits. In float32 and float64 a common float and separate tensors round alike in plain products and sums only (`mul_`,
`product_`, `add_`). Rates that torch's schedulers change go through `numbers` and these operators, or through `option`,
which then gives tensors. So other members' rates never change a member's bits.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from hydra_tune.batched.flat_tensors import FlatLayout, FlatTensor, Numbers
from hydra_tune.batched.hyperparameters import MemberRates


class StackedParameterUpdate:
    """A step of some parameters together; for each member, all of these have taken equally many steps before.

    An update function calls the other methods, and `BatchedOptimizer` calls `finish` last; a traced step does not.

    Args:
        gradient: the gradients, overwritten by the step.
        states: optimizer state of every parameter, with equal keys.
        found: tensors of the state, by key.
        switches: switches of the parameter groups, which are equal.
    """

    def __init__(
        self,
        layout: FlatLayout,
        p: FlatTensor,
        gradient: FlatTensor,
        states: Sequence[dict[str, Any]],
        found: dict[str, FlatTensor],
        rates: Sequence[MemberRates],
        switches: dict[str, bool],
        active: Sequence[bool],
    ) -> None:
        self.p, self.gradient, self.switches = p, gradient, switches
        self._layout, self._states, self._found, self._active = layout, states, found, active
        self._rates, self._distinct = rates, list(dict.fromkeys(rates))
        self._everybody = all(active)
        self._before: list[tuple[FlatTensor, Tensor]] = []
        self._hold(p)

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps that each member has taken before."""
        return tuple(self._states[0]["steps"])

    def numbers(self, key: Hashable, make: Callable[[MemberRates], Sequence[float]]) -> Numbers:
        """Return rates that may change at every step, for `mul_`, `product_` and `add_` alone (note above).

        In 16 bits separate numbers are rounded first (`MemberRates.beside`).

        Args:
            key: identifies the rates within the step.
            make: computes the rates of a parameter group, a number for each member.

        Returns:
            A float if all active members agree in all parameter groups; otherwise tensors.
        """
        group_rates = [self._of_active(rates.made(key, partial(make, rates))) for rates in self._distinct]
        return group_rates[0][0] if _are_all_one(group_rates) else self._beside(group_rates)

    def option(self, name: str, make: Callable[[float], float] = float) -> Numbers:
        """Return the present value of an option, for any operator.

        Some operators round differently for a float than for a tensor. So the result is a float only if torch's schedulers
        leave the option alone, all members began with the same value (`MemberRates.begins_alike`), and active members
        still agree: members that rest or end must not change the operators of the others. A traced step
        (`planner/trace/optimizer_graph.py`) keeps such a float as a constant, and refuses to run once a scheduler of the
        user's own has changed the option.
        """
        group_rates = [
            self._of_active(rates.made((name, make), partial(_options, rates, name, make))) for rates in self._distinct
        ]
        common = all(rates.begins_alike(name) for rates in self._distinct)
        return group_rates[0][0] if common and _are_all_one(group_rates) else self._beside(group_rates)

    def every(self, name: str) -> Numbers:
        """Return an option of all members, active or resting."""
        return self._beside([rates(name) for rates in self._distinct])

    def descend(self, direction: FlatTensor, numbers: Numbers) -> None:
        """Move the parameters along a direction; overwrites the gradient."""
        if direction is self.gradient:
            direction.mul_(numbers)
        else:
            self.gradient.product_(direction, numbers)
        self.p.whole.add_(self.gradient.whole)

    def has(self, name: str) -> bool:
        """Return whether the state has an entry."""
        return name in self._states[0]

    def state(self, name: str, first: Callable[[], Numbers] = float) -> FlatTensor:
        """Return a state entry of all parameters, created with the value of `first` (default 0) if missing."""
        if not self.has(name):
            new_entry = self._layout.new(self.p.whole)
            new_entry.add_(first())
            for state, part in zip(self._states, new_entry.parts, strict=True):
                state[name] = part
            self._found[name] = new_entry
            self._hold(new_entry)
            return new_entry
        entry = self._found[name]
        self._hold(entry)
        return entry

    def begun(self) -> list[bool]:
        """Return whether each member's momentum had begun before; active members with momentum begin now."""
        begun: list[bool] = list(self._states[0].get("begun", [False] * len(self._active)))
        if all(begun):
            return begun
        begin = {
            rates: [b or (bool(m) and a) for b, m, a in zip(begun, rates("momentum"), self._active, strict=True)]
            for rates in self._distinct
        }
        for state, rates in zip(self._states, self._rates, strict=True):
            state["begun"] = begin[rates].copy()
        return begun

    def idle_momentum(self) -> list[tuple[Tensor, list[int], Tensor]]:
        """Return copies of the momentum buffers of members whose momentum is 0 in this step; torch leaves those alone."""
        idle_rows = {
            rates: [index for index, momentum in enumerate(rates("momentum")) if not momentum]
            for rates in self._distinct
        }
        if not any(idle_rows.values()):
            return []
        # Made here at the latest, as zeros: a member whose momentum is 0 until later must then have no momentum yet.
        parts = zip(self._rates, self.state("momentum_buffer").parts, strict=True)
        return [(part, idle_rows[rates], part[idle_rows[rates]]) for rates, part in parts if idle_rows[rates]]

    def like(self, whole: Tensor) -> FlatTensor:
        """Return a temporary with the layout of the parameters."""
        return FlatTensor(whole, self._layout.parts(whole))

    def finish(self) -> None:
        """Finish the step: restore resting members, and count the step for active members."""
        if self._before:
            mask = self._mask()
            for flat, before in self._before:
                # Select instead of multiplying by a mask: NaN times zero would still be NaN.
                torch.where(mask, flat.whole, before, out=flat.whole)
        steps = [step + active for step, active in zip(self._states[0]["steps"], self._active, strict=True)]
        for state in self._states:
            state["steps"] = list(steps)

    def _of_active(self, values: tuple[float, ...]) -> tuple[float, ...]:
        """Replace the values of resting members, which must not prevent the use of a common float."""
        if self._everybody:
            return values
        active_value = values[self._active.index(True)]
        return tuple(value if active else active_value for value, active in zip(values, self._active, strict=True))

    def _beside(self, own: Sequence[tuple[float, ...]]) -> list[Tensor]:
        values = dict(zip(self._distinct, own, strict=True))
        return [rates.beside(values[rates], part) for rates, part in zip(self._rates, self.p.parts, strict=True)]

    def _hold(self, flat: FlatTensor) -> None:
        # Only a step with resting members pays for copies.
        if not self._everybody:
            self._before.append((flat, flat.whole.clone()))

    def _mask(self) -> Tensor:
        whole = torch.zeros_like(self.p.whole, dtype=torch.bool)
        rows = torch.tensor(self._active, device=whole.device)
        for part in self._layout.parts(whole):
            part.copy_(rows.view(-1, *[1] * (part.dim() - 1)).expand_as(part))
        return whole


def _are_all_one(own: Sequence[tuple[float, ...]]) -> bool:
    return all(values.count(own[0][0]) == len(values) for values in own)


def _options(rates: MemberRates, name: str, make: Callable[[float], float]) -> list[float]:
    return [make(value) for value in rates(name)]


def _rest(value: float) -> float:
    return 1 - value


def _decay(run: StackedParameterUpdate) -> None:
    decay = run.option("weight_decay")
    if decay != 0.0:
        run.gradient.add_product_(run.p, decay)


def _follow(run: StackedParameterUpdate, name: str, momentum: Numbers) -> FlatTensor:
    """Add the gradients to the decayed buffer of earlier gradients."""
    buffer, steady = run.state(name), run.option("momentum")
    # A single kernel, which may round differently from the two below: only a momentum that torch's schedulers leave alone
    # takes this branch.
    if isinstance(steady, float):
        torch.add(run.gradient.whole, buffer.whole, alpha=steady, out=buffer.whole)
        return buffer
    buffer.mul_(momentum)
    buffer.whole.add_(run.gradient.whole)
    return buffer


def _descent(rates: MemberRates) -> list[float]:
    return [-rate for rate in rates("lr")]


def _sgd(run: StackedParameterUpdate) -> None:
    _decay(run)
    gradient, momentum = run.gradient, run.numbers("momentum", lambda rates: rates("momentum"))
    direction = gradient
    # A buffer may exist although every momentum is 0 now, because schedulers may change momentum.
    if momentum != 0.0 or run.has("momentum_buffer"):
        begun, idle = run.begun(), run.idle_momentum()
        # As in torch, a member's momentum buffer begins as the first gradient, without dampening (`_fresh`).
        if not run.switches["nesterov"]:
            gradient.mul_(run.numbers(("fresh", *begun), lambda rates: _fresh(rates, begun)))
            direction = _follow(run, "momentum_buffer", momentum)
        else:  # torch allows no dampening with nesterov
            buffer = _follow(run, "momentum_buffer", momentum)
            gradient.add_product_(buffer, run.option("momentum"))
        run.descend(direction, run.numbers("descent", _descent))
        _restore(idle)  # after the descent, which reads the buffer
        return
    run.descend(direction, run.numbers("descent", _descent))


def _restore(idle: Sequence[tuple[Tensor, list[int], Tensor]]) -> None:
    for part, rows, before in idle:
        part[rows] = before


def _fresh(rates: MemberRates, begun: Sequence[bool]) -> list[float]:
    """Return the factors of the gradients: undampened for a member's first gradient."""
    options = zip(rates("dampening"), begun, rates("momentum"), strict=True)
    return [1 - d if b and m else 1.0 for d, b, m in options]


def _adam(run: StackedParameterUpdate) -> None:
    _decay(run)
    _adam_step(run)


def _adam_or_adamw(run: StackedParameterUpdate) -> None:
    """Step Adam or AdamW, which differ in a switch of each parameter group alone."""
    (_adamw if run.switches.get("decoupled_weight_decay") else _adam)(run)


def _adamw(run: StackedParameterUpdate) -> None:
    def decay_factors(rates: MemberRates) -> list[float]:
        return [1 - lr * decay for lr, decay in zip(rates("lr"), rates("weight_decay"), strict=True)]

    # AdamW decays the parameters themselves, before the step: p (1 - lr decay).
    run.p.mul_(run.numbers("kept", decay_factors))
    _adam_step(run)


def _adam_step(run: StackedParameterUpdate) -> None:
    """Step like Adam, with the root r of the second moment's correction moved out of the sum.

    `m / (sqrt(v) / r + eps)` equals `r m / (sqrt(v) + r eps)`.
    """
    steps_before = run.steps
    mean, square, gradient = run.state("exp_avg"), run.state("exp_avg_sq"), run.gradient
    mean.lerp_(gradient, run.option("beta1", _rest))
    square.average_square_(gradient, run.option("beta2"), run.option("beta2", _rest))

    def root_values(rates: MemberRates) -> list[float]:
        return [(1 - b ** (n + 1)) ** 0.5 for b, n in zip(rates("beta2"), steps_before, strict=True)]

    def roots(rates: MemberRates) -> tuple[float, ...]:
        return rates.made(("roots", *steps_before), partial(root_values, rates))

    def epsilons(rates: MemberRates) -> list[float]:
        return [eps * root for eps, root in zip(rates("eps"), roots(rates), strict=True)]

    def sizes(rates: MemberRates) -> list[float]:
        options = zip(rates("lr"), rates("beta1"), steps_before, roots(rates), strict=True)
        return [-lr / (1 - b ** (n + 1)) * root for lr, b, n, root in options]

    # The gradient is not needed any more, so its memory holds
    # the denominator. A separate temporary would raise the peak.
    torch.sqrt(square.whole, out=gradient.whole)
    gradient.add_(run.numbers(("eps", *steps_before), epsilons))
    torch.div(mean.whole, gradient.whole, out=gradient.whole)
    run.descend(gradient, run.numbers(("sizes", *steps_before), sizes))


def _rmsprop(run: StackedParameterUpdate) -> None:
    _decay(run)
    gradient, square, one_minus_alpha = run.gradient, run.state("square_avg"), run.option("alpha", _rest)
    square.average_square_(gradient, run.option("alpha"), one_minus_alpha)
    if run.switches["centered"]:
        mean = run.state("grad_avg")
        mean.lerp_(gradient, one_minus_alpha)
        # The centered variant divides by the standard deviation: sqrt(E[g²] - E[g]²).
        root = torch.addcmul(square.whole, mean.whole, mean.whole, value=-1).sqrt_()
    else:
        root = square.whole.sqrt()
    run.like(root).add_(run.option("eps"))
    gradient.whole.div_(root)
    momentum = run.numbers("momentum", lambda rates: rates("momentum"))
    if momentum != 0.0 or run.has("momentum_buffer"):
        idle = run.idle_momentum()
        run.descend(_follow(run, "momentum_buffer", momentum), run.numbers("descent", _descent))
        _restore(idle)
        return
    run.descend(gradient, run.numbers("descent", _descent))


def _adagrad(run: StackedParameterUpdate) -> None:
    _decay(run)
    steps_before, gradient = run.steps, run.gradient
    total = run.state("sum", lambda: run.every("initial_accumulator_value"))
    total.whole.addcmul_(gradient.whole, gradient.whole)
    root = total.whole.sqrt()
    run.like(root).add_(run.option("eps"))
    gradient.whole.div_(root)

    def sizes(rates: MemberRates) -> list[float]:
        options = zip(rates("lr"), rates("lr_decay"), steps_before, strict=True)
        return [-rate / (1 + step * decay) for rate, decay, step in options]

    run.descend(gradient, run.numbers(("sizes", *steps_before), sizes))


UPDATES: dict[type[Optimizer], Callable[[StackedParameterUpdate], None]] = {
    SGD: _sgd,
    Adam: _adam_or_adamw,
    AdamW: _adam_or_adamw,
    RMSprop: _rmsprop,
    Adagrad: _adagrad,
}


COUNTED = (Adam, AdamW, RMSprop, Adagrad)
"""Optimizers with a "step" in their state."""


def update_of(optimizer: Optimizer) -> Callable[[StackedParameterUpdate], None]:
    """Return the update function of an optimizer's class."""
    return UPDATES[type(optimizer)]
