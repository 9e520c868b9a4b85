"""Ctrl-C and SIGTERM: the first ends the sweep in order, the second ends the process, and so does too long an order.

Note: who listens. Python runs the handler of a signal in the main thread, between two of its bytecodes, and that thread may be
stuck in somebody's code. So the system's side of each signal also writes to a pipe, and a thread that does nothing else
reads it: it counts, looks at the clock, and ends the process if it has to.
"""

import contextlib
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
"""What the second signal waits at most for, so that no trial is left that seems to run: noting it takes milliseconds."""
_CLOSED = 0  # no signal has this number


class Stop:
    """What signals have asked for.

    Args:
        within_seconds: from the first signal to the end of the process.
        on_first: called in the main thread; must not block.
        first_words: called from another thread after the first signal, with its name.
        last_words: called from there right before the process ends out of order, with why.

    Attributes:
        number: the first signal; None as long as there was none.
        settled: set when the process may end at any moment, as far as others are concerned that think it runs.
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
        """The signals' handler, in the main thread. The second is the other thread's matter."""
        if self.number is None:
            self.number = number
            self._on_first()
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated

    def watch(self, pipe: socket.socket) -> None:
        """Read signals from a pipe until it is closed; the body of a thread."""
        first = _next(pipe, None)
        if first == _CLOSED or first is None:
            return
        name, deadline = signal.Signals(first).name, time.monotonic() + self._within_seconds
        with contextlib.suppress(Exception):  # nobody may be there any more to hear them
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
            with contextlib.suppress(Exception):  # they end by themselves as well, some seconds later
                for child in multiprocessing.active_children():
                    child.kill()
            with contextlib.suppress(Exception):  # whatever is wrong with the terminal, the process ends
                self._last_words(why)
        finally:
            marks = here()
            if marks is not None:
                marks.end(128 + number)
            os._exit(128 + number)


def _next(pipe: socket.socket, deadline: float | None) -> int | None:
    """The next of the signals that are meant; None if none came in time."""
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([pipe], [], [], left)[0]:
            return None
        (number,) = pipe.recv(1)
        marks = here()
        if marks is not None and number in SIGNALS:
            marks.hear()
        if number in (*SIGNALS, _CLOSED):
            return int(number)


_listening = False


def _in_child() -> None:
    """A forked process has its parent's handlers, and would write its own signals to its parent's pipe."""
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
) -> Iterator[Stop]:
    """Within the block, the first signal raises, and what follows ends the process: the second, and the time that is given.

    Outside the main thread, to which signals come, it does nothing.

    Args:
        within_seconds: as of `Stop`.
        on_first: as of `Stop`.
        first_words: as of `Stop`.
        last_words: as of `Stop`.

    Raises:
        KeyboardInterrupt: Ctrl-C, from anywhere in the block.
        Terminated: SIGTERM, likewise.
    """
    global _listening  # noqa: PLW0603 - a process has one set of handlers
    stop = Stop(within_seconds, on_first, first_words, last_words)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    thread = threading.Thread(target=stop.watch, args=(reading,), name="hydra-signals", daemon=True)
    thread.start()
    pipe_before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    before = {number: signal.signal(number, stop.handle) for number in SIGNALS}
    _listening = True
    try:
        yield stop
    finally:
        _listening = False
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(pipe_before)
        writing.send(bytes([_CLOSED]))
        thread.join()
        reading.close()
        writing.close()
