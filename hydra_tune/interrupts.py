"""Ctrl-C where the code can stand it, and not in the middle of a decision or a write.

Python raises `KeyboardInterrupt` between any two bytecodes of the main thread. Raised between asking for a trial and noting
it down, it leaves a trial that seems to run for ever; raised inside the scheduler, it leaves half a decision. Code that must
not be cut short holds interrupts back, and opens windows where it waits or runs somebody else's code.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_PATIENCE = 3
"""The press of Ctrl-C that gets through even where it is held back: what is protected may itself be stuck."""


class _Holder:
    """The signal handler while interrupts are held. Only the main thread enters, leaves and handles signals."""

    def __init__(self) -> None:
        self.depth = 0
        self.is_open = False
        self.pressed = 0
        self._before: object = None

    def enter(self) -> bool:
        """Hold from now on; returns whether interrupts got through until now although a block around holds them."""
        was_open, self.is_open = self.is_open, False
        if self.depth == 0:
            self.pressed = 0
            self._before = signal.getsignal(signal.SIGINT)
            if callable(self._before):
                signal.signal(signal.SIGINT, self._handle)
        self.depth += 1
        return was_open

    def leave(self, *, to_open: bool) -> None:
        self.depth -= 1
        self.is_open = to_open
        if self.depth == 0 and callable(self._before) and signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, self._before)
        if self.depth == 0 or to_open:
            self.pass_on()

    def pass_on(self) -> None:
        """Hand a held-back interrupt to whom it was meant for, who as a rule raises."""
        if self.pressed and callable(self._before):
            self.pressed = 0
            self._before(signal.SIGINT, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.pressed += 1
        if not self.is_open and self.pressed < _PATIENCE:
            return
        # Closed here, and not where the exception is caught: the next interrupt may come before that.
        self.is_open, self.pressed = False, 0
        assert callable(self._before)
        self._before(number, frame)


_holder = _Holder()


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Within the block, or the decorated function, SIGINT waits; at its end it is raised, once.

    Blocks nest: within one that holds it, it goes on waiting. A third SIGINT gets through at once. Does nothing where
    SIGINT is ignored, and outside the main thread, which is the only one that SIGINT interrupts.

    Raises:
        KeyboardInterrupt: at the end, or what the program's own handler of SIGINT does instead.
    """
    if not _is_main():
        yield
        return
    was_open = _holder.enter()
    try:
        yield
    except KeyboardInterrupt:
        _holder.pressed, was_open = 0, False  # it is being raised already
        raise
    finally:
        _holder.leave(to_open=was_open)


@contextmanager
def let_interrupts_through() -> Iterator[None]:
    """Within the block, SIGINT is raised at once again, even if it is held around; for waits and for the user's own code.

    Raises:
        KeyboardInterrupt: at the start, if one was held back, or from anywhere in the block.
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
