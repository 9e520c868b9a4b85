"""Objects of the user's that several trials call: a `compute_loss_func`, a collator, metrics and their preprocessing.

Trials of one task call the same objects, and so do the trials of a search. A `Trainer` would give each training a state of
its own, as of a counter, so an object with a changed state serves one trial alone: from the second trial on, `check` refuses
the object by name. `task.py` and `search.py` make a `SharedObject` for each object, and `task.py` counts the models built for
trials; `loss.py`, `evaluation.py` and `data.py` call `check` around their calls. Attributes that are data or random streams
count, and plain variables of a function's closure. Objects of installed packages do not count, because these note things at
their first call, and metrics of the library `evaluate` collect predictions in themselves. The module must not know shards or
devices.

Note: threads. Trials call `check` at once and without a lock; a change that one trial makes while another looks counts, too.
"""

import random
import weakref
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from transformers import Trainer

from hydra_tune.errors import TaskError
from hydra_tune.shard.python_state.code_names import is_installed
from hydra_tune_transformers.own_loss import AttributeDigest

_CALLED = ("compute_loss_func", "data_collator", "compute_metrics", "preprocess_logits_for_metrics")
_PLAIN = (bool, int, float, complex, str, bytes)
_STREAMS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
# Not None, which stands for an object that is made at its first use.
_CONTENTS = (*_PLAIN, *_STREAMS, list, dict, set, tuple, torch.Tensor, np.ndarray)
_MOST_LOOKED_AT = 4096
"""Items of a container whose contents are compared; of larger ones, the number of items."""
_REMEDY = (
    "which trials share, and each training of a Trainer begins with a new state: make a task for each trial by a function that "
    "makes the object as well, or leave the change out"
)


def shared_objects(trainer: Trainer) -> tuple["SharedObject", ...]:
    """Return the objects of a `Trainer` that trials call."""
    named = ((name, getattr(trainer, name)) for name in _CALLED)
    return tuple(SharedObject.of(name, value) for name, value in named if value is not None)


class SharedObject:
    """Knows the first state of an object, and the number of trials.

    Args:
        name: the argument of the `Trainer`.
        value: the object.
    """

    def __init__(self, name: str, value: object) -> None:
        self.name, self.value = name, value
        self.num_trials = 0
        self._first = _state_of(value)

    @classmethod
    def of(cls, name: str, value: object) -> "SharedObject":
        """Return what is known of an object, the same for all tasks with the object."""
        value = _holder_of(value)
        known = _KNOWN.get(id(value))
        if known is None:
            known = _KNOWN[id(value)] = cls(name, value)
        return known

    # Another process has an object of its own.
    def __reduce__(self) -> Any:
        return SharedObject.of, (self.name, self.value)

    def has_changed(self) -> bool:
        """Whether the object has another state than at first."""
        return _state_of(self.value) != self._first


_KNOWN = weakref.WeakValueDictionary[int, SharedObject]()
"""By the identity of the object, which lives as long as its `SharedObject`."""


def check(value: object) -> None:
    """Refuse an object that several trials call, and that has changed.

    Raises:
        TaskError: the object has changed.
    """
    value = _holder_of(value)
    shared = _KNOWN.get(id(value))
    if shared is not None and shared.num_trials > 1 and shared.has_changed():
        kind = value.__name__ if isinstance(value, FunctionType) else type(value).__name__
        raise TaskError(f"{shared.name}={kind} changes in its calls, {_REMEDY}")


def _holder_of(value: Any) -> Any:
    """Return what holds the state of a callable: the object of a bound method, the function of a partial one."""
    while isinstance(value, MethodType | partial):
        value = value.__self__ if isinstance(value, MethodType) else value.func
    return value


def _state_of(value: object) -> object:
    """Return digests of an object's state; None for an object that is not looked at."""
    parts: dict[str, object]
    kinds: tuple[type, ...]
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        parts, kinds = {name: _content(cell) for name, cell in cells}, (*_PLAIN, *_STREAMS)
    elif is_installed(type(value).__module__) or isinstance(value, Trainer):  # a task has given the `Trainer` up
        return None
    else:
        parts, kinds = dict(getattr(value, "__dict__", {})), _CONTENTS
    return {name: _digest_of(part) for name, part in parts.items() if isinstance(part, kinds)}


def _digest_of(part: Any) -> object:
    # Large contents are data, and each call of a trial would read them.
    size = (
        part.size if isinstance(part, np.ndarray) else len(part) if isinstance(part, list | dict | set | tuple) else 0
    )
    return size if size > _MOST_LOOKED_AT else AttributeDigest().note(part)


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not yet bound
        return None
