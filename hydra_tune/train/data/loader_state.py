"""Positions of a trial's own copies of samplers, generators and datasets, as values for a checkpoint.

`TrialLoaderCopies` (`loader_copies.py`) reads the positions for each checkpoint, before a draw that will be repeated, and at
the start of each training pass of a trial that is saved, and sets the copies to positions when a trial resumes or repeats a
draw. The positions may be live objects, which the next draw changes: `Trial` (`train/trial.py`) copies the positions that
have to stay. The module must never change an original, and must not know models or steps.
"""

import random
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hydra_tune.train.checkpoint.attribute_diff import same_value
from hydra_tune.train.checkpoint.compatibility import copied

# Attributes of a loader that torch makes anew in each pass.
_OF_A_PASS = frozenset({"_iterator", "_IterableDataset_len_called"})


def state_of(original: object, own: Any, known: AbstractSet[int]) -> Any:
    """Return the position of a copy; `known` has the ids of all copies, each of which has a position of its own."""
    if isinstance(own, torch.Generator | random.Random):
        return own.get_state() if isinstance(own, torch.Generator) else own.getstate()
    if type(own).__module__.startswith("numpy.random"):
        return _numpy_state(original, own)
    if _keeps_its_state(own):
        return own.state_dict()
    # A subclass may keep a position in attributes; a plain loader's is that of its parts.
    if type(own) is DataLoader:
        return None
    if hasattr(own, "__dict__"):
        return _moved(original, own, known)
    # Unchanged indices in an array or a set have no position; a changed object without attributes is refused when the
    # checkpoint is written.
    return None if same_value(own, original) else own


def give_state(own: Any, state: Any) -> None:
    """Set a copy to the position of another copy of the same kind."""
    if isinstance(own, torch.Generator):
        # A clone, because torch reads past the start of a view.
        own.set_state(state.clone())
    elif isinstance(own, random.Random):
        own.setstate(state)
    elif type(own).__module__.startswith("numpy.random"):
        _set_numpy_state(own, state)
    elif _keeps_its_state(own):
        own.load_state_dict(state)
    # None for a plain loader, and for any loader in a checkpoint written before subclasses had positions.
    elif state is not None and hasattr(own, "__dict__"):
        vars(own).update(state)


def set_back(original: object, own: Any, known: AbstractSet[int]) -> None:
    """Give the attributes of a copy the original's values, because a position holds only those that differ.

    `original` is None if no longer alive.
    """
    is_set_whole = isinstance(own, torch.Generator | random.Random) or _keeps_its_state(own)
    if original is None or is_set_whole or type(own) is DataLoader or not hasattr(own, "__dict__"):
        return
    for name in _moved(original, own, known):
        if name in vars(original):
            # Copied, because the trial may change the value in place.
            vars(own)[name] = copied(vars(original)[name])
        else:
            del vars(own)[name]


def _keeps_its_state(own: Any) -> bool:
    return callable(getattr(own, "state_dict", None)) and callable(getattr(own, "load_state_dict", None))


def _moved(original: object, own: object, known: AbstractSet[int]) -> dict[str, Any]:
    """Return the attributes that differ from the original's."""
    original_attributes, differences = getattr(original, "__dict__", {}), {}
    for name, value in getattr(own, "__dict__", {}).items():
        if isinstance(own, DataLoader) and (name in _OF_A_PASS or isinstance(value, _BaseDataLoaderIter)):
            continue
        if id(value) in known or (name in original_attributes and _is_at(value, original_attributes[name], known)):
            continue
        differences[name] = value
    return differences


def _is_at(value: Any, original: Any, known: AbstractSet[int]) -> bool:
    """Whether a value is the original's, but for copies in it that have a position of their own."""
    if value is original:
        return True
    if type(value) is type(original) and type(value) in (list, tuple, dict) and len(value) == len(original):
        pairs = (value.items(), original.items()) if type(value) is dict else (enumerate(value), enumerate(original))
        if all(k == j and (own is item or id(own) in known) for (k, own), (j, item) in zip(*pairs, strict=True)):
            return True
    return same_value(value, original)


def _numpy_state(original: Any, own: Any) -> Any:
    if hasattr(own, "entropy"):
        # A `SeedSequence` cannot be set, so one that has spawned others is refused when the checkpoint is written.
        return None if same_value(own.state, original.state) else own
    if hasattr(own, "bit_generator"):
        return own.bit_generator.state
    return own.get_state() if hasattr(own, "get_state") else getattr(own, "state", None)


def _set_numpy_state(own: Any, state: Any) -> None:
    if hasattr(own, "bit_generator"):
        own.bit_generator.state = state
    elif hasattr(own, "set_state"):
        own.set_state(state)
    elif state is not None:
        own.state = state
