"""Ctrl-C and SIGTERM: the first signal ends the sweep in order; a second signal or a timeout ends the process out of order.

`run_sweep` (`sweep_run.py`) enters `stops` just before the tuner runs, and leaves `stops` once the pool is shut down. A
sweep on a Ray cluster (`cluster.py`) runs without `stops`.

Note: the listener. Python runs a signal's handler in the main thread, between two bytecodes, and the main thread may be
stuck in user code. So the system's side of each signal also writes to a pipe. A dedicated thread reads the pipe,
watches the clock, and ends the process if necessary. The thread must take no lock that the main thread may hold.
"""

import contextlib
import math
import multiprocessing
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from hydra_tune.interrupts import SIGNALS, Terminated
from hydra_tune.supervision.marks import here

_SETTLING_SECONDS = 1.0
"""Longest wait of the second signal for the storage: recording the end of the running trials takes milliseconds."""
_CLOSED = 0  # no signal has this number


class StopSignalHandler:
    """The first signal, and the reaction to signals.

    Args:
        within_seconds: longest time from the first signal to the end of the process.
        on_first: called in the main thread; must not block.
        first_words: called in the listening thread after the first signal, with the signal's name.
        last_words: called in the listening thread right before the process ends out of order, with the reason.

    Attributes:
        number: the first signal; None before any signal.
        settled: set when the process may end at any moment without leaving trials that seem to run.
    """

    def __init__(
        self,
        within_seconds: float,
        on_first: Callable[[], None],
        first_words: Callable[[str], None],
        last_words: Callable[[str], None],
    ) -> None:
        self.number: int | None = None
        self.settled = threading.Event()
        self._within_seconds = within_seconds
        self._on_first = on_first
        self._first_words = first_words
        self._last_words = last_words

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal in the main thread; the listening thread handles the second signal."""
        if self.number is None:
            self.number = number
            # Noted before the exception, which may be caught far away, or not at all.
            self._on_first()
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated

    def watch(self, pipe: socket.socket) -> None:
        """Read signals from a pipe until `_CLOSED`, or end the process; the body of the listening thread."""
        first = _next(pipe, None)
        if first == _CLOSED or first is None:
            return
        name, deadline = signal.Signals(first).name, time.monotonic() + self._within_seconds
        with contextlib.suppress(Exception):  # the output may be gone
            self._first_words(name)
        second = _next(pipe, deadline)
        if second == _CLOSED:
            return
        if second is None:
            self._end(first, f"not over {self._within_seconds:g} s after {name}, and ended now")
        else:
            self.settled.wait(min(_SETTLING_SECONDS, max(0.0, deadline - time.monotonic())))
            self._end(second, f"ended at once by {signal.Signals(second).name}, the second signal")

    def _end(self, number: int, why: str) -> None:
        try:
            with contextlib.suppress(Exception):  # workers also end by themselves, some seconds later
                for child in multiprocessing.active_children():
                    child.kill()
            with contextlib.suppress(Exception):  # the process must end, whatever is wrong with the terminal
                self._last_words(why)
        finally:
            marks = here()
            if marks is not None:
                # Tells a supervisor that this end is no crash, so that the sweep is not begun again.
                marks.end(128 + number)
            # Not sys.exit: the main thread may hang, and exit handlers would wait for it.
            os._exit(128 + number)


def _next(pipe: socket.socket, deadline: float | None) -> int | None:
    """Wait for the next signal of `SIGNALS`, or for `_CLOSED`; None at the deadline."""
    # `select.select` refuses descriptors from 1024 on, which a program with many open files gets.
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while True:
        remaining_seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not poll.poll(None if remaining_seconds is None else math.ceil(1000 * remaining_seconds)):
            return None
        (number,) = pipe.recv(1)
        marks = here()
        if marks is not None and number in SIGNALS:
            # The supervisor forwards a signal that this process has not counted.
            marks.hear()
        # Every signal with a Python handler writes to the pipe, also a child's end or the user's own signals.
        if number in (*SIGNALS, _CLOSED):
            return int(number)


_listening = False


def _in_child() -> None:
    """Drop the pipe and the handler of SIGTERM in a forked process, whose signals would go to its parent's pipe."""
    if _listening:
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_in_child)


@contextmanager
def stops(
    within_seconds: float,
    on_first: Callable[[], None],
    first_words: Callable[[str], None],
    last_words: Callable[[str], None],
) -> Iterator[StopSignalHandler]:
    """Within the block, raise at the first signal; a second signal or the given time ends the process.

    Does nothing outside the main thread, since only the main thread receives signals. Arguments are as of
    `StopSignalHandler`.

    Raises:
        KeyboardInterrupt: Ctrl-C, from anywhere in the block.
        Terminated: SIGTERM, likewise.
    """
    global _listening  # noqa: PLW0603 - a process has one set of handlers
    stop = StopSignalHandler(within_seconds, on_first, first_words, last_words)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    reading, writing = socket.socketpair()
    # Python writes to the pipe inside the C handler: a full pipe must not block there.
    writing.setblocking(False)
    thread = threading.Thread(target=stop.watch, args=(reading,), name="hydra-signals", daemon=True)
    # Started before the handlers are set, so that the first signal finds a reader.
    thread.start()
    pipe_before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    # A signal that is ignored, as Ctrl-C is in a shell's background jobs, stays so.
    heeded = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop.handle) for number in heeded}
    _listening = True
    try:
        yield stop
    finally:
        _listening = False
        for number, handler in before.items():
            signal.signal(number, handler)
        # Restore the pipe before closing: a late signal must not write to a closed descriptor.
        signal.set_wakeup_fd(pipe_before)
        # Ends the listener, which would wait for a signal for ever.
        writing.send(bytes([_CLOSED]))
        thread.join()
        reading.close()
        writing.close()
