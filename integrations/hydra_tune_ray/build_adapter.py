"""Builds a task from Ray's sample, so that one `build` serves Ray, Optuna and the command line.

`NodePoolRuntime` (`node/pool_runtime.py`) calls `built` in the pool when a trial begins, and `load_module`
(`weights.py`) when a user loads a trained module. Several builds may run at once, on
threads of the pool. The module must not import Ray, Optuna or torch.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

Build = Callable[..., Any]


class SampledParameters(dict[str, Any]):
    """A trial's parameters: Ray's dictionary, with the `suggest_` methods of an Optuna trial, which return Ray's sample."""

    @property
    def params(self) -> dict[str, Any]:
        """All parameters as a plain dictionary."""
        return dict(self)

    def suggest_float(self, name: str, *_range: float, **_options: Any) -> float:
        """Return Ray's sample for `name`; other arguments are ignored."""
        return float(self._drawn(name))

    def suggest_int(self, name: str, *_range: int, **_options: Any) -> int:
        """Return Ray's sample for `name`, likewise."""
        return int(self._drawn(name))

    def suggest_categorical(self, name: str, *_choices: Any, **_options: Any) -> Any:
        """Return Ray's sample for `name`, likewise."""
        return self._drawn(name)

    def _drawn(self, name: str) -> Any:
        if name not in self:
            names = ", ".join(map(repr, self)) or "nothing"
            raise KeyError(f"build asks for {name!r}, and param_space has {names}; add it there")
        return self[name]


def built(build: Build, config: Mapping[str, Any]) -> Any:
    """Call `build` with Ray's sample.

    Args:
        build: takes one object with all parameters (`build(config)`, `build(trial)`); or takes parameters by name
            (`build(*, lr, width)` or `build(lr, width)`), as tasks of sweep files do.
        config: Ray's sample.
    """
    return build(**config) if _takes_names(build, config) else build(SampledParameters(config))


def _takes_names(build: Build, config: Mapping[str, Any]) -> bool:
    try:
        parameters = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):  # some callables written in C have no signature
        return False
    positional = [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    # A name of the sample among the positional parameters: `def build(lr, width)`.
    if not positional or any(parameter.name in config for parameter in positional):
        return True
    # A single positional parameter takes the whole sample. Several without defaults can only be names, perhaps misspelt;
    # the call's own error then tells.
    needed = [
        parameter
        for parameter in positional
        if parameter.default is parameter.empty and parameter.kind != parameter.VAR_POSITIONAL
    ]
    return len(needed) > 1
