"""Detects variables that a task's functions look up at run time and that change after the task was made.

A Python function keeps the variables of its surroundings, not their values. In `for width in widths:
tasks.append(TrainTask(model=lambda: net(width), ...))` every model is built with the last width, because the models are
built after the loop. `TrainTask` (`task.py`) takes a `ClosureSnapshot` when a task is made, and `build_model`
(`train/building.py`) logs the changes when a trial builds its model. `LoopTask` (`loop_task.py`) takes a snapshot of its
loop; `LoopTrial` (`train/own_loop/loop_trial.py`) and `PlainLoop` (`train/own_loop/plain.py`) log the changes before the
loop runs. `train/checkpoint/trial_checkpoint.py` searches the variables of a task (`enclosed_parts`) for averaged weights
that no checkpoint holds, and `train/data/loader_copies.py` searches the variables of a data callable for loaders that
trials would share.

Note: the module knows nothing of tasks, and must neither call nor compare a user's objects: objects other than simple
values are compared by identity. A copied or unpickled task has no snapshot (`task.py`).
"""

import dis
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

_SIMPLE = (bool, int, float, complex, str, bytes, type(None))
_NOTHING = object()
_MOST_LETTERS = 40


@dataclass(frozen=True, slots=True)
class ClosureChange:
    """A variable that was assigned another value.

    Attributes:
        argument: name of the function, as of `ClosureSnapshot`.
        before, now: the values in words.
    """

    argument: str
    variable: str
    before: str
    now: str


class ClosureSnapshot:
    """Snapshot of the variables that some functions, by argument name, read.

    Numbers, texts, bytes and None are noted by value; any other value, a tuple included, by its identity.
    """

    __slots__ = ("_functions", "_noted")

    def __init__(self, functions: Mapping[str, object]) -> None:
        self._functions = {
            name: python_function
            for name, callable_object in functions.items()
            if (python_function := _function(callable_object)) is not None
        }
        self._noted = {
            (argument, variable): _note(value)
            for argument, function in self._functions.items()
            for variable, value in _variables(function)
        }

    def changed(self) -> list[ClosureChange]:
        """List the variables changed since the snapshot, except variables of a name that one of the functions assigns."""
        changes = [
            ClosureChange(argument, variable, self._noted[argument, variable][1], _note(value)[1])
            for argument, function in self._functions.items()
            for variable, value in _variables(function)
            if (argument, variable) in self._noted and self._noted[argument, variable][0] != _note(value)[0]
        ]
        if not changes:
            return []
        # Disassembling every function is slow: only done once a change has been found.
        assigned_names = {name for function in self._functions.values() for name in _assigned(function.__code__)}
        return [change for change in changes if change.variable not in assigned_names]


def enclosed_parts(given: object, *, with_globals: bool = False) -> Iterator[tuple[str, object]]:
    """Iterate over a function's closure variables, and the globals that it reads if wanted (a builtin: None), with names.

    A dict, list or tuple gives each of its parts. Partials and bound methods stand for their function, and any other object
    has no parts.
    """
    function = _function(given)
    if function is None:
        return
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    variables = [(name, _content(cell)) for name, cell in cells]
    if with_globals:
        variables += [(name, function.__globals__.get(name)) for name in _read_globals(function.__code__)]
    for name, value in variables:
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        for part in tuple(parts):
            yield name, part


def _function(given: object) -> FunctionType | None:
    """Return the Python function beneath partials and bound methods, or None."""
    # Partials and methods may be stacked in any order.
    while isinstance(given, functools.partial | MethodType):
        given = given.func if isinstance(given, functools.partial) else given.__func__
    return given if isinstance(given, FunctionType) else None


def _variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Iterate over the assigned closure variables of a function, and over the globals that are simple values."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        value = _content(cell)
        if value is not _NOTHING:
            yield name, value
    # Only simple values: a module, a class or a function among the globals is no setting that a loop changes.
    for name in _read_globals(function.__code__):
        # A name that is no global is a builtin.
        value = function.__globals__.get(name, _NOTHING)
        if issubclass(type(value), _SIMPLE):
            yield name, value


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # no value has been assigned yet
        return _NOTHING


def _note(value: Any) -> tuple[object, str]:
    """Return a comparison key for a value, and the value in words."""
    # `isinstance` may run the `__class__` of a user's object, and `repr` the `__repr__` of a user's class.
    kind: Any = next((kind for kind in _SIMPLE if issubclass(type(value), kind)), None)
    if kind is not None:
        # As text, so that NaN equals itself, and 1 differs from True.
        text = kind.__repr__(value)
        return (type(value), text), text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}..."
    # By identity, because comparing arbitrary objects may run the user's code or compare whole tensors.
    return id(value), f"an object of {type(value).__name__}"


@functools.lru_cache(maxsize=1024)
def _read_globals(code: CodeType) -> tuple[str, ...]:
    """Names of the globals that a function, or a function nested within, reads."""
    return tuple(dict.fromkeys(_names(code, ("LOAD_GLOBAL", "LOAD_NAME"))))


def _assigned(code: CodeType) -> Iterator[str]:
    """Names of the surrounding variables that a function, or a function nested within, assigns."""
    return _names(code, ("STORE_DEREF", "STORE_GLOBAL", "DELETE_DEREF", "DELETE_GLOBAL"))


def _names(code: CodeType, operators: tuple[str, ...]) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in operators:
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant, operators)
