"""A thread's own stream of Python's `random`, in place of the process-wide stream.

The functions of `random` are methods of one hidden object, `random._inst`, which draws for every thread. This module
gives the object a class whose methods look up the thread's own stream first: a thread with a stream of its own draws from
and seeds that stream, and all other threads use the process's stream as before. `RandomStreams` (`rng_streams.py`)
installs the class once for the process, when the first streams are made, and gives each trial a `PythonStream`.
`own_numpy.py` makes `BoundFunction`s of its own. The module must not know models.

Note: replaced functions. Most functions draw through `self.random()` and `self.getrandbits()`, so changing the class is
enough. Five functions (`_REPLACED`) are bound to methods in C, or call such methods directly. This module replaces the
five functions in `random`, and in every module, class, object's attribute, dict, list or closure that holds one of the five
(`from random import random`). Replacement is impossible in tuples (defaults of arguments), sets, slots, local variables
of running functions, `functools.partial` and `staticmethod`: functions held there use the process's stream in every
thread. The process's stream stays inside `random._inst`, so threads without a stream of their own see no difference.
"""

import functools
import gc
import os
import random
import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from types import CellType, MethodType
from typing import Any, Self

_OWN: "ContextVar[PythonStream | None]" = ContextVar("own Python stream", default=None)
_REPLACED = ("random", "getrandbits", "seed", "getstate", "setstate")
_LOCK = threading.Lock()


class PythonStream(random.Random):
    """A random stream equivalent to Python's own.

    Attributes:
        moves: number of draws from the stream, and settings of the stream, by functions of `random`.
    """

    moves = 0
    gauss_next: float | None

    def become_own(self) -> "Token[PythonStream | None]":
        """Make this thread draw from the stream until the caller resets the variable; new threads do not inherit it."""
        return _OWN.set(self)


class _RoutedRandom(random.Random):
    """Class of `random._inst`: the process's stream, or the stream of the thread."""

    __slots__ = ()

    def random(self) -> float:
        own_stream = _OWN.get()
        if own_stream is None:
            return _C_RANDOM(self)
        own_stream.moves += 1
        return own_stream.random()

    def getrandbits(self, k: int, /) -> int:
        own_stream = _OWN.get()
        if own_stream is None:
            return _C_GETRANDBITS(self, k)
        own_stream.moves += 1
        return own_stream.getrandbits(k)

    def seed(self, a: Any = None, version: int = 2) -> None:
        own_stream = _OWN.get()
        if own_stream is None:
            return super().seed(a, version)
        own_stream.moves += 1
        return own_stream.seed(a, version)

    def getstate(self) -> tuple[Any, ...]:
        own_stream = _OWN.get()
        return super().getstate() if own_stream is None else own_stream.getstate()

    def setstate(self, state: tuple[Any, ...]) -> None:
        own_stream = _OWN.get()
        if own_stream is None:
            return super().setstate(state)
        own_stream.moves += 1
        return own_stream.setstate(state)

    @property
    def gauss_next(self) -> float | None:
        """Left-over number of `gauss`."""
        own_stream = _OWN.get()
        # In `vars`, because the property of the class hides the attribute of the instance.
        number: float | None = vars(self)["gauss_next"] if own_stream is None else own_stream.gauss_next
        return number

    @gauss_next.setter
    def gauss_next(self, value: float | None) -> None:
        own_stream = _OWN.get()
        if own_stream is None:
            vars(self)["gauss_next"] = value
        else:
            own_stream.moves += 1
            own_stream.gauss_next = value

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy is an independent stream, as in a process without routing.
        return random.Random, (), self.getstate()


_C_RANDOM: Callable[[random.Random], float] = random.Random.random
_C_GETRANDBITS: Callable[[random.Random, int], int] = random.Random.getrandbits


class BoundFunction(functools.partial[Any]):
    """Replacement for a C method bound to an object; copied, pickled and found in classes as such a method is.

    Args:
        run: function to call.
        owner: the object; pickling the function pickles the object.
    """

    def __new__(cls, run: Callable[..., Any], owner: object, name: str) -> Self:
        """Create the function with the method's name and documentation."""
        function = super().__new__(cls, run)
        vars(function).update(__self__=owner, __name__=name, __doc__=getattr(type(owner), name).__doc__)
        return function

    def __get__(self, instance: object, owner: type | None = None) -> Self:
        return self

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (vars(self)["__self__"], vars(self)["__name__"])


def install() -> dict[Any, Any]:
    """Route the functions of `random` to the calling thread's stream; once for the process.

    Returns:
        Unrouted functions -> routed functions, for `replace_everywhere`; empty if called before.
    """
    instance = _instance()
    replaced: dict[Any, Any] = {}
    with _LOCK:
        if isinstance(instance, _RoutedRandom):
            return replaced
        instance.__class__ = _RoutedRandom
        for name in _REPLACED:
            original = getattr(random, name)
            # Otherwise other code has already replaced the function, and its replacement stays.
            if getattr(original, "__self__", None) is instance:
                routed = getattr(instance, name)
                replaced[original] = (
                    routed if isinstance(original, MethodType) else BoundFunction(routed, instance, name)
                )
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_reseed)
    return replaced


def replace_everywhere(replaced: Mapping[Any, Any]) -> None:
    """Replace objects by their replacements wherever the note above says that replacement is possible.

    The search covers the whole heap, so replace all objects in one call.
    """
    if not replaced:
        return
    by_id = {id(original): replacement for original, replacement in replaced.items()}
    is_frozen = gc.get_freeze_count() > 0
    if is_frozen:
        # Frozen objects are invisible to `gc.get_referrers`.
        gc.unfreeze()
    try:
        for holder in gc.get_referrers(*replaced):
            if isinstance(holder, CellType):
                holder.cell_contents = by_id[id(holder.cell_contents)]
            elif isinstance(holder, list):
                holder[:] = [by_id.get(id(value), value) for value in holder]
            else:
                _replace_attributes(holder if isinstance(holder, dict) else getattr(holder, "__dict__", {}), by_id)
    finally:
        if is_frozen:
            gc.freeze()


def _replace_attributes(names: Any, by_id: Mapping[int, Any]) -> None:
    for name, value in list(names.items()):
        if id(value) not in by_id:
            continue
        # Python looks attributes of classes up in a cache, which only `setattr` renews.
        owners = (
            [owner for owner in gc.get_referrers(names) if isinstance(owner, type)] if "__module__" in names else ()
        )
        for owner in owners:
            setattr(owner, name, by_id[id(value)])
        if not owners:
            names[name] = by_id[id(value)]


def _instance() -> random.Random:
    instance: random.Random = vars(random)["_inst"]
    return instance


def _reseed() -> None:
    """Reseed in a forked child, where Python has reseeded the process's stream."""
    # Python's reseeding has cleared the number through the property, and so perhaps on the thread's own stream.
    vars(_instance())["gauss_next"] = None
    own_stream = _OWN.get()
    if own_stream is not None:
        own_stream.seed()
