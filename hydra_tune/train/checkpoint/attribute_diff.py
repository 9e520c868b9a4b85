"""`AttributeTracker`: attributes of the user's objects beside tensors, as far as changed since construction."""

import json
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hydra_tune.checkpoint.values import encode
from hydra_tune.errors import CheckpointError
from hydra_tune.shard.capture.batch import same_bits

_GONE = object()
_LOGGER = logging.getLogger("hydra_tune.checkpoints")
_STATEFUL = (torch.optim.Optimizer, nn.Module, torch.Generator, random.Random, Iterator)
_PLAIN = frozenset({type(None), bool, int, str})


@dataclass(frozen=True, slots=True)
class _EarlierAttribute:
    """An earlier attribute value: its text or, if no checkpoint can hold the value, the object itself."""

    text: str | None
    value: object = None


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
        """Return, by object and name, changed attributes and all attributes with tensors; deleted attributes are missing.

        Raises:
            CheckpointError: an attribute has been set since to a value that no checkpoint can hold.
        """
        changes: dict[str, dict[str, Any]] = {}
        for path, item in self._objects():
            for name, value in self._attributes(item):
                earlier = self._before.get((path, name), _NEVER)
                text, has_tensors = self._read(value)
                if text is None:
                    self._refuse_new(path, name, value, earlier.value)
                elif has_tensors or text != earlier.text:
                    changes.setdefault(path, {})[name] = value
        return changes

    def restore(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Set attributes to the values from `changed`."""
        for path, item in self._objects():
            for name, value in saved.get(path, {}).items():
                current_value = vars(item).get(name, _GONE)
                # An equal tensor stays the same object, because other objects may hold it as well.
                if not (
                    isinstance(value, Tensor) and isinstance(current_value, Tensor) and same_value(value, current_value)
                ):
                    setattr(item, name, value)

    def _attributes(self, one: object) -> Iterable[tuple[str, Any]]:
        return [(name, value) for name, value in vars(one).items() if name not in self._left_out]

    def _seen(self, value: Any) -> _EarlierAttribute:
        text, _ = self._read(value)
        # An encodable value is kept as text only: a reference would keep a replaced value alive.
        return _EarlierAttribute(text, value if text is None else None)

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

    def _refuse_new(self, path: str, name: str, value: object, before: object) -> None:
        place = f"attribute {'.'.join(filter(None, (path, name)))!r} of the {self._what}"
        if value is before or callable(value):
            stateful = _stateful(value)
            if stateful is not None and place not in self._warned:
                self._warned.add(place)
                _LOGGER.warning(
                    "%s holds a %s, whose state is in no checkpoint: a resumed trial goes on with a new one, and so to other "
                    "numbers if the old one had moved; keep such state in tensors, numbers or the global random streams, or "
                    "give the module get_extra_state and set_extra_state",
                    place,
                    type(stateful).__name__,
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


def _is_numpy_stream(value: object) -> bool:
    return type(value).__module__.startswith("numpy.random") and not callable(value)


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
