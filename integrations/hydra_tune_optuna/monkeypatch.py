"""`install` and `uninstall`: `executor=` for unchanged programs that write `import optuna`.

Functions that pass all other arguments on replace `create_study` and `load_study` in the public modules of Optuna. The
module does not know the effect of an executor on a study: `study.py` does. People import `install` from `hydra_tune_optuna`
and call the function before such a program imports names from Optuna.

Note: `_lock` guards `_replaced` and `_made`. `uninstall` must put back the very objects of Optuna, and must leave a name
alone that others have replaced since `install`.
"""

import functools
import inspect
import os
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import optuna
from optuna.study import Study

from hydra_tune import HydraExecutor
from hydra_tune_optuna.pool_study import PoolStudy
from hydra_tune_optuna.study import with_executor
from hydra_tune_optuna.weights import KeepBest, check_keeping

_Function = Callable[..., Study]

_PLACES: tuple[tuple[ModuleType, str], ...] = tuple(
    (module, name) for name in ("create_study", "load_study") for module in (optuna, optuna.study)
)

_lock = threading.Lock()
_replaced: dict[tuple[ModuleType, str], tuple[_Function, _Function]] = {}
"""The original and the installed function of each place since `install`; empty if nothing is installed."""

_made: set[_Function] = set()
"""All functions ever installed: code that patches and restores may bring a function back after `uninstall`."""


def install() -> None:
    """Make `optuna.create_study` and `optuna.load_study` take `executor=`, like the functions of this package.

    The two functions in `optuna.study` are replaced as well. Without an executor the replacements act as Optuna's own,
    with the same arguments, warnings and errors. Call `install` before importing modules with `from optuna import
    create_study`: a name imported earlier keeps the old function. Repeated calls do nothing.
    """
    with _lock:
        if _replaced:
            return
        with_executor_option = functools.cache(
            _taking_an_executor
        )  # one replacement for each function, in all its places
        for module, name in _PLACES:
            stock = getattr(module, name)
            # After an uninstall somebody may have restored one of our functions: unwrap to Optuna's own, or calls would
            # nest.
            if stock in _made:
                stock = inspect.unwrap(stock, stop=lambda function: function not in _made)
            # Noted first: an interrupt in between must leave nothing replaced that `uninstall` does not know.
            _replaced[module, name] = (stock, with_executor_option(stock))
            setattr(module, name, with_executor_option(stock))


def uninstall() -> None:
    """Restore Optuna's own functions, the very objects. Studies made meanwhile stay as they are.

    Replacements made by others since `install` stay in place. Repeated calls do nothing.
    """
    with _lock:
        for (module, name), (stock, ours) in _replaced.items():
            # Else somebody has replaced our function since, and may still call it.
            if getattr(module, name) is ours:
                setattr(module, name, stock)
        _replaced.clear()


def _taking_an_executor(stock: _Function) -> _Function:
    @functools.wraps(stock)
    def function(
        *args: Any,
        executor: HydraExecutor | None = None,
        keep_best: KeepBest | None = None,
        weights_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> Study:
        """Call Optuna's function; with an executor, return the study as a `PoolStudy`."""
        check_keeping(keep_best, weights_dir, has_executor=executor is not None)
        if executor is None:
            return stock(*args, **kwargs)
        PoolStudy.check_executor(executor)  # refused before a study is created
        return with_executor(
            stock(*args, **kwargs),
            executor,
            kwargs.get("direction"),
            kwargs.get("directions"),
            keep_best=keep_best,
            weights_dir=weights_dir,
        )

    stock_signature = inspect.signature(stock)
    parameters = inspect.signature(function, follow_wrapped=False).parameters
    ours = [parameters[name] for name in ("executor", "keep_best", "weights_dir")]
    # help() and editors show this signature; functools.wraps alone would show Optuna's.
    function.__signature__ = stock_signature.replace(parameters=[*stock_signature.parameters.values(), *ours])  # type: ignore[attr-defined]
    function.__module__ = "optuna.study"  # pickle looks the function up there
    _made.add(function)
    return function
