"""Arguments of nodes as places in a list of values: quick to fill in, and alike in both interpreters of the planner.

`interpreter.py` locates the arguments of each node once, and fills in the values each time the node runs;
`planner/profile/profiling_interpreter.py` does so for profiles. The module must not know operators or devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx


@dataclass(frozen=True, slots=True)
class _ValueIndex:
    place: int


def located(value: Any, places: Mapping[fx.Node, int]) -> Any:
    """Return arguments, or an element of them, with places instead of nodes."""
    if isinstance(value, fx.Node):
        return _ValueIndex(places[value])
    if isinstance(value, dict):
        return {key: located(element, places) for key, element in value.items()}
    if isinstance(value, tuple | list):
        return (tuple if isinstance(value, tuple) else list)(located(element, places) for element in value)
    return value


def filled(value: Any, values: list[Any]) -> Any:
    """Return arguments with values instead of places."""
    # Exact types are quicker than `isinstance`, and suffice because `located` makes plain tuples, lists and dicts.
    kind = type(value)
    if kind is _ValueIndex:
        return values[value.place]
    if kind is tuple or kind is list:
        return kind([filled(element, values) for element in value])
    if kind is dict:
        return {key: filled(element, values) for key, element in value.items()} if value else value
    return value
