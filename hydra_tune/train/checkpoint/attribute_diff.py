"""`AttributeTracker`: attributes of the user's objects beside tensors, as far as changed since construction.

`TrialObjects` (`trial_checkpoint.py`) makes the trackers just after a trial's factories have run, asks for the changes at each
checkpoint, and restores the changes in a resumed trial. `compatibility.py` and `train/data/loader_state.py` compare values by
`same_value`.

Note: containers. Several objects may hold the same dict or list, so a container that training has filled in place is
filled in place on resume, too. A container that training has replaced is replaced: the earlier one may belong to other
trials, as the default value of an argument does.
"""

import json
import logging
import random
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from hydra_tune.checkpoint.values import encode
from hydra_tune.errors import CheckpointError
from hydra_tune.shard.capture.batch import same_bits

_PlacedContainer = tuple[tuple[Any, ...], int]

_GONE = object()
_LOGGER = logging.getLogger("hydra_tune.checkpoints")
_STATEFUL = (torch.optim.Optimizer, nn.Module, torch.Generator, random.Random, Iterator)
_PLAIN = frozenset({type(None), bool, int, str})
_MAPPINGS = frozenset({dict, OrderedDict, defaultdict, Counter})
_CONTAINERS = _MAPPINGS | {list, set, deque}


@dataclass(frozen=True, slots=True)
class _EarlierAttribute:
    """An earlier attribute value: its text or, if no checkpoint can hold the value, the object itself.

    `containers` has place and `id` of each container in the value. Another container has the same `id` only if the earlier
    one no longer exists, and then nothing else holds the earlier one. `content` is what a container that no checkpoint can
    hold has held, as far as comparable.
    """

    text: str | None
    value: object = None
    containers: frozenset[_PlacedContainer] = frozenset()
    content: object = None


_NEVER = _EarlierAttribute(None, _GONE)


class AttributeTracker:
    """Attributes of some objects, compared with the values at creation.

    Args:
        what: name for the objects in errors.
        objects: returns the objects and names, the same now and later.
        left_out: attributes saved elsewhere.
        tied: tensors saved elsewhere; an attribute that holds such a tensor is not saved, and must not be set after
            construction.
    """

    def __init__(
        self,
        what: str,
        objects: Callable[[], Iterable[tuple[str, object]]],
        left_out: frozenset[str],
        tied: Iterable[Tensor] = (),
    ) -> None:
        self._tied = {id(tensor) for tensor in tied}
        self._warned: set[str] = set()
        self._what = what
        self._objects = objects
        self._left_out = left_out
        self._before = {
            (path, name): self._seen(value) for path, item in objects() for name, value in self._attributes(item)
        }

    def changed(self) -> dict[str, dict[str, Any]]:
        """Return, by object and name, changed attributes and all attributes with tensors; for deleted ones see `details`.

        Raises:
            CheckpointError: an attribute has been set since to a value that no checkpoint can hold and that is not callable.
        """
        changes: dict[str, dict[str, Any]] = {}
        for path, item in self._objects():
            for name, value in self._attributes(item):
                earlier = self._before.get((path, name), _NEVER)
                text, has_tensors = self._read(value)
                if text is None:
                    self._refuse_new(path, name, value, earlier)
                elif has_tensors or text != earlier.text:
                    self.warn_of_ids(self._place(path, name), value)
                    changes.setdefault(path, {})[name] = value
        return changes

    def details(self, changes: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return what the values of changed attributes do not tell.

        Args:
            changes: result of `changed`.

        Returns:
            By object: as `deleted` the names of deleted attributes; as `in_place`, by name, the places of containers that
            are the containers at creation.
        """
        objects = dict(self._objects())
        deleted: dict[str, list[str]] = {}
        for path, name in self._before:
            if path in objects and name not in vars(objects[path]):
                deleted.setdefault(path, []).append(name)
        in_place: dict[str, dict[str, list[list[Any]]]] = {}
        for path, values in changes.items():
            for name, value in values.items():
                earlier = self._before.get((path, name), _NEVER).containers
                places = [list(container[0]) for container in _containers(value) if container in earlier]
                if places:
                    in_place.setdefault(path, {})[name] = places
        return {"deleted": deleted, "in_place": in_place}

    def restore(
        self, saved: Mapping[str, Mapping[str, Any]], details: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Set attributes to the values from `changed`, and delete deleted ones; older checkpoints have no details."""
        deleted = details["deleted"] if details else {}
        in_place = details["in_place"] if details else {}
        for path, item in self._objects():
            places_by_name = in_place.get(path, {})
            for name, value in saved.get(path, {}).items():
                current_value = vars(item).get(name, _GONE)
                places = {tuple(place) for place in places_by_name.get(name, ())}
                new_value = _filled(current_value, value, places)
                if new_value is not current_value:
                    setattr(item, name, new_value)
            for name in deleted.get(path, ()):
                if name in vars(item):
                    delattr(item, name)

    def _attributes(self, one: object) -> Iterable[tuple[str, Any]]:
        return [(name, value) for name, value in vars(one).items() if name not in self._left_out]

    def _seen(self, value: Any) -> _EarlierAttribute:
        text, _ = self._read(value)
        # An encodable value is kept as text only: a reference would keep a replaced value alive.
        if text is None:
            return _EarlierAttribute(text, value, content=self._content(value))
        return _EarlierAttribute(text, containers=frozenset(_containers(value)))

    def _read(self, value: Any) -> tuple[str | None, bool]:
        """Return a value's text, None if no checkpoint can hold the value; and whether the value has tensors."""
        # A shortcut without `encode`, because each trial has thousands of plain attributes.
        if type(value) in _PLAIN:
            return repr(value), False
        tensors: dict[str, Tensor] = {}
        try:
            text = json.dumps(encode(value, "", tensors))
        except CheckpointError:
            return None, False
        # Tied tensors are parameters or buffers, which a checkpoint saves anyway.
        is_tied = any(id(tensor) in self._tied for tensor in tensors.values())
        return (None, False) if is_tied else (text, bool(tensors))

    def warn_of_ids(self, place: str, value: object) -> None:
        """Log, once, a value with a dict whose keys are `id`s of parameters or buffers, which a resumed trial does not have."""
        if place not in self._warned and self._has_ids(value):
            self._warned.add(place)
            _LOGGER.warning(
                "%s has the id() of parameters as keys, and a resumed trial has parameters with other ids: the trial loses "
                "what the dict holds, and so may go on to other numbers; keep what belongs to a parameter in the optimizer's "
                "state[parameter], or use the parameter's name as the key",
                place,
            )

    def _has_ids(self, value: object) -> bool:
        if type(value) in _MAPPINGS:
            assert isinstance(value, Mapping)
            has_id = any(type(key) is int and key in self._tied for key in value)
            return has_id or any(map(self._has_ids, value.values()))
        return isinstance(value, list | tuple) and any(map(self._has_ids, value))

    def _content(self, value: object) -> object:
        """Return what a container holds, in a form to be compared later; None for other values."""
        if type(value) not in _CONTAINERS and type(value) is not tuple:
            return None
        try:
            return self._comparable(value)
        except RecursionError:
            return None

    def _comparable(self, value: Any) -> object:
        kind = type(value)
        if kind in _MAPPINGS:
            return [(self._comparable(key), self._comparable(item)) for key, item in value.items()]
        if kind in (list, tuple, deque):
            return list(map(self._comparable, value))
        if isinstance(value, Tensor) and id(value) in self._tied:
            return id(value)
        tensors: dict[str, Tensor] = {}
        try:
            return json.dumps(encode(value, "", tensors)), [*map(_TensorMark, tensors.values())]
        except CheckpointError:
            return kind  # other objects and functions are compared by nothing else

    def _place(self, path: str, name: str) -> str:
        return f"attribute {'.'.join(filter(None, (path, name)))!r} of the {self._what}"

    def _refuse_new(self, path: str, name: str, value: object, earlier: _EarlierAttribute) -> None:
        place, before = self._place(path, name), earlier.value
        if value is before or callable(value):
            stateful = _stateful(value)
            # `==`, because each access of a method makes another object.
            is_same = value is before or (isinstance(value, MethodType) and value == before)
            if callable(before) and not is_same and place not in self._warned:
                self._warned.add(place)
                _LOGGER.warning(
                    "%s holds another function or callable than at first, which no checkpoint can hold: a resumed trial goes "
                    "on with the first one, and so to other numbers; keep both, and choose between them by an attribute that "
                    "is a number or a text",
                    place,
                )
            elif stateful is not None and place not in self._warned:
                self._warned.add(place)
                _LOGGER.warning(
                    "%s holds a %s, whose state is in no checkpoint: a resumed trial goes on with a new one, and so to other "
                    "numbers if the old one had moved; keep such state in tensors, numbers or the global random streams, or "
                    "give the module get_extra_state and set_extra_state",
                    place,
                    type(stateful).__name__,
                )
            elif value is before and place not in self._warned and self._content(value) != earlier.content:
                self._warned.add(place)
                _LOGGER.warning(
                    "%s has changed in place, and holds a parameter, a function or another value that no checkpoint can hold: "
                    "a resumed trial begins with its first content, and so may go on to other numbers; keep the numbers and "
                    "tensors that change in a container of their own, by name",
                    place,
                )
            return
        try:
            encode(value, place, {})
        except CheckpointError as error:
            raise CheckpointError(f"this trial cannot be checkpointed: {error}") from None
        raise CheckpointError(
            f"this trial cannot be checkpointed: {place} holds parameters or buffers, and was put there while it trained; put "
            "it there in the constructor"
        )


def _stateful(value: object) -> object | None:
    """Return an object of torch, numpy or Python that changes in place: the value, or a part of a container; else None."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else (value,)
    return next((part for part in parts if isinstance(part, _STATEFUL) or _is_numpy_stream(part)), None)


class _TensorMark:
    """A tensor as it is now; equal to a later mark of the same tensor unless torch has written the tensor since."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._version = None if tensor.is_inference() else tensor._version  # noqa: SLF001

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _TensorMark):
            return NotImplemented
        tensor = self._tensor()
        return tensor is not None and tensor is other._tensor() and self._version == other._version


def _is_numpy_stream(value: object) -> bool:
    return type(value).__module__.startswith("numpy.random") and not callable(value)


def _containers(value: Any, place: tuple[Any, ...] = ()) -> Iterator[_PlacedContainer]:
    """Yield a container and the containers in it, each by its keys and indices from the outermost."""
    kind = type(value)
    if kind not in _CONTAINERS:
        return
    yield place, id(value)
    if kind is not set:
        for key, item in value.items() if kind in _MAPPINGS else enumerate(value):
            # Asked here as well, because most items are numbers.
            if type(item) in _CONTAINERS:
                yield from _containers(item, (*place, key))


def _filled(current: Any, value: Any, in_place: AbstractSet[tuple[Any, ...]], place: tuple[Any, ...] = ()) -> Any:
    """Return the object that takes a saved value: the current object, filled if it is a container, or the value itself."""
    kind = type(value)
    if place not in in_place or kind is not type(current) or (kind is deque and current.maxlen != value.maxlen):
        # An equal tensor stays the same object, because other objects may hold it as well.
        is_equal = isinstance(value, Tensor) and isinstance(current, Tensor) and same_value(value, current)
        return current if is_equal else value
    if kind in _MAPPINGS:
        filled_items = {
            key: _filled(current.get(key, _GONE), item, in_place, (*place, key)) for key, item in value.items()
        }
        current.clear()
        current.update(filled_items)
    elif kind is set:
        current.clear()
        current.update(value)
    else:
        pairs = enumerate(zip([*current, *[_GONE] * len(value)], value, strict=False))
        items = [_filled(one, item, in_place, (*place, index)) for index, (one, item) in pairs]
        current.clear()
        current.extend(items)
    return current


def same_value(one: Any, other: Any) -> bool:
    """Whether two values are equal to the last bit; values that no checkpoint can hold are compared by identity."""
    encodings: list[tuple[str, dict[str, Tensor]]] = []
    for value in (one, other):
        tensors: dict[str, Tensor] = {}
        try:
            encodings.append((json.dumps(encode(value, "", tensors)), tensors))
        except CheckpointError:
            return one is other
    (text, tensors), (other_text, other_tensors) = encodings
    return text == other_text and all(
        same_bits(tensor.cpu(), other_tensors[name].cpu()) for name, tensor in tensors.items()
    )
