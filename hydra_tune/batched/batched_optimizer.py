"""Optimizers of stacked members: a single step for all members, each with its own rates.

Before each step of active members the rates are read from the members' own optimizers, where the members' schedulers write.
Every member has its own step count. `stacked_optimizer` (`fusion/group/stacked_state.py`) makes the optimizer, through
`group_optimizer` (`per_member_optimizer.py`), when members are stacked; `hand_out` and `put_in` there copy a member's state
out and in. `ModelState` (`train/state/model_state.py`) calls `step` in plain steps of the group, planned steps
(`fusion/runtime/step_arguments.py`) call `note_step`, and `GroupTrial` (`fusion/group/group_trial.py`) asks `admits`.
`fusion/matching/fusion_key.py` asks for `options_key` before trials are grouped, and `planner/trace/optimizer_graph.py`
asks `is_stackable` before an update is traced. An optimizer without such a form runs member by member
(`PerMemberOptimizer`, a subclass of `StackedOptimizer`). The module must not know groups, trials or plans.

Note: masks. `GroupExecutor` (`fusion/group/group_executor.py`) sets `active` before a step, and
`fusion/group/group_step.py` excludes members without finite losses or gradients. A step must leave parameters and state of
members that are not active at the same bits. `admits` tells whether a new member would change the operators of the present
members.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from typing_extensions import override

from hydra_tune.batched.flat_tensors import FlatLayout, FlatTensor, runs
from hydra_tune.batched.hyperparameters import MemberRates
from hydra_tune.batched.update_kernels import COUNTED, UPDATES, StackedParameterUpdate, update_of

_SWITCHES = ("nesterov", "centered", "decoupled_weight_decay")
_NOT_TENSORS = ("steps", "begun")
_MAX_REMEMBERED = 64
_OWN = ("amsgrad", "maximize", "capturable", "differentiable")


def _steps_of(own: Mapping[str, Any]) -> int:
    """Return the steps of a member's optimizer state; without a count, 1 if there is state."""
    return int(own["step"]) if "step" in own else int(bool(own))


def is_stackable(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has a form for all members at once; otherwise members step separately."""
    if type(optimizer) not in UPDATES or any(group.get(name) for group in optimizer.param_groups for name in _OWN):
        return False
    # The stacked updates square gradients, and torch steps a complex parameter as pairs of real numbers. SGD squares none.
    if type(optimizer) is not SGD and any(p.is_complex() for group in optimizer.param_groups for p in group["params"]):
        return False
    # torch fills Adagrad's sums with the constructor's argument, whatever a group says.
    begins = optimizer.defaults.get("initial_accumulator_value")
    if any(group.get("initial_accumulator_value") != begins for group in optimizer.param_groups):
        return False
    # Hooks receive the optimizer whose step runs, and a stacked step never calls the members' own `step`.
    own_hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks  # noqa: SLF001
    return not (own_hooks or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def options_key(optimizer: Optimizer) -> Hashable:
    """Return the options that members' optimizers must share; every rate may differ between members."""
    if not is_stackable(optimizer):
        return (type(optimizer), "each by itself")
    groups = tuple(
        tuple((name, bool(group[name])) for name in _SWITCHES if name in group) for group in optimizer.param_groups
    )
    return (type(optimizer), groups)


class StackedOptimizer(Optimizer, ABC):
    """The optimizer of a group: steps stacked parameters as the members' own optimizers would step each part.

    Args:
        members: the members' own optimizers, with equal `options_key`.
        groups: stacked parameters of every parameter group, in the members' order.

    Attributes:
        active: whether each member takes the next steps.
        members: as given.
    """

    active: list[bool]

    def __init__(self, members: Sequence[Optimizer], groups: Sequence[Sequence[Tensor]]) -> None:
        super().__init__([{"params": list(group)} for group in groups], {})
        self.active = [True] * len(members)
        self.members = list(members)

    @abstractmethod
    def member_state(self, p: Tensor, index: int) -> dict[str, Any]:
        """Return copies of a member's state for a parameter, as the member's own optimizer would hold the state."""

    def admits(self, optimizer: Optimizer) -> bool:
        """Return whether a member with the given optimizer would leave the bits of the others unchanged."""
        del optimizer
        return True

    def replace(self, index: int, optimizer: Optimizer) -> None:
        """Give a slot to another member with the given optimizer."""
        self.members[index] = optimizer

    @abstractmethod
    def put(self, p: Tensor, index: int, own: Mapping[str, Any]) -> dict[int, Tensor]:
        """Set a slot of a parameter's state to a member's own state, except for tensor contents.

        Args:
            p: the stacked parameter.
            index: the slot.
            own: state of the member's own parameter; empty before its first step.

        Returns:
            Values to write into the slot, by `id` of the state's tensors.
        """

    @abstractmethod
    def entries(self, p: Tensor, owns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return missing state of a stacked parameter, made from each member's own; empty before any member's step."""


@dataclass(frozen=True, slots=True)
class _ContiguousParameters:
    """Parameters that take a step together, with the parameter group of each."""

    layout: FlatLayout
    parameters: list[Tensor]
    groups: list[int]


class BatchedOptimizer(StackedOptimizer):
    """Steps all members at once, with few operators over all parameters that lie together in memory.

    Reads the members' optimizers, and writes there nothing but torch's mark of a step (`_opt_called`).
    """

    def __init__(self, members: Sequence[Optimizer], groups: Sequence[Sequence[Tensor]]) -> None:
        super().__init__(members, groups)
        first = members[0]
        self._update = update_of(first)
        self._runs: dict[Hashable, list[_ContiguousParameters]] = {}
        self._counts = isinstance(first, COUNTED)
        self.rates = [MemberRates([m.param_groups[number] for m in members]) for number in range(len(groups))]
        self._switches = [
            {name: bool(group[name]) for name in _SWITCHES if name in group} for group in first.param_groups
        ]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        """Step the parameters with gradients, for the active members; may overwrite the gradients."""
        assert closure is None, "a stacked step has its gradients"
        for member in self.members:
            member._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 - avoids a scheduler's warning
        if not any(self.active):
            return
        # Schedulers write to the members' own optimizers between steps.
        for rates in self.rates:
            rates.read()
        present = [
            (p, number) for number, group in enumerate(self.param_groups) for p in group["params"] if p.grad is not None
        ]
        # Ids too, because another block may take the address of a block that has moved.
        addresses = tuple([(id(p), p.data_ptr()) for p, _ in present])
        parameter_runs = self._runs.get(addresses, [])
        states = [self._state_of(run) for run in parameter_runs]
        # A parameter without a gradient misses a step, and a loaded state may lie elsewhere: form the runs again.
        if not parameter_runs or None in states:
            parameter_runs = self._runs[addresses] = self._runs_of(present)
            if len(self._runs) > _MAX_REMEMBERED:
                self._runs = {addresses: parameter_runs}
            states = [self._state_of(run) for run in parameter_runs]
        for run, state in zip(parameter_runs, states, strict=True):
            assert state is not None, "state lies as the parameters do"
            self._step(run, state)

    def note_step(self, parameters: Iterable[Tensor]) -> None:
        """Record that a planned step has stepped the given parameters, with complete state, for the active members."""
        for member in self.members:
            member._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 - as in `step`
        stepped_ids = {id(p) for p in parameters}
        for number, group in enumerate(self.param_groups):
            for state in (self.state[p] for p in group["params"] if id(p) in stepped_ids):
                if "momentum_buffer" in state and not self._counts:
                    # The same rule as `StackedParameterUpdate.begun`, so planned and plain steps can alternate.
                    begun_before = state.get("begun", [False] * len(self.active))
                    members = zip(begun_before, self.rates[number]("momentum"), self.active, strict=True)
                    state["begun"] = [begun or (bool(m) and active) for begun, m, active in members]
                state["steps"] = [step + active for step, active in zip(state["steps"], self.active, strict=True)]

    # Torch sets `hooked` on a step once wrapped to call hooks. `is_stackable` refuses hooks, so skip the wrapper.
    step.hooked = True  # type: ignore[attr-defined]

    @override
    def member_state(self, p: Tensor, index: int) -> dict[str, Any]:
        """As of `StackedOptimizer`, by torch's names; empty before the member's first step."""
        state = self.state.get(p, {})
        if not state or not state["steps"][index]:
            return {}
        entries: dict[str, Any] = {
            name: value[index].clone() for name, value in state.items() if isinstance(value, Tensor)
        }
        begun = state["begun"][index] if "begun" in state else self._option(p, "momentum", index) != 0
        if not begun:  # other members have momentum, but not this member
            entries.pop("momentum_buffer", None)
        if self._counts:
            entries["step"] = torch.tensor(float(state["steps"][index]), dtype=torch.get_default_dtype())
        return entries

    @override
    def admits(self, optimizer: Optimizer) -> bool:
        return all(r.admits(group) for r, group in zip(self.rates, optimizer.param_groups, strict=True))

    @override
    def replace(self, index: int, optimizer: Optimizer) -> None:
        super().replace(index, optimizer)
        for rates, group in zip(self.rates, optimizer.param_groups, strict=True):
            rates.replace(index, group)

    @override
    def put(self, p: Tensor, index: int, own: Mapping[str, Any]) -> dict[int, Tensor]:
        """As of `StackedOptimizer`; sets the slot's step count."""
        state = self.state.get(p, {})
        if not state:
            return {}
        state["steps"][index] = _steps_of(own)
        if "begun" in state:
            state["begun"][index] = "momentum_buffer" in own
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        # The bytes may be on a device or the host; the caller writes them block by block.
        return {id(value): own[name] if name in own else value.new_zeros(()) for name, value in tensors.items()}

    @override
    def entries(self, p: Tensor, owns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """As of `StackedOptimizer`, with zeros or Adagrad's start for members without state."""
        steps, state = [_steps_of(row) for row in owns], self.state.get(p, {})
        if not any(steps):
            return {}
        # A stack counts steps for each member in `steps`, in place of torch's `step` tensors.
        names = {name for row in owns for name, value in row.items() if isinstance(value, Tensor)} - {"step"}
        new_entries: dict[str, Any] = {}
        for name in sorted(names):
            like = next(row[name] for row in owns if name in row)
            new_entries[name] = torch.stack(
                [row[name] if name in row else self._fresh(p, name, like, i) for i, row in enumerate(owns)]
            )
        new_entries["steps"] = steps
        if "momentum_buffer" in names and not self._counts:
            new_entries["begun"] = ["momentum_buffer" in row for row in owns]
        return {name: value for name, value in new_entries.items() if name not in state}

    def _fresh(self, p: Tensor, name: str, like: Tensor, index: int) -> Tensor:
        # Adagrad's sum begins with an option's value, all other state with zeros.
        if name != "sum":
            return torch.zeros_like(like)
        return torch.full_like(like, self._option(p, "initial_accumulator_value", index))

    def _option(self, p: Tensor, name: str, index: int) -> float:
        number = next(n for n, group in enumerate(self.param_groups) if any(q is p for q in group["params"]))
        return float(self.members[index].param_groups[number].get(name, 0.0))

    def _runs_of(self, present: Sequence[tuple[Tensor, int]]) -> list[_ContiguousParameters]:
        kinds: dict[Hashable, list[tuple[Tensor, int]]] = {}
        for p, number in present:
            kinds.setdefault(self._kind(p, number), []).append((p, number))
        return [
            parameter_run
            for same_kind in kinds.values()
            for layout, run in runs(same_kind)
            for parameter_run in self._steppable(_known(layout, run))
        ]

    def _kind(self, p: Tensor, number: int) -> Hashable:
        state = self.state[p]
        if not state:
            state["steps"] = [0] * len(self.active)
        switches = tuple(self._switches[number].items())
        return (p.dtype, p.device, switches, tuple(state["steps"]), tuple(state.get("begun", ())), tuple(sorted(state)))

    def _state_of(self, run: _ContiguousParameters) -> dict[str, FlatTensor] | None:
        """Return the state of a run; None if step counts differ, or the state does not lie in memory as the parameters do."""
        states = [self.state[p] for p in run.parameters]
        first = states[0]
        for state in states:
            if len(state) != len(first) or any(state.get(name) != first.get(name) for name in _NOT_TENSORS):
                return None
        flats: dict[str, FlatTensor] = {}
        for name in first:
            if name not in _NOT_TENSORS:
                flat_tensor = run.layout.found([state[name] for state in states])
                if flat_tensor is None:
                    return None
                flats[name] = flat_tensor
        return flats

    def _steppable(self, run: _ContiguousParameters) -> Iterator[_ContiguousParameters]:
        """Yield the run, or its parameters separately if their state lies differently in memory."""
        states = [self.state[p] for p in run.parameters]
        names = [name for name in states[0] if name not in _NOT_TENSORS]
        tensors = {name: [state[name] for state in states] for name in names}
        if all(run.layout.fits(entries) and run.layout.found(entries) is not None for entries in tensors.values()):
            yield run
            return
        for p, number, state in zip(run.parameters, run.groups, states, strict=True):
            for name in names:
                # Flat operators pair elements by position in memory, so the state takes the parameter's strides.
                if state[name].stride() != p.stride():
                    state[name] = torch.empty_like(p).copy_(state[name])
            ((layout, parameters),) = runs([(p, number)])
            yield _known(layout, parameters)

    def _step(self, run: _ContiguousParameters, state: dict[str, FlatTensor]) -> None:
        whole = run.layout.found(run.parameters)
        assert whole is not None, "it was read off them"
        step = StackedParameterUpdate(
            run.layout,
            whole,
            run.layout.gathered([p.grad for p in run.parameters if p.grad is not None]),
            [self.state[p] for p in run.parameters],
            state,
            [self.rates[number] for number in run.groups],
            self._switches[run.groups[0]],
            self.active,
        )
        self._update(step)
        step.finish()


def _known(layout: FlatLayout, run: Sequence[tuple[Tensor, int]]) -> _ContiguousParameters:
    return _ContiguousParameters(layout, [p for p, _ in run], [number for _, number in run])
