"""Where a trial's own copy of a sampler, a generator or a dataset stands, as values that a checkpoint can hold."""

import random
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch.utils.data import DataLoader

from hydra_tune.train.attributes import same_value


def state_of(original: object, own: Any, known: AbstractSet[int]) -> Any:
    """Where a copy stands.

    Args:
        original: what it was copied from, which never moves.
        own: the copy.
        known: ids of all copies: these have states of their own.
    """
    if isinstance(own, torch.Generator | random.Random):
        return own.get_state() if isinstance(own, torch.Generator) else own.getstate()
    if type(own).__module__.startswith("numpy.random"):
        return _numpy_state(own)
    if _keeps_its_state(own):
        return own.state_dict()
    if isinstance(own, DataLoader):
        return None
    # What has no attributes is refused by whoever writes it.
    return _moved(original, own, known) if hasattr(own, "__dict__") else own


def give_state(own: Any, state: Any) -> None:
    """Have a copy stand where another of the same kind stood."""
    if isinstance(own, torch.Generator):
        own.set_state(state.clone())  # torch reads past the start of a view
    elif isinstance(own, random.Random):
        own.setstate(state)
    elif type(own).__module__.startswith("numpy.random"):
        _set_numpy_state(own, state)
    elif _keeps_its_state(own):
        own.load_state_dict(state)
    elif not isinstance(own, DataLoader):
        vars(own).update(state)


def _keeps_its_state(own: Any) -> bool:
    return callable(getattr(own, "state_dict", None)) and callable(getattr(own, "load_state_dict", None))


def _moved(original: object, own: object, known: AbstractSet[int]) -> dict[str, Any]:
    """Attributes that are not those of the original."""
    before, moved = getattr(original, "__dict__", {}), {}
    for name, value in getattr(own, "__dict__", {}).items():
        if id(value) in known or (name in before and (value is before[name] or same_value(value, before[name]))):
            continue
        moved[name] = value
    return moved


def _numpy_state(own: Any) -> Any:
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
