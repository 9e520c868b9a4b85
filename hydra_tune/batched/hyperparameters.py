"""`MemberRates`: the members' optimizer options, as a number for each member, or as tensors beside the stacked parameters.

`BatchedOptimizer` (`batched_optimizer.py`) reads the options anew before each plain step of active members, and
`UpdateTracer` (`planner/trace/optimizer_graph.py`) before each traced and each planned step. `update_kernels.py` computes
with the options, and chooses between a common float and tensors. The module must not know groups, trials or plans.

Note: bits. A steady option with which some members began differently must never count as begun alike again
(`begins_alike`), because some operators round differently for a float than for a tensor.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

_MAX_REMEMBERED = 256
"""Beyond so many, all remembered tensors of rates, or all made numbers, are dropped: schedules make new ones at each step."""


_BETAS = {"beta1": 0, "beta2": 1}
_STEADY = ("beta1", "beta2", "momentum", "alpha", "eps", "weight_decay")
_SWITCHES = ("nesterov", "centered", "decoupled_weight_decay", "amsgrad", "maximize", "capturable", "differentiable")
_NO_RATES = frozenset(["params", "foreach", "fused", "initial_lr", *_SWITCHES])
_OF_SCHEDULERS = ("max_momentum", "base_momentum")


def _option(group: Mapping[str, Any], name: str) -> float:
    if name in _BETAS:
        return float(group["betas"][_BETAS[name]])
    return float(group[name])


def _flat(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _numbers(value: Any) -> Any:
    """Replace tensors of one element by their numbers, also within tuples."""
    if isinstance(value, tuple):
        return tuple(map(_numbers, value))
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _steady(group: Mapping[str, Any]) -> dict[str, float]:
    """Return the options that no scheduler of torch changes; a scheduler of the user's own may change any option."""
    # Cyclic schedulers move momentum or betas and leave these keys, so no option counts as steady then.
    if any(name in group for name in _OF_SCHEDULERS):
        return {}
    return {name: _option(group, name) for name in _STEADY if name in group or (name in _BETAS and "betas" in group)}


class MemberRates:
    """The members' options of a parameter group, given each member's own group."""

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self._groups = list(groups)
        self._known: dict[tuple[float, ...], dict[tuple[int, torch.dtype, torch.device], Tensor]] = {}
        self._made: dict[Hashable, tuple[float, ...]] = {}
        self._read: list[Any] = []
        self._values = self._reader()
        steady_options = [_steady(group) for group in groups]
        self._alike = {n: v for n, v in steady_options[0].items() if all(n in o and o[n] == v for o in steady_options)}

    @property
    def constants(self) -> dict[str, float | None]:
        """The present values of the options that all members began with alike; None where the members have since parted."""
        return {name: self.constant(name) for name in self._alike}

    def constant(self, name: str) -> float | None:
        """Return the present value of an option that all members began with alike and still share; None for others."""
        if name not in self._alike:
            return None
        values = self(name)
        return values[0] if values.count(values[0]) == len(values) else None

    def admits(self, group: Mapping[str, Any]) -> bool:
        """Return whether a member with the given options keeps the common options common."""
        steady_options = _steady(group)
        return all(name in steady_options and steady_options[name] == value for name, value in self._alike.items())

    def replace(self, index: int, group: Mapping[str, Any]) -> None:
        """Give a slot to another member's options."""
        steady_options = _steady(group)
        self._groups[index] = group
        self._values = self._reader()
        # Only shrinks: an option that became common again would turn tensors into a float, and some operators round
        # differently for a float.
        self._alike = {n: v for n, v in self._alike.items() if n in steady_options and steady_options[n] == v}
        self._made.clear()

    def _reader(self) -> Callable[[Mapping[str, Any]], Any]:
        # Schedulers add keys of their own, such as `max_lr`, and the members' schedulers may differ.
        names = [n for n in self._groups[0] if n not in _NO_RATES and all(n in g for g in self._groups)]
        options = [value for group in self._groups for name in names for value in _flat(group[name])]
        self._has_tensors = any(isinstance(value, Tensor) for value in options)
        return itemgetter(*names)

    def read(self) -> None:
        """Begin a step: read the options, which schedulers may have changed since the last step."""
        options = list(map(self._values, self._groups))
        # As numbers: schedulers overwrite an option that is a tensor in place, so the tensor always equals itself.
        if self._has_tensors:
            options = list(map(_numbers, options))
        # Keys of Adam's rates hold step counts (`update_kernels.py`), so entries grow even while the options stay the
        # same.
        if options != self._read or len(self._made) > _MAX_REMEMBERED:
            self._made.clear()
            self._read = options

    def __call__(self, name: str) -> tuple[float, ...]:
        """Return an option of each member; Adam's betas are named `beta1` and `beta2`."""
        return self.made(name, lambda: [_option(group, name) for group in self._groups])

    def made(self, key: Hashable, make: Callable[[], Sequence[float]]) -> tuple[float, ...]:
        """Return numbers, one for each member; `read` drops them where options have changed or keys are too many."""
        numbers = self._made.get(key)
        if numbers is None:
            numbers = self._made[key] = tuple(make())
        return numbers

    def begins_alike(self, name: str) -> bool:
        """Return whether all members, past ones included, began with the same value of a steady option (`_steady`)."""
        return name in self._alike

    def beside(self, values: tuple[float, ...], like: Tensor) -> Tensor:
        """Return the members' numbers as a tensor of the dtype of `like` that broadcasts over `like`; cached."""
        tensors = self._known.setdefault(values, {})
        key = like.dim(), like.dtype, like.device
        if key not in tensors:
            # A schedule makes new values at every step, and each would stay cached on the device.
            if len(self._known) > _MAX_REMEMBERED:
                self._known.clear()
                tensors = self._known.setdefault(values, {})
            rates = torch.tensor(values, dtype=like.dtype, device=like.device)
            tensors[key] = rates.view(-1, *[1] * (like.dim() - 1))
        return tensors[key]
