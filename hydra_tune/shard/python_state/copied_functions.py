"""Functions that a model holds, and that hold the model or a part of the model, in a copy of the model.

Code that patches a model replaces `model.forward` by a function, and the function calls the former `forward` by a variable
of its closure, by a default argument, or by a list of layers. `copy.deepcopy` copies no function, so a copy of the model
would compute with the parameters of the original. `copied_model` (`shard/capture/step_capture.py`) copies each model with
the memo of `functions_copied`, and `own_copy` (`train/own_copy.py`) refuses a copy in which `place_of` still finds the
original. The module must not import captures, plans or trials.
"""

import copy
import gc
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch._library.custom_ops import OPDEFS

from hydra_tune.shard.python_state.code_names import global_names, is_installed

_LEAVES = (type, ModuleType, CodeType, Tensor, logging.Logger, logging.Handler)
_CONTAINERS = (dict, list, tuple, set)
_MOST_ITEMS = 4096  # a longer container holds data or a vocabulary, and a walk through all of the items takes seconds
_FOLLOWED_GLOBALS = (nn.Module, Tensor, FunctionType, MethodType, BuiltinMethodType, partial, list, tuple, dict)
"""Classes of global variables that a function's copy may call; other objects have settings that a copy may share."""


class _FunctionMemo(dict[int, Any]):
    """A memo of `copy.deepcopy` by which methods of copied functions are copied as well.

    `copy.deepcopy` asks its memo before it asks how to copy a value, and copies of a method only the object.
    """

    def __init__(self, memo: Mapping[int, Any], methods: Iterable[MethodType]) -> None:
        super().__init__(memo)
        self._methods = {id(method): method for method in methods}

    def get(self, key: int, default: Any = None) -> Any:
        if key in self._methods and key not in self:
            method = self._methods[key]
            function = super().get(id(method.__func__), method.__func__)
            self[key] = MethodType(function, copy.deepcopy(method.__self__, self))
        return super().get(key, default)


@contextmanager
def functions_copied(model: nn.Module, memo: Mapping[int, Any]) -> Iterator[dict[int, Any]]:
    """Yield a memo with which `copy.deepcopy` of a model copies functions that hold a part of the model.

    At the end of the context, the copied functions get copies of the variables of their closures, of their defaults and of
    their attributes. A value that cannot be copied stays shared with the original, and so do global variables and whatever
    leads to no part of the model, such as a counter.

    Args:
        model: the model.
        memo: copies made before, by the id of the original.
    """
    parts = {id(part) for part in parts_of(model) if memo.get(id(part)) is not part}
    holding = _holding(model, parts)
    cells = [value for value in holding.values() if isinstance(value, CellType)]
    functions = [value for value in holding.values() if isinstance(value, FunctionType)]
    memo = _FunctionMemo(memo, [value for value in holding.values() if isinstance(value, MethodType)])
    # `copy.deepcopy` fails at a custom operator, which all models share.
    memo.update((id(operator), operator) for operator in list(OPDEFS.values()))
    # Functions that share a variable go on sharing the variable.
    memo.update((id(cell), CellType()) for cell in cells)
    for function in functions:
        closure = tuple(memo.get(id(cell), cell) for cell in function.__closure__ or ())
        copied = FunctionType(function.__code__, function.__globals__, function.__name__, None, closure)
        copied.__qualname__, copied.__module__ = function.__qualname__, function.__module__
        memo[id(function)] = copied
    yield memo

    def own(value: Any) -> Any:
        if id(value) not in holding and id(value) not in parts:
            return value
        known = set(memo)
        try:
            return copy.deepcopy(value, memo)
        except Exception:  # noqa: BLE001 - an object that cannot be copied raises anything
            # A copy enters the memo before its attributes are there.
            for key in memo.keys() - known:
                del memo[key]
            return value

    for cell in cells:
        memo[id(cell)].cell_contents = own(cell.cell_contents)
    for function in functions:
        copied = memo[id(function)]
        copied.__defaults__ = function.__defaults__ and tuple(map(own, function.__defaults__))
        copied.__kwdefaults__ = function.__kwdefaults__ and {k: own(v) for k, v in function.__kwdefaults__.items()}
        vars(copied).update((name, own(value)) for name, value in vars(function).items())


def parts_of(model: nn.Module) -> list[nn.Module | Tensor]:
    """Return a model's modules, parameters and buffers."""
    return [*model.modules(), *model.parameters(), *model.buffers()]


def place_of(model: nn.Module, parts: Iterable[nn.Module | Tensor]) -> str | None:
    """Return the attribute of a model, in words, from which Python objects lead to one of the parts; None if none does.

    The parts must be none of the model's own.
    """
    holding = _holding(model, {id(part) for part in parts})
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute != "_modules" and id(value) in holding:
                return f"attribute {attribute!r} of {type(module).__name__}{f' {name!r}' if name else ''}"
    return None


def _holding(root: object, parts: Collection[int]) -> dict[int, Any]:
    """Return the objects that can be reached from a root and lead to one of the parts, by identity."""
    seen: dict[int, Any] = {}
    holders: dict[int, list[Any]] = {}
    values = [root]
    while values:
        value = values.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        for each in _held(value):
            holders.setdefault(id(each), []).append(value)
            values.append(each)
    holding: dict[int, Any] = {}
    reached = [part for part in parts if part in seen]
    while reached:
        for holder in holders.get(reached.pop(), ()):
            if id(holder) not in holding:
                holding[id(holder)] = holder
                reached.append(id(holder))
    return holding


def _held(value: Any) -> list[Any]:
    """Return the objects that an object holds and that may hold others, and a function's global variables."""
    if issubclass(type(value), _LEAVES) or (type(value) in _CONTAINERS and len(value) > _MOST_ITEMS):
        return []
    held = gc.get_referents(value)
    if isinstance(value, FunctionType):
        space = value.__globals__
        held = [each for each in held if each is not space]
        if not is_installed(value.__module__):
            variables = [space.get(name) for name in global_names(value.__code__)]
            held += [each for each in variables if issubclass(type(each), _FOLLOWED_GLOBALS)]
    return [each for each in held if gc.is_tracked(each)]
