"""The update of a stacked parameter as a graph: the arithmetic of `batched/update_kernels.py`, with rates as arguments.

Rates change from step to step, and some depend on the step number. Rates are numbers on the host, which the arithmetic
derives from the members' options. To ask for the rates of a step, this module runs the arithmetic without tensors, once
for each parameter group. An option that counts as steady (`batched/hyperparameters.py`: no learning rate, and nothing
where a scheduler cycles the momentum) becomes a constant of the graph if all members began with the same value, and
still share a value. The unplanned step also computes with a number then, and numbers may round differently from tensors.
The unplanned step reads the number at each step, but the graph keeps the number of the trace. So `UpdateTracer.rates`
refuses a step for which such a number has changed: by a scheduler of the user's own, or because a member has joined.

`stack_of` (`fusion/runtime/step_planner.py`), `stack_now` (`fusion/runtime/step_arguments.py`) and `TaskProfileCache`
(`fusion/runtime/task_profiles.py`) make the tracers: before a group runs, for a running group, and for
`HydraExecutor.plan(profile=...)`. `StepPlanner` keeps each step's graph by the tracer's `key`, among others.
`step_graph.py` traces the updates while a step's graph is built. `StepStateBinding`
(`fusion/runtime/step_arguments.py`) asks for the initial state where a parameter has none, and for the rates as each
planned step begins. The module must not know memory limits or schedules.

Note: gate. Tracing changes the state of the whole process, so the caller of `traced` holds `GATE`
(`shard/capture/capture_lock.py`) alone.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import Optimizer
from typing_extensions import override

from hydra_tune.batched.batched_optimizer import is_stackable
from hydra_tune.batched.flat_tensors import FlatLayout, FlatTensor, Numbers
from hydra_tune.batched.gradient_clipping import clip_
from hydra_tune.batched.hyperparameters import MemberRates
from hydra_tune.batched.update_kernels import StackedParameterUpdate, update_of
from hydra_tune.errors import UnfusableError

_SWITCHES = ("nesterov", "centered", "decoupled_weight_decay")
# Stands for a rate where nothing is computed. Neither 0 nor 1, which the arithmetic takes for no decay, no momentum and
# no factor, so that all requests for rates are made.
_SOME_NUMBER = 1.5


class _UnreadTensor:
    """Stands for a tensor whose values nobody reads: every operation returns the same object."""

    def __getattr__(self, name: str) -> Callable[..., Self]:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._same

    def _same(self, *_: Any, **__: Any) -> Self:
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Functions such as `torch.div(..., out=...)` take the stand-in too.
        return _NOTHING


_NOTHING: Any = _UnreadTensor()


class _SingleParameterUpdate(StackedParameterUpdate):
    """Step of a single parameter with existing state; `ask` turns the members' numbers into rates.

    Attributes:
        options: the options that the step has asked for.
    """

    def __init__(self, ask: Callable[[Sequence[float], Any], Any], *given: Any) -> None:
        self._ask = ask
        self.options: list[str] = []
        super().__init__(*given)

    @override
    def option(self, name: str, make: Callable[[float], float] = float) -> Numbers:
        self.options.append(name)
        return super().option(name, make)

    def numbers(self, key: Hashable, make: Callable[[MemberRates], Sequence[float]]) -> Numbers:
        """As of `StackedParameterUpdate`, and never a constant; but a momentum that is 0 has no state and no operators."""
        (rates,) = self._rates
        values = rates.made(key, partial(make, rates))
        # The unplanned step computes nothing for momentum 0 either, and has no buffer (`_sgd`).
        if key == "momentum" and not any(values) and not self.has("momentum_buffer"):
            return 0.0
        # The unplanned step leaves the buffers of such members alone (`idle_momentum`), which no traced operator does.
        if key == "momentum" and not all(values):
            raise UnfusableError("the momentum of one of its trials is 0, and not that of all; it runs unplanned")
        return self._asked(values)

    @override
    def idle_momentum(self) -> list[tuple[Tensor, list[int], Tensor]]:
        return []

    def state(self, name: str, first: Callable[[], Numbers] = float) -> FlatTensor:
        """As of `StackedParameterUpdate`.

        Raises:
            UnfusableError: the traced step has no such state.
        """
        del first
        if name not in self._states[0]:
            raise UnfusableError(
                f"its optimizer now needs the state {name!r}, which the traced step does not have: an option that selects the "
                "optimizer's operators has changed; it runs unplanned"
            )
        return _flat(self._states[0][name])

    @override
    def like(self, whole: Tensor) -> FlatTensor:
        nothing: Any = whole
        return FlatTensor(whole, [] if isinstance(nothing, _UnreadTensor) else self._layout.parts(whole))

    def _beside(self, own: Sequence[tuple[float, ...]]) -> Any:
        return self._asked(own[0])

    def _asked(self, values: Sequence[float]) -> Numbers:
        numbers: Numbers = self._ask(values, self.p.parts[0])
        return numbers


class _FirstParameterUpdate(StackedParameterUpdate):
    """First step, which records the initial state."""

    def __init__(self, *given: Any) -> None:
        self.initial: dict[str, Tensor] = {}
        super().__init__(*given)

    @override
    def state(self, name: str, first: Callable[[], Numbers] = float) -> FlatTensor:
        entry = super().state(name, first)
        self.initial.setdefault(name, entry.parts[0].clone())
        return entry


@dataclass(frozen=True, slots=True)
class TracedUpdate:
    """Traced update of a parameter, which parameters of equal geometry in the same group share.

    Attributes:
        module: takes the parameter, its gradient, the clipping factors if the gradient is clipped, the state and the
            rates; overwrites the parameter and the state.
    """

    module: fx.GraphModule
    state: tuple[str, ...]
    group: int
    num_rates: int


class UpdateTracer:
    """Traces the updates of stacked parameters, and computes the rates of each step.

    Args:
        members: the members' own optimizers, alike but for their rates; only read, never stepped.
        rates: of each parameter group, if they exist already; they follow a member that takes another member's place.

    Raises:
        UnfusableError: the optimizers have no form for all members at once.
    """

    def __init__(self, members: Sequence[Optimizer], rates: Sequence[MemberRates] | None = None) -> None:
        first = members[0]
        if not is_stackable(first):
            raise UnfusableError(
                f"its optimizer, {type(first).__name__}, steps each member by itself; it runs unplanned"
            )
        self.count = len(members)
        self._update = update_of(first)
        new_rates = [MemberRates([m.param_groups[g] for m in members]) for g in range(len(first.param_groups))]
        self._rates = new_rates if rates is None else rates
        for group_rates in self._rates:
            group_rates.read()
        self._constants = [group_rates.constants for group_rates in self._rates]
        self._switches = [
            {name: bool(group[name]) for name in _SWITCHES if name in group} for group in first.param_groups
        ]
        self._names: dict[int, tuple[str, ...]] = {}
        self._num_rates: dict[int, int] = {}

    @property
    def key(self) -> Hashable:
        """Key of the updates: tracers with equal keys trace the same updates."""
        groups = [
            (tuple(sorted(held.items())), self._state_names(number)) for number, held in enumerate(self._constants)
        ]
        return self._update, str(self._switches), tuple(groups)

    def traced(self, group: int, like: Tensor, mode: FakeTensorMode, *, is_clipped: bool = False) -> TracedUpdate:
        """Trace the update of a parameter.

        Args:
            group: index of the parameter group.
            like: a dense tensor of the parameter's geometry, made under `mode`.
            mode: for tensors without bytes.
            is_clipped: whether the gradient is multiplied with each member's factor first
                (`batched/gradient_clipping.py`).
        """
        names = self._state_names(group)
        num_rates = len(self.rates(group, [1] * self.count))
        self._num_rates[group] = num_rates
        num_factors = int(is_clipped)

        def run(p: Tensor, gradient: Tensor, *rest: Tensor) -> list[Tensor]:
            """Step the parameter in place; `rest` are the factors of clipping, the state's tensors and the rates, in order."""
            factors, rest = rest[:num_factors], rest[num_factors:]
            rate_tensors = iter(rest[len(names) :])
            layout = _layout(p)
            whole = gradient.new_empty(layout.size)  # a copy, because the step overwrites its gradient
            flat = FlatTensor(whole, layout.parts(whole))
            flat.parts[0].copy_(gradient)
            for factor in factors:
                clip_(flat.parts[0], factor)
            state = dict(zip(names, rest, strict=False))
            # As if every member had made a step, so that the state exists and all operators on the state are traced.
            self._step(
                group, layout, _flat(p), flat, state, [1] * self.count, lambda _values, _part: [next(rate_tensors)]
            )
            return []

        with mode:
            rate = torch.empty((self.count, *[1] * (like.dim() - 1)), dtype=like.dtype, device=like.device)
            factor = rate.new_empty(self.count)
            arguments = [torch.empty_like(like), torch.empty_like(like), *[factor] * num_factors]
            arguments += [torch.empty_like(like) for _ in names] + [rate.clone() for _ in range(num_rates)]
        module = make_fx(run, tracing_mode="fake")(*arguments)
        return TracedUpdate(module, names, group, num_rates)

    def initial_state(self, group: int, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter before its first step, with all tensors that the state will ever have.

        `parameter` is dense, and only its geometry counts.
        """
        with torch.no_grad():
            # A copy, because the traced update overwrites the parameter.
            return self._first(group, parameter.detach().clone(memory_format=torch.preserve_format))

    def rates(self, group: int, steps: Sequence[int], begun: Sequence[bool] | None = None) -> list[tuple[float, ...]]:
        """Return the rates of a step: for each rate, a number per member.

        Args:
            group: index of the parameter group.
            steps: number of steps that each member has made before.
            begun: whether each member's momentum has begun; None: begun with the member's first step.

        Raises:
            UnfusableError: the step has another form than the traced step.
        """
        requested_rates: list[tuple[float, ...]] = []

        def ask(values: Sequence[float], _: Any) -> float:
            requested_rates.append(tuple(values))
            return _SOME_NUMBER

        self._rates[group].read()
        # The stand-ins make the tensor arithmetic free, and only the requests for rates remain.
        state = dict.fromkeys(self._state_names(group), _NOTHING)
        options = self._step(group, _NOTHING, _flat(_NOTHING), _flat(_NOTHING), state, steps, ask, begun)
        self._check_constants(group, options)
        if len(requested_rates) != self._num_rates.get(group, len(requested_rates)):
            raise UnfusableError(
                f"its optimizer now takes {len(requested_rates)} rates, and the traced step {self._num_rates[group]}: an "
                "option that selects the optimizer's operators has changed; it runs unplanned"
            )
        return requested_rates

    def _check_constants(self, group: int, options: Sequence[str]) -> None:
        rates = self._rates[group]
        for name in options:
            held = self._constants[group].get(name)
            if rates.constant(name) != held:
                present = ", ".join(map(str, dict.fromkeys(rates(name))))
                traced = "takes a number for each trial" if held is None else f"holds {held} as a constant"
                raise UnfusableError(
                    f"its optimizer now has {name} {present}, and the traced step {traced}: a scheduler has changed the "
                    "option, or a trial with another kind of scheduler has joined; it runs unplanned"
                )

    def _step(
        self,
        group: int,
        layout: Any,
        p: FlatTensor,
        gradient: FlatTensor,
        state: dict[str, Any],
        steps: Sequence[int],
        ask: Callable[[Sequence[float], Any], Any],
        begun: Sequence[bool] | None = None,
    ) -> list[str]:
        counts = {"steps": list(steps), "begun": [step > 0 for step in steps] if begun is None else list(begun)}
        everybody = [True] * self.count
        update_arguments: tuple[Any, ...] = (
            layout,
            p,
            gradient,
            [state | counts],
            {},
            [self._rates[group]],
            self._switches[group],
            everybody,
        )
        update = _SingleParameterUpdate(ask, *update_arguments)
        self._update(update)
        return update.options

    def _first(self, group: int, p: Tensor) -> dict[str, Tensor]:
        self._rates[group].read()
        layout = _layout(p)
        gradient = layout.new(p.view(-1) if p.is_contiguous() else p.flatten())
        state: dict[str, Any] = {"steps": [0] * self.count}
        update_arguments: tuple[Any, ...] = (
            layout,
            _flat(p),
            gradient,
            [state],
            {},
            [self._rates[group]],
            self._switches[group],
            [True] * self.count,
        )
        run = _FirstParameterUpdate(*update_arguments)
        self._update(run)
        return run.initial

    def _state_names(self, group: int) -> tuple[str, ...]:
        # The names do not depend on the geometry, so a small parameter shows them.
        if group not in self._names:
            self._names[group] = tuple(self.initial_state(group, torch.zeros(self.count, 1)))
        return self._names[group]


def _layout(p: Tensor) -> FlatLayout:
    return FlatLayout(offsets=(0,), size=p.numel(), geometry=((p.size(), p.stride()),))


def _flat(tensor: Any) -> FlatTensor:
    """Return a dense tensor as its numbers in the order in which they lie."""
    if isinstance(tensor, _UnreadTensor):
        nothing: Any = tensor
        return FlatTensor(nothing, [nothing])
    # Not `as_strided`: the offset of a parameter in its storage would become a number of the graph, and blocks move.
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return FlatTensor((tensor if tensor.is_contiguous() else tensor.permute(order)).view(-1), [tensor])
