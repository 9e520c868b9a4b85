"""`DrawClock`: since when a trial has been waiting for its loader, and how it is given up on.

Note: given up. A loader that hangs cannot be stopped from outside; but Python raises an exception in another thread as soon as
that one is back from whatever it waits for (`PyThreadState_SetAsyncExc`). So a thread that is waited for no longer finds
`GivenUp` raised in the user's code: at once where that runs Python, never where it hangs in the system. In the second case it
is abandoned: the gate of captures, which it holds, is taken away from it, so that the others go on, and should it ever come
back it ends. It first waits until the trial's memory has been given back, so that nobody works on the trial beside it.

Note: who is first. Whether a draw is over, and whether it has been given up on, is decided under one lock, so that nobody is
interrupted in code of the pool. An exception that is on its way when the draw ends is called off, and raised there.
"""

import ctypes
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Self

from hydra_tune.shard.gate import GATE


class GivenUp(BaseException):
    """Raised in a loader whose trial does not wait for it any more."""


class _Settled(BaseException):
    """Raised by a thread in itself, see `_settle`."""


class DrawClock:
    """The draws of one trial, one at a time.

    Attributes:
        handle: the data handle that is drawn from, or was last.
        thread: that draws, or did last.
        is_abandoned: whether the draw under way is waited for by nobody, and its thread holds nothing any more.
    """

    def __init__(self) -> None:
        self.handle: object = None
        self.thread = 0
        self.is_abandoned = False
        self._lock = threading.Lock()
        self._began: float | None = None  # by the clock of `time.monotonic`
        self._is_in_process = False
        self._is_interrupted = False
        self._released = threading.Event()

    def drawing(self, handle: object, *, in_process: bool) -> Self:
        """To be entered around whatever of the user's data code runs.

        Args:
            handle: of the task.
            in_process: whether the capture gate is passed meanwhile.
        """
        self.handle, self._is_in_process = handle, in_process
        return self

    def __enter__(self) -> None:
        self.thread = threading.get_ident()
        self._began = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._began = None
        if self._is_interrupted:
            _interrupt(self.thread, None)
            if self.is_abandoned:
                self._released.wait()
            if kind is not GivenUp:
                raise GivenUp

    @property
    def seconds(self) -> float:
        """For how long the present draw has been under way; 0 if none is."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def is_in_process(self) -> bool:
        """Whether captures wait for the draw."""
        return self._is_in_process

    def where(self) -> str:
        """The place in the program where the draw is now, as "FILE:LINE in FUNCTION"."""
        frame = sys._current_frames().get(self.thread)  # noqa: SLF001 - Python has no other name for it
        if frame is None:
            return "nowhere"
        last = traceback.extract_stack(frame, limit=1)[-1]
        return f"{last.filename}:{last.lineno} in {last.name}"

    def under_way(self) -> "threading.Lock":
        """The lock under which draws end; who holds it may look at `seconds` and act on it."""
        return self._lock

    def interrupt(self) -> bool:
        """Have `GivenUp` raised in the draw under way, as soon as it is back in Python; False: there is none."""
        with self._lock:
            if self._began is None:
                return False
            self._is_interrupted = True
            _interrupt(self.thread, GivenUp)
            return True

    def abandon(self) -> bool:
        """Take away from the draw under way what others wait for; False: it is over.

        Whoever calls this calls `released` when the trial's memory has been given back.
        """
        with self._lock:
            if self._began is None:
                return False
            self._is_interrupted = self.is_abandoned = True
            _interrupt(self.thread, GivenUp)
            if self._is_in_process:
                GATE.forget(self.thread)
            return True

    def released(self) -> None:
        """Nothing of the trial is touched by anybody else any more."""
        self._released.set()


def _interrupt(thread: int, exception: type[BaseException] | None) -> None:
    """Have an exception raised in a thread, or call off one that is on its way (None)."""
    raised = None if exception is None else ctypes.py_object(exception)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)
    if sys.version_info < (3, 13):
        _settle()


def _settle() -> None:
    """End the request to look for an exception, which Python before 3.13 makes to all threads at once.

    The request ends when any thread raises its exception. Until then each thread looks at every turn of a loop, and a function
    that is profiled or debugged never begins on Python 3.11. A thread that hangs outside Python would leave it so for good, and
    so does an exception that was called off. The other thread asks for itself when it is back.
    """
    try:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), ctypes.py_object(_Settled))
        while True:  # until it is raised here, in the next turn or two
            pass
    except _Settled:
        pass
