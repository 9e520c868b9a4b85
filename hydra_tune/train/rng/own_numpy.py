"""A thread's own stream of `numpy.random`, in place of the process-wide stream. Imports numpy.

The functions of `numpy.random` are methods of a hidden `RandomState`. The hidden object draws for every thread from its
present bit generator, inside the bit generator's `lock`. This module gives the hidden object a `_BitGeneratorFacade` as bit
generator, with a `_StreamSwitchLock` as lock. Entering the lock looks up the thread's own stream, or else the process's,
and if another stream was drawn from last, switches the `RandomState` to the right bit generator. `RandomStreams`
(`rng_streams.py`) loads and installs this module when streams are made, if numpy is installed. The module must not know
models, and a program without numpy must never load the module.

Note: normal numbers come in pairs, and the `RandomState` keeps the second number. The number is lost when the `RandomState`
gets another bit generator, so an exchange takes the number out first and puts the number back when its stream is drawn from
again.

Note: exceptions from outside (Ctrl-C, `LoaderInterrupt`). Python raises such exceptions between any two lines, also here.
`_StreamSwitchLock` then releases the lock, and an interrupted exchange is repeated from its beginning. `__exit__` is the
lock's own, in C, where no exception is raised.

Note: replaced functions. `get_state` and `set_state`, which enter the lock only in newer versions of numpy,
`get_bit_generator` and `set_bit_generator`, wherever `own_python.replace_everywhere` finds the functions. Objects of the
user's own (`RandomState()`, `default_rng()`) stay as they are.
"""

import os
import threading
from contextvars import ContextVar, Token
from typing import Any

import numpy as np

from hydra_tune.errors import TaskError
from hydra_tune.train.rng.own_python import BoundFunction

_OWN: "ContextVar[NumpyStream | None]" = ContextVar("own numpy stream", default=None)
# Reentrant, because `_get_state` already holds the lock where a newer numpy enters it again.
_LOCK = threading.RLock()
_SINGLETON: Any = np.random.mtrand._rand  # noqa: SLF001
_GIVE_BIT_GENERATOR: Any = np.random.RandomState.__init__
# Bit generators, by `id`, to which others have a bare pointer; kept alive for ever.
_HANDED_OUT: dict[int, Any] = {}
_NOTHING = {"bit_generator": "MT19937", "state": {}}

State = tuple[str, Any, int, int, float]
"""The tuple of `numpy.random.get_state`."""


class NumpyStream:
    """A random stream equivalent to numpy's own, of a bit generator.

    Attributes:
        moves: number of entries of the lock for the stream, at least one for each draw by a `numpy.random` function.
        gauss: whether a normal number is kept, and the number; valid while the stream is not installed.
    """

    def __init__(self, bits: Any) -> None:
        self.bits = bits
        self.moves = 0
        self.gauss: tuple[int, float] = (0, 0.0)

    @classmethod
    def of_seed(cls, seed: int) -> "NumpyStream":
        """Return a stream in the state after `numpy.random.seed`."""
        bits = np.random.MT19937(0)
        bits._legacy_seeding(seed)  # noqa: SLF001
        return cls(bits)

    def become_own(self) -> "Token[NumpyStream | None]":
        """Make this thread draw from the stream until the caller resets the variable; new threads do not inherit the stream."""
        return _OWN.set(self)

    def state(self) -> State:
        """Return the position of the stream, in the format of `numpy.random.get_state`."""
        with _LOCK:
            if _TURN.installed is self:
                self.gauss = _TURN.kept()
            state = self.bits.state["state"]
            return "MT19937", state["key"], state["pos"], *self.gauss

    def restore(self, state: State) -> None:
        """Set the stream to a position that `state` returned."""
        with _LOCK:
            # Forces an exchange at the next draw, so that the hidden `RandomState` drops the normal number that it
            # keeps.
            if _TURN.installed is self:
                _TURN.installed = None
            self.bits.state = state[:3]
            self.gauss = (int(state[3]), float(state[4])) if len(state) > 3 else (0, 0.0)  # noqa: PLR2004


class _StreamSwitchLock:
    """The lock of `_BitGeneratorFacade`.

    Attributes:
        base: stream of threads without a stream of their own: the process's.
        installed: stream that the hidden `RandomState` draws from; None: the next draw exchanges streams.
    """

    __exit__ = _LOCK.__exit__

    def __init__(self, base: NumpyStream) -> None:
        self.base = base
        self.installed: NumpyStream | None = base
        # Target of the exchange under way; the `RandomState` asks the facade for its pointer meanwhile.
        self.wanted = base
        self._is_exchanging = False

    def __enter__(self) -> NumpyStream:
        try:
            _LOCK.acquire()
            stream = _OWN.get()
            if stream is None:
                stream = self.base
            stream.moves += 1
            if stream is not self.installed and not self._is_exchanging:
                self._exchange(stream)
        except BaseException:
            if _LOCK._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001
                _LOCK.release()
            raise
        return stream

    def kept(self) -> tuple[int, float]:
        """Return the normal number kept by the hidden `RandomState`; requires the lock."""
        was_exchanging, self._is_exchanging = self._is_exchanging, True
        try:
            state = _SINGLETON.get_state(legacy=False)
        finally:
            self._is_exchanging = was_exchanging
        return state["has_gauss"], state["gauss"]

    def replace_base(self, base: NumpyStream) -> None:
        """Set the stream of all threads without a stream of their own; requires the lock."""
        self._exchange(base)
        self.base = base

    @property
    def taken(self) -> NumpyStream:
        """Stream whose bit generator the facade hands out as a pointer; used with the lock held."""
        if self._is_exchanging:
            return self.wanted
        stream = _OWN.get() or self.base
        _HANDED_OUT[id(stream.bits)] = stream.bits
        return stream

    @property
    def seen(self) -> NumpyStream | None:
        """Stream that the facade represents, with the lock held: the installed stream; None while streams are exchanged."""
        return None if self._is_exchanging else self.installed

    def _exchange(self, wanted: NumpyStream) -> None:
        self._is_exchanging = True
        try:
            if self.installed is not None:
                self.installed.gauss = self.kept()
            # In this order, an exception anywhere below leaves None, and the next draw repeats the whole exchange.
            self.installed = None
            self.wanted = wanted
            _GIVE_BIT_GENERATOR(_SINGLETON, _FACADE)
            if wanted.gauss[0]:
                _SINGLETON.set_state(_NOTHING | {"has_gauss": wanted.gauss[0], "gauss": wanted.gauss[1]})
            self.installed = wanted
        finally:
            self._is_exchanging = False


class _BitGeneratorFacade(np.random.MT19937):
    """Bit generator of the hidden `RandomState`: stands for the bit generator of the calling thread's stream."""

    lock: Any = None

    @property
    def capsule(self) -> Any:
        """Pointer to the thread's bit generator, from which others (`Generator(np.random.mtrand._rand)`, scipy) draw."""
        with _LOCK:
            return _TURN.taken.bits.capsule

    @property
    def state(self) -> Any:
        """State of the thread's bit generator."""
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
            else:
                # As `numpy.random.seed` seeds bit generators of other kinds; numpy takes the facade for an MT19937.
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
    """Return the bit generator of this thread's `numpy.random` functions."""
    with _TURN as stream:
        return stream.bits


def set_bit_generator(bitgen: Any) -> None:
    """Make the functions of `numpy.random` draw from a bit generator, in all threads that work for no trial."""
    if _OWN.get() is not None:
        raise TaskError(
            "a trial's own code called numpy.random.set_bit_generator(), but the trial's stream has to stay an MT19937, the "
            "kind that checkpoints can hold; draw from a numpy.random.Generator with a bit generator of your own"
        )
    with _TURN:
        _TURN.replace_base(NumpyStream(bitgen))


_FACADE = _BitGeneratorFacade(0)
_TURN = _StreamSwitchLock(NumpyStream(_SINGLETON._bit_generator))  # noqa: SLF001


def install() -> dict[Any, Any]:
    """Route the functions of `numpy.random` to the calling thread's stream; once for the process.

    Returns:
        As `own_python.install`.
    """
    with _LOCK:
        bits = _SINGLETON._bit_generator  # noqa: SLF001
        if isinstance(bits, _BitGeneratorFacade):
            return {}
        _FACADE.lock = _TURN
        base = NumpyStream(bits)
        with bits.lock:
            _SINGLETON._bit_generator = _FACADE  # noqa: SLF001 - so that `kept` can read the number within the lock
            base.gauss = _TURN.kept()
            _TURN.installed = None
            _TURN.replace_base(base)
        replaced: dict[str, Any] = {
            "get_state": BoundFunction(_get_state, _SINGLETON, "get_state"),
            "set_state": BoundFunction(_set_state, _SINGLETON, "set_state"),
            "get_bit_generator": get_bit_generator,
            "set_bit_generator": set_bit_generator,
        }
    # A child must begin with the lock free and with no exchange under way.
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)
    return {getattr(np.random, name): replacement for name, replacement in replaced.items()}
