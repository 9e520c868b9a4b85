"""Arguments of nodes with places in a list of values: quick to fill in, in one way for whoever runs graphs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx


@dataclass(frozen=True, slots=True)
class _At:
    """Stands for a node's value."""

    place: int


def located(value: Any, places: Mapping[fx.Node, int]) -> Any:
    """Arguments, or one of them, with places.

    Args:
        value: a tuple, a dict, or whatever is in them.
        places: of the nodes' values.
    """
    if isinstance(value, fx.Node):
        return _At(places[value])
    if isinstance(value, dict):
        return {key: located(one, places) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return (tuple if isinstance(value, tuple) else list)(located(one, places) for one in value)
    return value


def filled(value: Any, values: list[Any]) -> Any:
    """Arguments with values.

    Args:
        value: as `located` gives it.
        values: by place.
    """
    kind = type(value)
    if kind is _At:
        return values[value.place]
    if kind is tuple or kind is list:
        return kind([filled(one, values) for one in value])
    if kind is dict:
        return {key: filled(one, values) for key, one in value.items()} if value else value
    return value
