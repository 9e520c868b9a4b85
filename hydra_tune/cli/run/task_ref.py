"""Finds the function named by a sweep file, and checks its signature against the sweep.

Importing the user's module runs its code, before any pool is opened: `sweep_run.py`, `cluster.py`,
`cli/dry_run/checking.py` and `cli/dry_run/planning.py` call `load_task` once. The sweep's folder stays at the front of
`sys.path`, for the user's later imports.
"""

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hydra_tune.cli.sweep_file.spec import SweepSpec
from hydra_tune.errors import SweepFileError, did_you_mean


def load_task(spec: SweepSpec) -> Callable[..., Any]:
    """Import `module:function` from the sweep file's folder or the environment; return the function.

    Raises:
        SweepFileError: no such module or function, a module that does not import, or a function that does not take the
            parameters; one line `file:line:column: what` for each problem.
    """
    module_name, colon, function_name = spec.task.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module_name.split("."), *function_name.split("."))):
        raise _error(spec, "task", f"must be module:function, e.g. train:build, not {spec.task!r}")
    folder = str(Path(spec.file).resolve().parent)
    if folder in sys.path:
        sys.path.remove(folder)  # move the folder to the front, wherever it was
    sys.path.insert(0, folder)
    module = _import(spec, module_name, folder)
    _check_place(spec, module_name.partition(".")[0], folder)
    function = _attribute(spec, module, module_name, function_name)
    if not callable(function):
        raise _error(spec, "task", f"{spec.task} is not a function, but {type(function).__name__}")
    _check_arguments(spec, function)
    return function  # type: ignore[no-any-return]  # callable() does not tell mypy of what it returns


def _error(spec: SweepSpec, path: str, what: str) -> SweepFileError:
    return SweepFileError(f"{spec.at(path)}: {what}")


def _import(spec: SweepSpec, name: str, folder: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The missing module is the named one or a package above it, not a module that it imports.
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            module_names = [path.stem for path in Path(folder).glob("*.py")]
            hint = did_you_mean(name, module_names)
            raise _error(
                spec, "task", f"there is no module {error.name!r} in {folder} or the environment; {hint}".rstrip("; ")
            ) from error
        raise _error(spec, "task", f"{name} does not import: {_told(error)}") from error
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise _error(spec, "task", f"{name} does not import: {_told(error)}") from error


def _check_place(spec: SweepSpec, name: str, folder: str) -> None:
    """Refuse a module that shadows the file's neighbour of the same name, because somebody else imported it before."""
    neighbour = next(
        (path for path in (Path(folder, name, "__init__.py"), Path(folder, f"{name}.py")) if path.is_file()), None
    )
    loaded_file = getattr(sys.modules[name], "__file__", None)
    if neighbour is not None and (loaded_file is None or Path(loaded_file).resolve() != neighbour.resolve()):
        raise _error(
            spec,
            "task",
            f"{name} is {str(neighbour)!r}, but {loaded_file or 'a part of Python'} has the same name; rename yours",
        )


def _told(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SyntaxError):
        return text
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen") and frame.filename not in {__file__, importlib.__file__}
    ]
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else text


def _attribute(spec: SweepSpec, module: Any, module_name: str, name: str) -> Any:
    # A dotted name may lead through classes.
    value = module
    for part in name.split("."):
        if not hasattr(value, part):
            names = [attribute for attribute in vars(value) if not attribute.startswith("_")]
            hint = did_you_mean(part, names)
            raise _error(spec, "task", f"module {module_name!r} has no {name!r}; {hint}".rstrip("; "))
        value = getattr(value, part)
    return value


def _check_arguments(spec: SweepSpec, function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables written in C have no signature; the call itself will tell
        return
    parameters = signature.parameters.values()
    if spec.parameters is None:
        try:
            # Any object stands for the trial: only the number of arguments counts.
            signature.bind(object())
        except TypeError as error:
            raise _error(
                spec, "task", f"{spec.task} is called with the trial, as the file has no parameters:, but {error}"
            ) from error
        return
    problems = [*_needed(spec, parameters), *_unknown(spec, parameters)]
    if problems:
        raise SweepFileError("\n".join(problems))


def _unknown(spec: SweepSpec, parameters: Iterable[inspect.Parameter]) -> list[str]:
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return []
    takes = [p.name for p in parameters if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY}]
    problems = []
    for name in spec.parameters or ():
        if name not in takes:
            hint = did_you_mean(name, takes) or f"it takes {', '.join(takes) or 'nothing'}"
            problems.append(f"{spec.at(f'parameters.{name}')}: {spec.task} takes no argument {name!r}; {hint}")
    return problems


def _needed(spec: SweepSpec, parameters: Iterable[inspect.Parameter]) -> list[str]:
    problems = []
    for parameter in parameters:
        # Drawn parameters are passed by name.
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            problems.append(f"{spec.at('task')}: {spec.task} takes {parameter.name!r} by position only; drop the '/'")
        elif parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY}:
            continue
        elif parameter.default is parameter.empty and parameter.name not in (spec.parameters or ()):
            problems.append(
                f"{spec.at('task')}: {spec.task} needs {parameter.name!r}, which is not among the parameters"
            )
    return problems
