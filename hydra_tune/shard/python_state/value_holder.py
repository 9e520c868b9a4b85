"""`ValueHolder`: a place that can hold other Python values later, how the values are compared, and how they are put back.

`CodeWalk` (`code_walk.py`) and `ReachableValues` (`reachable_values.py`) make a holder for each place of a walk,
`PythonStateUndo` (`state_guard.py`) makes one for the environment, and `FileHolder` (`opened_files.py`) is the holder of a
file. The guards of `state_guard.py` ask holders for changes, and put values back; `shard/capture/own_functions.py` and
`integrations/hydra_tune_transformers/own_loss.py` ask for changes as well. `tensor_contents.py` undoes changes of tensors by
`undo_by_element`. The module must not import captures, plans or trials.

Note: comparison. Plain values and numbers of numpy are the same if class and representation are, so NaN equals NaN, and 0.0
differs from -0.0. Tuples and methods are compared by their parts, and frozensets by `==`; of all other objects the identity
counts.

Note: threads. A holder has no lock, and other threads may change a place meanwhile. So `undo` puts back no item that has
changed again.
"""

import array
import collections
import contextlib
import copy
import ctypes
import enum
import math
import operator
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor

MISSING = object()
"""Stands for the value of a name that is not there."""
PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, range, slice)
"""Classes of values that never change."""
EXACT = frozenset(PLAIN) - {enum.Enum}
"""The classes of `PLAIN` but enums, to be compared with the very class of a value: a derived class may add attributes."""

_OF_THREADS = (
    "threading",
    "_thread",
    "queue",
    "_queue",
    "multiprocessing",
    "concurrent",
    "asyncio",
    "socket",
    "subprocess",
)
"""Packages of the standard library whose objects belong to running threads and processes."""

MAX_LABELS = 64  # of a container whose items are named one by one
_MAX_NAMED = 4096  # values of a container that are looked at one by one

Values = Sequence[Any]
Undo = Callable[[], bool]
"""Puts values back, and returns whether all values could be put back."""


class ItemLabels(Sequence[str]):
    """Labels of a container's values, made when asked for; a data set may have thousands of containers.

    Args:
        label: the container in words; also the last label, for values beyond.
        names: of the items, in words.
        num_keys: number of keys, which come before the items and have the container's label.
    """

    __slots__ = ("_label", "_names", "_num_keys")

    def __init__(self, label: str, names: Sequence[object], num_keys: int = 0) -> None:
        self._label, self._names, self._num_keys = label, names, num_keys

    def __len__(self) -> int:
        return self._num_keys + len(self._names) + 1

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        place = range(len(self))[index] - self._num_keys
        return f"{self._label}[{self._names[place]}]"[:200] if 0 <= place < len(self._names) else self._label


class ValueHolder:
    """A place that holds values.

    Args:
        labels: the values in words, by place; the last label is also that of all further values.
        read: returns the values.
        write: puts values back; None if the place cannot be written.
        is_of_model: whether the place is a module of the step's model, or a mapping or list that the model holds.
        is_tensor: whether the place is a tensor, and the values its contents.
        is_filled_by_step: whether a step may set the values and still be captured: results that a function keeps, and what a
            library's model writes into its configuration once.
        is_of_threads: whether threads wait for the values, so that they must not be put back while a trial begins again.
        is_mapping: whether the values are the keys of a mapping, and then its values.
        owner: identity of the object, container, array, tensor or generator, which several trials may share; 0 for other
            places.
        undo: as the method, for a place whose values do not show its contents.

    Attributes:
        inputs: indices of numbers that may change, because the graph takes them as inputs; they stay of their class.
    """

    __slots__ = (
        "inputs",
        "is_filled_by_step",
        "is_mapping",
        "is_of_model",
        "is_of_threads",
        "is_tensor",
        "labels",
        "noted",
        "own_undo",
        "owner",
        "read",
        "write",
    )

    def __init__(
        self,
        labels: Sequence[str],
        read: Callable[[], Values],
        write: Callable[[Values], None] | None = None,
        *,
        is_of_model: bool = False,
        is_tensor: bool = False,
        is_filled_by_step: bool = False,
        is_of_threads: bool = False,
        is_mapping: bool = False,
        owner: int = 0,
        undo: Callable[[], Undo] | None = None,
    ) -> None:
        self.labels, self.read, self.write = labels, read, write
        self.owner, self.own_undo = owner, undo
        self.is_of_model, self.is_tensor, self.is_filled_by_step = is_of_model, is_tensor, is_filled_by_step
        self.is_of_threads, self.is_mapping = is_of_threads, is_mapping
        self.noted = read()
        self.inputs: set[int] = set()

    def label_of(self, index: int) -> str:
        """Return a value in words."""
        return self.labels[min(index, len(self.labels) - 1)]

    def may_be_input(self, index: int) -> bool:
        """Whether a value is a number that another value can stand in for."""
        return self.write is not None and index < len(self.noted) and _are_numbers(self.noted[index])

    def changed_numbers(self) -> set[str] | None:
        """Return the labels of the numbers that have changed; None if anything else has changed."""
        try:
            values, changed = self.read(), set()
            if len(values) != len(self.noted):
                return None
            for index, (value, known) in enumerate(zip(values, self.noted, strict=True)):
                if value is known or _is_same(value, known) or self._is_input(index, value, known):
                    continue
                if self.write is None or not _are_numbers(value, known) or self.labels.count(self.label_of(index)) > 1:
                    return None
                changed.add(self.label_of(index))
        except Exception:  # noqa: BLE001 - as of `change`
            return None
        return changed

    def _is_input(self, index: int, value: object, known: object) -> bool:
        return index in self.inputs and _are_numbers(value, known)

    def rewind(self) -> None:
        """Put the noted values back, as far as nothing else works with them: no threads, queues, locks and connections."""
        if self.write is None or self.is_of_threads or self.change() is None:
            return
        values, noted = self.read(), self.noted
        if len(values) == len(noted):
            pairs = zip(values, noted, strict=True)
            self.write([value if _works_on(value) or _works_on(known) else known for value, known in pairs])
        elif not any(map(_works_on, (*values, *noted))):
            self.write(noted)

    def undo(self) -> Undo | None:
        """Return a function that puts back each item that differs by now, if the item has not changed again; else None."""
        write = self.write
        if write is None or self.change() is None:
            return None
        if self.own_undo is not None:
            return self.own_undo()
        noted, changed = self.noted, self.read()
        if self.is_mapping and len(changed) % 2:  # another thread has added a key between the reads of keys and values
            changed = self.read()

        def put_back() -> bool:
            latest = self.read()
            values, is_whole = _without_change(noted, changed, latest, is_mapping=self.is_mapping)
            if len(values) != len(latest) or not all(map(operator.is_, values, latest)):
                write(values)
            return is_whole

        return put_back

    def kept(self) -> set[str]:
        """Names of the model's attributes that are other objects than those noted, although `change(by_step=True)` is None."""
        values = self.read() if self.is_of_model else ()
        places = [
            self.label_of(number)
            for number, (value, known) in enumerate(zip(values, self.noted, strict=False))
            if value is not known and not _is_same(value, known)
        ]
        return {place.partition("[")[0].rpartition(".")[2] for place in places}

    def plain_parts(self, mode_of_model: bool | None) -> list[object]:
        """Return the noted values as something comparable between trials.

        Args:
            mode_of_model: the mode to which a step will switch all parts of its model; None: each part keeps its mode.
        """
        values = list(self.noted[1:] if self.is_tensor else self.noted)
        if mode_of_model is not None and self.is_of_model:
            for number, label in enumerate(self.labels):
                if label.startswith("the mode of "):
                    values[number] = mode_of_model
        for index in self.inputs:
            values[index] = type(values[index])
        return list(map(_plain_parts, values))

    def named_parts(self) -> Iterator[tuple[str, object]]:
        """Yield the noted values that are plain, with their names, as something with a `repr`; of many values the last one."""
        values = self.noted[1:] if self.is_tensor else self.noted
        if len(values) > _MAX_NAMED:
            yield self.labels[-1], (len(values), values[-1] if type(values[-1]) in EXACT else None)
            return
        yield self.labels[-1], len(values)
        for index, value in enumerate(values):
            if type(value) in EXACT:
                yield self.label_of(index), value
            elif value is MISSING:
                yield self.label_of(index), "missing"
            elif isinstance(value, tuple | frozenset) and len(value) > _MAX_NAMED:
                yield self.label_of(index), len(value)
            elif type(value) is tuple and all(type(item) in EXACT for item in value):
                yield self.label_of(index), value
            # Lists, dicts and sets are places of their own.
            elif isinstance(value, (tuple, frozenset, *PLAIN)) or _is_number_of_numpy(value):
                yield self.label_of(index), _plain_parts(value)

    def change(self, *, by_step: bool = False) -> str | None:
        """Name the first value that differs from the noted value, or None; as of `PythonStateGuard.change`."""
        if by_step and self.is_filled_by_step:
            return None
        try:
            return self._changed(ignores_tensors=by_step and self.is_of_model)
        except Exception:  # noqa: BLE001 - what could be read or compared once, and no longer can, is another value
            return self.labels[-1]

    def _changed(self, *, ignores_tensors: bool) -> str | None:
        values, noted = self.read(), self.noted
        if len(values) != len(noted):
            return self.labels[-1]
        if all(map(operator.is_, values, noted)):
            return None
        for number, (value, known) in enumerate(zip(values, noted, strict=True)):
            if value is known or _is_same(value, known) or self._is_input(number, value, known):
                continue
            if not (ignores_tensors and _is_alike(value, known)):
                return self.label_of(number)
        if not ignores_tensors:
            self.noted = values  # equal values in new objects: noted, so that the next look is quick
        return None


def _plain_parts(value: object) -> object:
    """Return a value as something comparable between trials: plain values as they are, of others the kind."""
    if isinstance(value, PLAIN) or _is_number_of_numpy(value):
        return (type(value).__qualname__, repr(value))
    if isinstance(value, tuple | list | frozenset):
        return (
            type(value).__qualname__,
            tuple(map(_plain_parts, sorted(value, key=repr) if isinstance(value, frozenset) else value)),
        )
    return type(value).__qualname__


def buffer_facts(value: Any) -> tuple[int, bool] | None:
    """Return the size in bytes of an object's buffer, and whether it is read-only; None if the object has no buffer."""
    try:
        with memoryview(value) as view:
            return view.nbytes, view.readonly
    except TypeError:
        return None


def bytes_of(value: Any) -> bytes:
    """Return the bytes of an object with a buffer, such as an array of the standard library."""
    return memoryview(value).tobytes()


def write_bytes(value: Any, before: bytes) -> None:
    """Put the bytes of an object with a buffer back."""
    if isinstance(value, bytearray):
        value[:] = before
    elif isinstance(value, array.array):
        value[:] = array.array(value.typecode, before)
    elif hasattr(value, "_b_base_"):  # of ctypes
        ctypes.memmove(ctypes.addressof(value), before, len(before))
    elif not (view := memoryview(value)).readonly:
        view.cast("B")[:] = before


def pickled(value: object) -> bytes | None:
    """Return the pickled form; None if there is none."""
    try:
        return pickle.dumps(value)
    except Exception:  # noqa: BLE001 - as objects please
        return None


def _is_same(value: object, known: object) -> bool:
    """Whether code behaves equally with two values that are different objects."""
    if type(value) is not type(known):
        return False
    if type(value) in (str, bytes):
        return value == known
    if isinstance(value, tuple):
        assert isinstance(known, tuple)
        return len(value) == len(known) and all(v is k or _is_same(v, k) for v, k in zip(value, known, strict=True))
    if isinstance(value, types.MethodType):
        return value == known
    if isinstance(value, PLAIN) or _is_number_of_numpy(value):
        # By representation, because NaN equals NaN here, and 0.0 differs from -0.0.
        same_attributes = type(value) in EXACT or getattr(value, "__dict__", 0) == getattr(known, "__dict__", 0)
        return same_attributes and repr(value) == repr(known)
    return isinstance(value, frozenset) and value == known


def _works_on(value: object) -> bool:
    """Whether something else may be at work with an object, such as a thread."""
    return type(value).__module__.partition(".")[0] in _OF_THREADS


def _are_numbers(*values: object) -> bool:
    """Whether values are finite numbers of one class."""
    kinds = set(map(type, values))
    return len(kinds) == 1 and kinds <= {int, float} and all(map(math.isfinite, values))  # type: ignore[arg-type]


def _is_number_of_numpy(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def _is_alike(value: object, known: object) -> bool:
    """Whether two values of a model's attribute differ in nothing that a step does by itself.

    A step may keep a tensor for others to look at. `torch.export` puts copies in the place of containers; what a step has
    changed in a container shows in the original.
    """
    if isinstance(value, Tensor | None) and isinstance(known, Tensor | None):
        return True
    if isinstance(value, dict) and isinstance(known, dict):
        return list(value) == list(known) and all(map(_is_alike, value.values(), known.values()))
    if isinstance(value, list | tuple) and isinstance(known, list | tuple):
        return type(value) is type(known) and len(value) == len(known) and all(map(_is_alike, value, known))
    return value is known or _is_same(value, known)


def _without_change(noted: Values, changed: Values, latest: Values, *, is_mapping: bool) -> tuple[Values, bool]:
    """Return the latest values with the items of `noted` that differ in `changed`, and whether all of them could be put back.

    An item that has changed again belongs to whoever has changed the item last.
    """
    if len(latest) == len(changed) and all(map(operator.is_, latest, changed)):
        return noted, True
    if is_mapping:
        items, is_whole = _without_changed_items(*map(_items_of, (noted, changed, latest)))
        return [*items.keys(), *items.values()], is_whole
    if len(noted) == len(changed) == len(latest):
        if len(noted) == 1 and isinstance(noted[0], frozenset):
            return [latest[0] - (changed[0] - noted[0]) | (noted[0] - changed[0])], True
        items, is_whole = _without_changed_items(*(dict(enumerate(values)) for values in (noted, changed, latest)))
        return list(items.values()), is_whole
    others = latest[len(changed) :]  # of a list, to which others have appended
    is_appended = all(map(operator.is_, changed, latest)) and all(map(operator.is_, noted, changed))
    return ([*noted, *others], True) if is_appended else (latest, False)


def _without_changed_items(
    noted: dict[Any, Any], changed: dict[Any, Any], latest: dict[Any, Any]
) -> tuple[dict[Any, Any], bool]:
    is_whole = True
    for key in noted.keys() | changed.keys():
        value, own, last = (items.get(key, MISSING) for items in (noted, changed, latest))
        if _is_equal(own, value):
            continue
        if not _is_equal(last, own):
            is_whole = False
        elif value is MISSING:
            del latest[key]
        else:
            latest[key] = value
    return latest, is_whole


def _is_equal(one: object, other: object) -> bool:
    return one is other or _is_same(one, other)


def undo_by_element(values: Any, before: Any, write: Callable[[Values], None]) -> Callable[[], Undo]:
    """Return `ValueHolder.undo` of an array or a detached tensor, in which trials may each have an element of their own."""

    def undo() -> Undo:
        after = copy.deepcopy(values)

        def put_back() -> bool:
            latest = copy.deepcopy(values)
            is_own, is_again = _differ(after, before), _differ(latest, after)
            write(())
            is_kept = is_again | ~is_own
            values[is_kept] = latest[is_kept]
            return not bool((is_own & is_again).any())

        return put_back

    return undo


def _differ(one: Any, other: Any) -> Any:
    return (one != other) & ~((one != one) & (other != other))  # noqa: PLR0124 - NaN equals NaN here


def _items_of(values: Values) -> dict[Any, Any]:
    half = len(values) // 2
    return dict(zip(values[:half], values[half:], strict=True))


def content_of(cell: types.CellType) -> Any:
    """Return the value of a variable of a function, or `MISSING`."""
    try:
        return cell.cell_contents
    except ValueError:  # nothing has been assigned yet
        return MISSING


def write_names(mapping: Any, names: Sequence[str], values: Values) -> None:
    """Put values of a namespace back."""
    for name, value in zip(names, values, strict=True):
        if value is not MISSING:
            mapping[name] = value
        else:
            mapping.pop(name, None)


def write_class(kind: type, names: Sequence[str], values: Values) -> None:
    """Put attributes of a class back."""
    _write(kind, names, values, lambda name: vars(kind).get(name, MISSING))


def write_slots(owner: object, names: Sequence[str], values: Values) -> None:
    """Put attributes of an object back."""
    _write(owner, names, values, lambda name: getattr(owner, name, MISSING))


def _write(owner: object, names: Sequence[str], values: Values, present: Callable[[str], object]) -> None:
    for name, value in zip(names, values, strict=True):
        if present(name) is value:
            continue
        if value is MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, value)


def write_function(
    cells: Sequence[types.CellType], space: dict[str, Any], names: Sequence[str], values: Values
) -> None:
    """Put variables and globals of a function back; its code and its defaults stay."""
    for cell, value in zip(cells, values, strict=False):
        if value is MISSING:
            with contextlib.suppress(ValueError):  # empty still
                del cell.cell_contents
        elif content_of(cell) is not value:
            cell.cell_contents = value
    for name, value in zip(names, values[len(cells) :], strict=False):
        if value is MISSING:
            space.pop(name, None)
        elif space.get(name, MISSING) is not value:
            space[name] = value


def write_mapping(mapping: dict[Any, Any], values: Values) -> None:
    """Put all items of a dictionary back, past what its class does as items are set."""
    half = len(values) // 2
    base = collections.OrderedDict if isinstance(mapping, collections.OrderedDict) else dict
    base.clear(mapping)
    for key, value in zip(values[:half], values[half:], strict=True):
        base.__setitem__(mapping, key, value)


def write_environment(values: Values) -> None:
    """Put the variables of the environment back that have changed."""
    noted = _items_of(values)
    for name in os.environ.keys() - noted.keys():
        del os.environ[name]
    for name, value in noted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def write_sequence(sequence: Any, values: Values) -> None:
    """Put all items of a list or deque back."""
    base = collections.deque if isinstance(sequence, collections.deque) else list
    base.clear(sequence)
    base.extend(sequence, values)


def write_set(members: set[Any], values: Values) -> None:
    """Put all members of a set back."""
    members.clear()
    members |= values[0]
