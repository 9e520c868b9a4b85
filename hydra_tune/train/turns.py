"""`Turns`: a reentrant lock that can be taken away from a thread which is not expected back.

A loader that hangs in this process does so with the process's random streams in its hands (`train/streams.py`). When it is
given up on, the others must have them. Knows nothing of trials.
"""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

_LOOK_SECONDS = 0.25  # between looks whether what is waited for has been taken away from its holder


class _Held(threading.local):
    """The locks that this thread has taken, the last last."""

    def __init__(self) -> None:
        self.locks: list[Any] = []


class Turns:
    """Held by one thread at a time, as often as it likes.

    Note: taken away. Each time that happens there is a new lock, and the old one is the old holder's to release whenever it
    comes back. Who waits for the old one looks now and then, and goes over to the new one. So a turn costs what a lock costs.
    """

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()
        self._held = _Held()
        self._restores: list[Callable[[], None]] = []

    @property
    def is_held(self) -> bool:
        """Whether this thread has the turn, and it was not taken away."""
        return bool(self._held.locks) and self._held.locks[-1] is self._lock

    def __enter__(self) -> None:
        while True:
            lock = self._lock
            if lock.acquire(blocking=False) or lock.acquire(timeout=_LOOK_SECONDS):
                if lock is self._lock:
                    self._held.locks.append(lock)
                    return
                lock.release()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.locks.pop().release()

    def begin(self, restore: Callable[[], None]) -> None:
        """The holder changes something; `restore` has it be as it was, should the turn be taken away."""
        self._restores.append(restore)

    def end(self) -> None:
        """The holder has changed back what it said last; only while `is_held`."""
        self._restores.pop()

    def take_away(self) -> None:
        """Whoever has the turn has it no longer, and is in no position to notice; what it has changed is as it was before."""
        restores, self._restores = self._restores, []
        if restores:
            restores[0]()  # the outermost: what was there before all others
        self._lock = threading.RLock()
