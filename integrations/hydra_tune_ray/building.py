"""From what Ray has drawn to a task: one `build` for Ray, Optuna and the command line."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

Build = Callable[..., Any]


class Drawn(dict[str, Any]):
    """A trial's parameters: a dictionary, as Ray gives it, that also answers as a trial of Optuna does.

    A `build` that calls `trial.suggest_float("lr", ...)` is given what Ray has drawn for "lr".
    """

    @property
    def params(self) -> dict[str, Any]:
        """All parameters."""
        return dict(self)

    def suggest_float(self, name: str, *_range: float, **_options: Any) -> float:
        """What was drawn; of the arguments of Optuna only the name counts."""
        return float(self._drawn(name))

    def suggest_int(self, name: str, *_range: int, **_options: Any) -> int:
        """What was drawn, likewise."""
        return int(self._drawn(name))

    def suggest_categorical(self, name: str, *_choices: Any, **_options: Any) -> Any:
        """What was drawn, likewise."""
        return self._drawn(name)

    def _drawn(self, name: str) -> Any:
        if name not in self:
            known = ", ".join(map(repr, self)) or "nothing"
            raise KeyError(f"build asks for {name!r}, and param_space has {known}; add it there")
        return self[name]


def built(build: Build, config: Mapping[str, Any]) -> Any:
    """Call `build` with what was drawn.

    Args:
        build: takes one object, which is given all parameters (`build(config)`, `build(trial)`); or takes parameters by their
            names (`build(*, lr, width)`), as tasks of sweep files do.
        config: what was drawn.

    Returns:
        What `build` returns.

    Raises:
        Exception: whatever `build` raises.
    """
    return build(**config) if _takes_names(build, config) else build(Drawn(config))


def _takes_names(build: Build, config: Mapping[str, Any]) -> bool:
    try:
        parameters = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):  # some callables written in C tell nothing
        return False
    positional = [
        each
        for each in parameters
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD, each.VAR_POSITIONAL)
    ]
    if not positional or any(each.name in config for each in positional):
        return True
    needed = [each for each in positional if each.default is each.empty and each.kind != each.VAR_POSITIONAL]
    return len(needed) > 1
