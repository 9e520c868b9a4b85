"""Functions that a copied model keeps in attributes, and that close over the model which was copied.

Code that patches a model replaces `model.forward` by a function, and the function calls the former `forward` by a variable
of its closure. `copy.deepcopy` copies no function, so a copy of the model would compute with the parameters of the
original. `copied_model` (`shard/capture/step_capture.py`) calls `rebind_functions` after each copy. The module must not
import captures, plans or trials.
"""

from collections.abc import Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn


def rebind_functions(copied: nn.Module, memo: Mapping[int, Any]) -> None:
    """Make functions in attributes of a copied model's modules close over the copy, and not over the original.

    Args:
        copied: the copy.
        memo: copies by the id of the original, as `copy.deepcopy` leaves its memo.
    """
    functions: dict[int, FunctionType] = {}
    cells: dict[int, CellType] = {}
    for module in copied.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType | MethodType):
                vars(module)[name] = _rebound(value, memo, functions, cells)


def _rebound(
    value: Any, memo: Mapping[int, Any], functions: dict[int, FunctionType], cells: dict[int, CellType]
) -> Any:
    """Return a copied module, or a function or method that closes over copies; any other value unchanged.

    Args:
        value: the value.
        memo: copies by the id of the original.
        functions: copied functions by the id of the original; a function may close over itself.
        cells: copied variables by the id of the original; functions that share a variable go on sharing.
    """
    if isinstance(value, nn.Module):
        return memo.get(id(value), value)
    if isinstance(value, MethodType):
        owner = memo.get(id(value.__self__), value.__self__)
        return MethodType(_rebound(value.__func__, memo, functions, cells), owner)
    if not isinstance(value, FunctionType) or not _reaches(value, memo, set()):
        return value
    if id(value) not in functions:
        former = value.__closure__ or ()
        # A variable that leads to no module, such as a counter, stays shared with the original.
        is_new = [_reaches(_content(cell), memo, set()) for cell in former]
        unfilled = [cell for cell, new in zip(former, is_new, strict=True) if new and id(cell) not in cells]
        cells.update((id(cell), CellType()) for cell in unfilled)
        closure = tuple(cells[id(cell)] if new else cell for cell, new in zip(former, is_new, strict=True))
        copied = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, closure)
        copied.__kwdefaults__ = value.__kwdefaults__
        copied.__qualname__, copied.__module__ = value.__qualname__, value.__module__
        vars(copied).update(vars(value))
        functions[id(value)] = copied
        for cell in unfilled:
            cells[id(cell)].cell_contents = _rebound(cell.cell_contents, memo, functions, cells)
    return functions[id(value)]


def _reaches(value: Any, memo: Mapping[int, Any], visited: set[int]) -> bool:
    """Whether a value is a module that was copied, or a function or method that closes over such a module."""
    if isinstance(value, nn.Module):
        return id(value) in memo
    if id(value) in visited:
        return False
    visited.add(id(value))
    if isinstance(value, MethodType):
        return id(value.__self__) in memo or _reaches(value.__func__, memo, visited)
    if isinstance(value, FunctionType):
        return any(_reaches(_content(cell), memo, visited) for cell in value.__closure__ or ())
    return False


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None
