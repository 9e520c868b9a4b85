"""`Registered`: all that a loop registers, as the one module, the one optimizer and the one rest of a trial.

`Loop.register` (`handle.py`) makes a `Registered`. If the loop has checkpoints, the first `Loop.step` asks
`left_out` for variables of the loop that nobody would save. `LoopTrial` (`loop_trial.py`) moves, saves and restores the
parts as those of any trial, and `PlainLoop` (`plain.py`) only moves the module. The loop's own objects stay in use: the
loop steps its own optimizers, and a `JointOptimizer` must never be stepped.
"""

from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from hydra_tune.errors import TaskError


def left_out(frame: FrameType | None, registered: Sequence[object]) -> list[str]:
    """Return the names of variables with a state that is not registered, and so is not saved.

    The frame's callers are looked at too, up to the code of this package.
    """
    known = {id(each) for each in registered}
    for each in registered:
        if isinstance(each, nn.Module):
            known.update(map(id, each.modules()))
        # Such as the parts of a `SequentialLR`, which are in its state.
        for value in vars(each).values() if hasattr(each, "__dict__") else ():
            known.update(map(id, value) if isinstance(value, list | tuple) else {id(value)})
    names = []
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] != "hydra_tune":
        for name, value in frame.f_locals.items():
            if id(value) not in known and _has_state(value):
                names.append(name)
                known.add(id(value))
        frame = frame.f_back
    return names


def _has_state(value: object) -> bool:
    if isinstance(value, type) or not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
        return False
    if isinstance(value, nn.Module) and not any(parameter.requires_grad for parameter in value.parameters()):
        return False  # a loss, a metric, or a frozen model
    try:
        return bool(value.state_dict())
    except Exception:  # noqa: BLE001 - code of the user's, asked for a warning only
        return False


class _JointState(MutableMapping[Any, Any]):
    """State of several optimizers; a parameter's entry is in the state of the optimizer that has the parameter.

    Entries of an optimizer as a whole have as their key the optimizer's place and the key there.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def _of(self, key: Any) -> tuple[MutableMapping[Any, Any], Any]:
        """Return the state with an entry, and the entry's key there."""
        if not isinstance(key, Tensor):
            place, inner_key = key
            return self._optimizers[place].state, inner_key
        for optimizer in self._optimizers:
            if any(parameter is key for group in optimizer.param_groups for parameter in group["params"]):
                return optimizer.state, key
        return self._optimizers[0].state, key

    def __getitem__(self, key: Any) -> Any:
        state, inner_key = self._of(key)
        return state[inner_key]

    def __setitem__(self, key: Any, value: Any) -> None:
        state, inner_key = self._of(key)
        state[inner_key] = value

    def __delitem__(self, key: Any) -> None:
        state, inner_key = self._of(key)
        del state[inner_key]

    def __contains__(self, key: object) -> bool:
        state, inner_key = self._of(key)
        return inner_key in state

    def get(self, key: Any, default: Any = None) -> Any:
        """Return an entry, and make none: `state[key]` of an optimizer would make one."""
        state, inner_key = self._of(key)
        return state.get(inner_key, default)

    # Whole mappings, because looking each key up takes long where there are many parameters.

    def items(self) -> Any:
        """Return all entries."""
        return [
            (key if isinstance(key, Tensor) else (place, key), value)
            for place, optimizer in enumerate(self._optimizers)
            for key, value in optimizer.state.items()
        ]

    def values(self) -> Any:
        """Return the values of all entries."""
        return [value for optimizer in self._optimizers for value in optimizer.state.values()]

    def __iter__(self) -> Iterator[Any]:
        return (key for key, _ in self.items())

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)


class JointOptimizer(Optimizer):
    """Several optimizers, or none, as one that is moved and saved; the loop steps its own."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = tuple(optimizers)

    @property
    def state(self) -> Any:  # type: ignore[override]  # of the optimizers
        """State of all optimizers, by parameter."""
        return _JointState(self.optimizers) if self.optimizers else {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # of the optimizers
        """Groups of all optimizers, in order."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each optimizer, by its place."""
        return {str(place): optimizer.state_dict() for place, optimizer in enumerate(self.optimizers)}


class JointRest:
    """Other objects with a state, saved and restored together."""

    def __init__(self, objects: Sequence[Any]) -> None:
        self._objects = objects

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each object, by its place, without functions."""
        # Functions are not saved: the loop builds its objects with their own, as a task's factories do.
        return {
            str(place): {name: value for name, value in each.state_dict().items() if not callable(value)}
            for place, each in enumerate(self._objects)
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of each object."""
        for place, each in enumerate(self._objects):
            each.load_state_dict(dict(ChainMap(state[str(place)], each.state_dict())))


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """All that a loop has registered.

    Attributes:
        module: the module, or a list of several.
        optimizer: the optimizer; of several, or of none, a `JointOptimizer`.
        rest: the other objects; None if there are none.
    """

    module: nn.Module
    optimizer: Optimizer
    rest: JointRest | None

    @classmethod
    def of(cls, objects: Sequence[object]) -> Self:
        """Sort the objects by kind.

        Raises:
            TaskError: no module, an object of no kind or with a state that is no mapping, or an optimizer with a parameter of
                no module.
        """
        modules = [each for each in objects if isinstance(each, nn.Module)]
        optimizers = [each for each in objects if isinstance(each, Optimizer)]
        rest = [each for each in objects if not isinstance(each, nn.Module | Optimizer)]
        if not modules:
            kinds = ", ".join(type(each).__name__ for each in objects) or "nothing"
            raise TaskError(f"loop.register() needs the model that is trained, and got {kinds}")
        for each in rest:
            if isinstance(each, Tensor) or not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise TaskError(
                    "loop.register() takes modules, optimizers, and objects with state_dict() and load_state_dict(), not "
                    f"{type(each).__name__}; keep tensors in buffers of a module"
                )
            if not isinstance(state := each.state_dict(), Mapping):
                raise TaskError(
                    f"state_dict() of {type(each).__name__} returns {type(state).__name__}, and a loop's checkpoint has dicts; "
                    "return a dict of the values by name"
                )
        module = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        own = {id(parameter) for parameter in module.parameters()}
        for optimizer in optimizers:
            for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                if id(parameter) not in own:
                    raise TaskError(
                        f"{type(optimizer).__name__} holds a tensor of shape {tuple(parameter.shape)} that is not a parameter "
                        "of a registered module; register the module that has it, too"
                    )
        return cls(
            module=module,
            optimizer=optimizers[0] if len(optimizers) == 1 else JointOptimizer(optimizers),
            rest=JointRest(rest) if rest else None,
        )
