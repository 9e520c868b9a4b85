"""A thread's own stream of `numpy.random`, in place of the one of the whole process. Imports numpy.

The functions of `numpy.random` are methods of one hidden `RandomState`, which draws for every thread from the bit generator it
was given last, and enters that one's `lock` around each draw. Here the hidden object is given a `_Facade`, whose lock is
`_Turn`: whoever enters asks for the thread's own stream, or else the process's, and where another was drawn from last, has the
`RandomState` draw from the right one. That stays until another thread draws, so that draws in a row exchange nothing.

Note: normal numbers come in pairs, and the `RandomState` keeps the second one. It forgets that number when it is given another
bit generator, so the number is taken out before and put back when its stream is drawn from again.

Note: exceptions from outside (Ctrl-C, `GivenUp`). Python raises them between any two lines, so also here. `_Turn` lets the lock
go again then, and an exchange that was interrupted is made anew from its beginning. `__exit__` is the lock's own, in C, where
nothing is raised.

Note: what is replaced. `get_state` and `set_state`, which enter the lock in newer versions of numpy only,
`get_bit_generator` and `set_bit_generator`, wherever `own_python.replace_everywhere` finds them. Objects of the user's own
(`RandomState()`, `default_rng()`) stay as they are.
"""

import os
import threading
from contextvars import ContextVar, Token
from typing import Any

import numpy as np

from hydra_tune.errors import TaskError
from hydra_tune.train.own_python import BoundFunction

_OWN: "ContextVar[NumpyStream | None]" = ContextVar("own numpy stream", default=None)
_LOCK = threading.RLock()
_SINGLETON: Any = np.random.mtrand._rand  # noqa: SLF001
_GIVE_BIT_GENERATOR: Any = np.random.RandomState.__init__
_HANDED_OUT: dict[int, Any] = {}  # bit generators, by `id`, that others have a bare pointer to: these stay
_NOTHING = {"bit_generator": "MT19937", "state": {}}

State = tuple[str, Any, int, int, float]
"""As `numpy.random.get_state` gives it."""


class NumpyStream:
    """A stream as numpy's own.

    Args:
        bits: the bit generator.

    Attributes:
        moves: how often a function of `numpy.random` has been called with it.
        gauss: whether a normal number is kept, and which; of a stream that is not drawn from just now.
    """

    def __init__(self, bits: Any) -> None:
        self.bits = bits
        self.moves = 0
        self.gauss: tuple[int, float] = (0, 0.0)

    @classmethod
    def of_seed(cls, seed: int) -> "NumpyStream":
        """As after `numpy.random.seed`."""
        bits = np.random.MT19937(0)
        bits._legacy_seeding(seed)  # noqa: SLF001
        return cls(bits)

    def become_own(self) -> "Token[NumpyStream | None]":
        """Let this thread draw from the stream, until whoever calls this resets the variable; threads that it starts do not."""
        return _OWN.set(self)

    def state(self) -> State:
        """Where the stream stands."""
        with _LOCK:
            if _TURN.installed is self:
                self.gauss = _TURN.kept()
            state = self.bits.state["state"]
            return "MT19937", state["key"], state["pos"], *self.gauss

    def restore(self, state: State) -> None:
        """Have the stream stand where another stood."""
        with _LOCK:
            if _TURN.installed is self:
                _TURN.installed = None
            self.bits.state = state[:3]
            self.gauss = (int(state[3]), float(state[4])) if len(state) > 3 else (0, 0.0)  # noqa: PLR2004


class _Turn:
    """The lock of `_Facade`.

    Attributes:
        base: the stream of threads that have none of their own: the process's.
        installed: the stream that the hidden `RandomState` draws from; None: an exchange was interrupted.
    """

    __exit__ = _LOCK.__exit__

    def __init__(self, base: NumpyStream) -> None:
        self.base = base
        self.installed: NumpyStream | None = base
        self.wanted = base  # by the exchange under way
        self._is_exchanging = False

    def __enter__(self) -> NumpyStream:
        try:
            _LOCK.acquire()
            wanted = _OWN.get()
            if wanted is None:
                wanted = self.base
            wanted.moves += 1
            if wanted is not self.installed and not self._is_exchanging:
                self._exchange(wanted)
        except BaseException:
            if _LOCK._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001
                _LOCK.release()
            raise
        return wanted

    def kept(self) -> tuple[int, float]:
        """The normal number that the hidden `RandomState` keeps just now; with the lock."""
        before, self._is_exchanging = self._is_exchanging, True
        try:
            state = _SINGLETON.get_state(legacy=False)
        finally:
            self._is_exchanging = before
        return state["has_gauss"], state["gauss"]

    def replace_base(self, base: NumpyStream) -> None:
        """Threads that have no stream of their own draw from another one from now on; with the lock."""
        self._exchange(base)
        self.base = base

    @property
    def taken(self) -> NumpyStream:
        """Whose bit generator somebody takes who asks the facade for a pointer to it; with the lock."""
        if self._is_exchanging:
            return self.wanted
        stream = _OWN.get() or self.base
        _HANDED_OUT[id(stream.bits)] = stream.bits
        return stream

    @property
    def seen(self) -> NumpyStream | None:
        """What the facade stands for: with the lock, the stream drawn from; None while streams are exchanged."""
        return None if self._is_exchanging else self.installed

    def _exchange(self, wanted: NumpyStream) -> None:
        self._is_exchanging = True
        try:
            if self.installed is not None:
                self.installed.gauss = self.kept()
            self.installed = None
            self.wanted = wanted
            _GIVE_BIT_GENERATOR(_SINGLETON, _FACADE)
            if wanted.gauss[0]:
                _SINGLETON.set_state(_NOTHING | {"has_gauss": wanted.gauss[0], "gauss": wanted.gauss[1]})
            self.installed = wanted
        finally:
            self._is_exchanging = False


class _Facade(np.random.MT19937):
    """The hidden `RandomState`'s bit generator: for each thread that of the stream it draws from."""

    lock: Any = None

    @property
    def capsule(self) -> Any:
        """A pointer to the thread's bit generator, which others (`Generator(np.random.mtrand._rand)`, scipy) draw from."""
        with _LOCK:
            return _TURN.taken.bits.capsule

    @property
    def state(self) -> Any:
        """That of the thread's bit generator."""
        with _TURN:
            stream = _TURN.seen
            return dict(_NOTHING) if stream is None else stream.bits.state

    @state.setter
    def state(self, value: Any) -> None:
        with _TURN:
            stream = _TURN.seen
            if stream is not None:
                stream.bits.state = value

    def _legacy_seeding(self, seed: Any) -> None:
        with _TURN as stream:
            if isinstance(stream.bits, np.random.MT19937):
                stream.bits._legacy_seeding(seed)  # noqa: SLF001
            else:  # `numpy.random.seed` does this for bit generators of other kinds, which it takes the facade for none of
                stream.bits.state = type(stream.bits)(seed).state

    def __reduce__(self) -> Any:
        with _TURN as stream:
            return stream.bits.__reduce__()


def _get_state(legacy: bool = True) -> Any:
    with _TURN:
        return _SINGLETON.get_state(legacy)


def _set_state(state: Any) -> None:
    with _TURN:
        _SINGLETON.set_state(state)


def get_bit_generator() -> Any:
    """Return the bit generator that this thread's functions of `numpy.random` draw from."""
    with _TURN as stream:
        return stream.bits


def set_bit_generator(bitgen: Any) -> None:
    """Have the functions of `numpy.random` draw from a bit generator, in all threads that work for no trial."""
    if _OWN.get() is not None:
        raise TaskError(
            "numpy.random.set_bit_generator() was called by a trial's own code, whose stream has to stay an MT19937, which "
            "checkpoints can hold; draw from a numpy.random.Generator with a bit generator of your own"
        )
    with _TURN:
        _TURN.replace_base(NumpyStream(bitgen))


_FACADE = _Facade(0)
_TURN = _Turn(NumpyStream(_SINGLETON._bit_generator))  # noqa: SLF001


def install() -> dict[Any, Any]:
    """Have the functions of `numpy.random` ask; once for the process.

    Returns:
        As `own_python.install`.
    """
    with _LOCK:
        bits = _SINGLETON._bit_generator  # noqa: SLF001
        if isinstance(bits, _Facade):
            return {}
        _FACADE.lock = _TURN
        base = NumpyStream(bits)
        with bits.lock:
            _SINGLETON._bit_generator = _FACADE  # noqa: SLF001 - so that what it keeps can be read within the lock
            base.gauss = _TURN.kept()
            _TURN.installed = None
            _TURN.replace_base(base)
        replaced: dict[str, Any] = {
            "get_state": BoundFunction(_get_state, _SINGLETON, "get_state"),
            "set_state": BoundFunction(_set_state, _SINGLETON, "set_state"),
            "get_bit_generator": get_bit_generator,
            "set_bit_generator": set_bit_generator,
        }
    if hasattr(os, "register_at_fork"):  # a child begins with streams that nobody was exchanging
        os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)
    return {getattr(np.random, name): new for name, new in replaced.items()}
