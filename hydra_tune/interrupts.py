"""Ctrl-C and SIGTERM where the code can stand them, and not in the middle of a decision or a write.

Python raises `KeyboardInterrupt` between any two bytecodes of the main thread. Raised between asking for a trial and noting
it down, it leaves a trial that seems to run for ever; raised inside the scheduler, it leaves half a decision. Code that must
not be cut short holds interrupts back, and opens windows where it waits or runs somebody else's code. SIGTERM ends a Python
program on the spot; where it is to end it in order instead, it raises `Terminated`, and waits like Ctrl-C.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE = 3
"""The signal that gets through even where they are held back: what is protected may itself be stuck."""


class Terminated(SystemExit):
    """What SIGTERM raises where it ends the program in order; uncaught, the exit code is 143, as shells have it."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


def is_interrupt(error: BaseException | None) -> bool:
    """Whether it is Ctrl-C or SIGTERM that has raised this."""
    return isinstance(error, KeyboardInterrupt | Terminated)


class _Holder:
    """The signals' handler while they are held. Only the main thread enters, leaves and handles signals."""

    def __init__(self) -> None:
        self.depth = 0
        self.is_open = False
        self.pressed: list[int] = []
        self._before: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def enter(self) -> bool:
        """Hold from now on; returns whether interrupts got through until now although a block around holds them."""
        was_open, self.is_open = self.is_open, False
        if self.depth == 0:
            self.pressed = []
            self._before = {}
            for number in SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):  # else it is ignored, or ends the process whatever is done here
                    self._before[number] = handler
                    signal.signal(number, self._handle)
        self.depth += 1
        return was_open

    def leave(self, *, to_open: bool) -> None:
        self.depth -= 1
        self.is_open = to_open
        if self.depth == 0:
            for number, handler in self._before.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, handler)
        if self.depth == 0 or to_open:
            self.pass_on()

    def pass_on(self) -> None:
        """Hand a held-back signal to whom it was meant for, who as a rule raises."""
        if self.pressed:
            number, self.pressed = self.pressed[0], []
            self._before[number](number, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.pressed.append(number)
        if not self.is_open and len(self.pressed) < _PATIENCE:
            return
        # Closed here, and not where the exception is caught: the next one may come before that.
        self.is_open, self.pressed = False, []
        self._before[number](number, frame)


_holder = _Holder()


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Within the block, or the decorated function, SIGINT and SIGTERM wait; at its end the first of them is raised, once.

    Blocks nest: within one that holds them, they go on waiting. A third gets through at once. Does nothing for a signal that
    is ignored or that no handler in Python takes, and outside the main thread, which is the only one that they interrupt.

    Raises:
        KeyboardInterrupt: at the end, or what the program's own handler of the signal does instead.
        Terminated: the same, for SIGTERM.
    """
    if not _is_main():
        yield
        return
    was_open = _holder.enter()
    try:
        yield
    except (KeyboardInterrupt, Terminated):
        _holder.pressed, was_open = [], False  # it is being raised already
        raise
    finally:
        _holder.leave(to_open=was_open)


@contextmanager
def let_interrupts_through() -> Iterator[None]:
    """Within the block, they are raised at once again, even if they are held around; for waits and the user's own code.

    Raises:
        KeyboardInterrupt: at the start, if one was held back, or from anywhere in the block.
        Terminated: the same, for SIGTERM.
    """
    if not _is_main() or _holder.depth == 0:
        yield
        return
    _holder.is_open = True
    try:
        _holder.pass_on()
        yield
    finally:
        _holder.is_open = False


@contextmanager
def ends_in_order() -> Iterator[None]:
    """Within the block, the first SIGTERM raises `Terminated`, and the second ends the process at once, as it does by itself.

    Does nothing where the program has a handler of its own or ignores the signal, and outside the main thread.

    Raises:
        Terminated: from anywhere in the block.
    """
    if not _is_main() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def handle(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise Terminated

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        if _is_main() and signal.getsignal(signal.SIGTERM) is handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
