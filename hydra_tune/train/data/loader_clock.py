"""`DrawClock`: the time of a trial's wait for a loader, and the way to give up on the loader.

`TrialDataFeed` (`data_feed.py`) runs the clock around each draw by code of the user's or by workers, and
`LoaderWatchdog` (`pool/faults/loader_watchdog.py`) reads the clock meanwhile and gives up on a draw that takes too long.
The watchdog, `JobDispatcher` (`pool/runtime/dispatcher.py`) and `pool/fusion/group_loaders.py` abandon draws. `JobState`
(`pool/runtime/job_state.py`) and `pool/fusion/job_table.py` put the watchdog's error in the place of a `LoaderInterrupt`, and
call `released` once the trial is closed. `pool/fusion/group_matcher.py` catches a `LoaderInterrupt` of a compared member, and
`Trial` (`train/trial.py`) with `SingleTrial` (`train/single_trial.py`) leaves the program of an abandoned thread alone.

Note: giving up. No other thread can stop a hanging loader, but Python raises an exception in a thread as soon as the
thread returns from a wait (`PyThreadState_SetAsyncExc`). So a thread that the pool has given up on finds
`LoaderInterrupt` raised in the user's code: at once where the code runs Python, never where the code hangs in a system
call. In the second case the pool abandons the thread: the pool no longer counts the thread inside the capture gate, so other
trials go on, and the thread ends on its return, if ever. Before ending, the thread waits until the trial's memory has been
given back, so two threads never work on the trial at once.

Note: races. The clock's lock decides whether a draw is over and whether the draw has been given up on, so no thread is
interrupted in the pool's own code. An exception pending at the end of the draw is cancelled, and raised by the clock
instead. An exception that arrives as the clock's exit begins is raised there, before the exit has done anything, so
`TrialDataFeed` enters the clock twice, and the other exit ends the draw. The pool's lock comes before the clock's.
"""

import ctypes
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Self

from hydra_tune.shard.capture.capture_lock import GATE


class LoaderInterrupt(BaseException):
    """Raised in a loader whose trial no longer waits for the loader."""


class _SettlingInterrupt(BaseException):
    """Raised by a thread in itself; see `_settle`."""


class DrawClock:
    """The draws of a trial, one at a time.

    Attributes:
        handle, thread: of the present or last draw.
        is_abandoned: whether the last draw has been abandoned, so that its thread holds nothing any more.
        is_in_process: whether captures wait for the draw.
    """

    def __init__(self) -> None:
        self.handle: object = None
        self.thread = 0
        self.is_abandoned = False
        self._lock = threading.Lock()
        # By the clock of `time.monotonic`; None while no draw is under way.
        self._began: float | None = None
        self.is_in_process = False
        self._is_interrupted = False
        self._released = threading.Event()

    def drawing(self, handle: object, *, in_process: bool) -> Self:
        """Return the clock, to be entered around a draw; `in_process` tells whether the draw holds the capture gate."""
        self.handle, self.is_in_process = handle, in_process
        return self

    def __enter__(self) -> None:
        self.thread = threading.get_ident()
        self._began = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # From here on neither `interrupt` nor `abandon` finds a draw, so the flags below no longer change.
        with self._lock:
            self._began = None
        if self._is_interrupted:
            # The exception may not have arrived yet, and must not hit the pool's own code later.
            _interrupt(self.thread, None)
            if self.is_abandoned:
                # The pool is still giving back the trial's memory; returning now would run the trial's code beside
                # that.
                self._released.wait()
            if kind is not LoaderInterrupt:
                raise LoaderInterrupt

    @property
    def seconds(self) -> float:
        """Seconds since the beginning of the present draw; 0 without a draw."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def where(self) -> str:
        """Return the source location of the draw, as "FILE:LINE in FUNCTION"."""
        frame = sys._current_frames().get(self.thread)  # noqa: SLF001 - Python has no other name for it
        if frame is None:
            return "nowhere"
        location = traceback.extract_stack(frame, limit=1)[-1]
        return f"{location.filename}:{location.lineno} in {location.name}"

    def under_way(self) -> "threading.Lock":
        """Return the lock under which draws end; a holder of the lock may read `seconds` and act on the value."""
        return self._lock

    def interrupt(self) -> bool:
        """Raise `LoaderInterrupt` in the draw under way as soon as the draw returns to Python; False if there is no draw."""
        with self._lock:
            if self._began is None:
                return False
            self._is_interrupted = True
            _interrupt(self.thread, LoaderInterrupt)
            return True

    def abandon(self) -> bool:
        """Interrupt the draw under way, and take its thread out of the capture gate; return False if the draw is over.

        A call of `released` must follow once the trial's memory has been given back.
        """
        with self._lock:
            if self._began is None:
                return False
            self._is_interrupted = self.is_abandoned = True
            _interrupt(self.thread, LoaderInterrupt)
            if self.is_in_process:
                GATE.forget(self.thread)
            return True

    def released(self) -> None:
        """Let the abandoned thread end: no other thread touches the trial any more."""
        self._released.set()


def _interrupt(thread: int, exception: type[BaseException] | None) -> None:
    """Raise an exception in a thread, or cancel a pending one (None)."""
    raised = None if exception is None else ctypes.py_object(exception)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)
    if sys.version_info < (3, 13):
        _settle()


def _settle() -> None:
    """Clear the interpreter-wide request to look for an exception, which Python before 3.13 makes to all threads at once.

    The request ends when any thread raises its exception. Until then each thread checks in every loop iteration, and on
    Python 3.11 a function under a profiler or debugger never starts. A thread hanging outside Python would leave the
    request pending for good, and so would a cancelled exception. The other thread makes a new request on return.
    """
    try:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(threading.get_ident()), ctypes.py_object(_SettlingInterrupt)
        )
        # The exception is raised here, in the next iteration or two.
        while True:
            pass
    except _SettlingInterrupt:
        pass
