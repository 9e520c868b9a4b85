"""A thread's own stream of Python's `random`, in place of the one of the whole process.

The functions of `random` are methods of one hidden object, `random._inst`, which draws for every thread. Here that object gets
a class whose methods ask for the thread's own stream first: a thread that has one draws from that and seeds that, and all
others do with the process's stream what they did before.

Note: what is replaced. Most functions draw through `self.random()` and `self.getrandbits()`, so the class is enough. Five are
bound to methods in C, or call them directly (`_REPLACED`): these are replaced in `random`, and wherever else a module, a
class, an object's attribute, a dict, a list or a closure has them (`from random import random`). Nobody can replace them in
tuples (defaults of arguments), sets, slots, local variables of functions under way, `functools.partial` and `staticmethod`:
there they go on with the process's stream, whichever thread calls them. The process's stream stays inside `random._inst`, so
for threads without a stream of their own that is no difference.
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
    """A stream as Python's own.

    Attributes:
        moves: how often it has been drawn from or set by way of the functions of `random`.
    """

    moves = 0
    gauss_next: float | None

    def become_own(self) -> "Token[PythonStream | None]":
        """Let this thread draw from the stream, until whoever calls this resets the variable; threads that it starts do not."""
        return _OWN.set(self)


class _RoutedRandom(random.Random):
    """The class of `random._inst`: the process's stream, or that of the thread."""

    __slots__ = ()

    def random(self) -> float:
        own = _OWN.get()
        if own is None:
            return _C_RANDOM(self)
        own.moves += 1
        return own.random()

    def getrandbits(self, k: int, /) -> int:
        own = _OWN.get()
        if own is None:
            return _C_GETRANDBITS(self, k)
        own.moves += 1
        return own.getrandbits(k)

    def seed(self, a: Any = None, version: int = 2) -> None:
        own = _OWN.get()
        if own is None:
            return super().seed(a, version)
        own.moves += 1
        return own.seed(a, version)

    def getstate(self) -> tuple[Any, ...]:
        own = _OWN.get()
        return super().getstate() if own is None else own.getstate()

    def setstate(self, state: tuple[Any, ...]) -> None:
        own = _OWN.get()
        if own is None:
            return super().setstate(state)
        own.moves += 1
        return own.setstate(state)

    @property
    def gauss_next(self) -> float | None:
        """The number that `gauss` has left over."""
        own = _OWN.get()
        kept: float | None = vars(self)["gauss_next"] if own is None else own.gauss_next
        return kept

    @gauss_next.setter
    def gauss_next(self, value: float | None) -> None:
        own = _OWN.get()
        if own is None:
            vars(self)["gauss_next"] = value
        else:
            own.moves += 1
            own.gauss_next = value

    def __reduce__(self) -> tuple[Any, ...]:
        return random.Random, (), self.getstate()  # a copy is nobody's stream, as in a process without this


_C_RANDOM: Callable[[random.Random], float] = random.Random.random
_C_GETRANDBITS: Callable[[random.Random, int], int] = random.Random.getrandbits


class BoundFunction(functools.partial[Any]):
    """In place of a method in C that is bound to an object; copied, pickled and found in classes as such a method is.

    Args:
        run: what is called.
        owner: the object; whoever pickles the function pickles the object.
        name: of the method.
    """

    def __new__(cls, run: Callable[..., Any], owner: object, name: str) -> Self:
        """Has the method's name and documentation as well."""
        made = super().__new__(cls, run)
        vars(made).update(__self__=owner, __name__=name, __doc__=getattr(type(owner), name).__doc__)
        return made

    def __get__(self, instance: object, owner: type | None = None) -> Self:
        return self

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (vars(self)["__self__"], vars(self)["__name__"])


def install() -> dict[Any, Any]:
    """Have the functions of `random` ask; once for the process.

    Returns:
        Functions that do not ask -> those that do, for `replace_everywhere`; empty if this was called before.
    """
    instance = _instance()
    replaced: dict[Any, Any] = {}
    with _LOCK:
        if isinstance(instance, _RoutedRandom):
            return replaced
        instance.__class__ = _RoutedRandom
        for name in _REPLACED:
            original = getattr(random, name)
            if getattr(original, "__self__", None) is instance:  # else somebody else has put something there
                routed = getattr(instance, name)
                replaced[original] = (
                    routed if isinstance(original, MethodType) else BoundFunction(routed, instance, name)
                )
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_reseed)
    return replaced


def replace_everywhere(replaced: Mapping[Any, Any]) -> None:
    """Put other objects where some objects are, as far as the note above says.

    This searches the whole heap, 30 ms beside an imported torch: replace all objects in one call.

    Args:
        replaced: object -> what is put in its place.
    """
    if not replaced:
        return
    by_id = {id(old): new for old, new in replaced.items()}
    is_frozen = gc.get_freeze_count() > 0
    if is_frozen:
        gc.unfreeze()  # or what holds them would not be found
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
    """In a child that was forked: Python has seeded the process's stream anew, as it does in every child."""
    vars(_instance())["gauss_next"] = None
    own = _OWN.get()
    if own is not None:
        own.seed()
