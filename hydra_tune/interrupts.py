"""Delays Ctrl-C and SIGTERM to points where the code can stand an exception.

Python raises `KeyboardInterrupt` between any two bytecodes of the main thread. An interrupt between asking for a trial
and noting the trial leaves a trial that seems to run forever; an interrupt inside the scheduler leaves half a decision.
`OptimizeDriver` (`integrations/hydra_tune_optuna/search/driver.py`) holds interrupts back for a whole search, and opens
windows between events and around the objective and callbacks. `integrations/hydra_tune_optuna/optuna_internals.py` holds
interrupts back in each public method of a trial. `Pool` (`pool/pool.py`) holds interrupts back in each call that decides,
`FusedPool` (`pool/fusion/fused_pool.py`) in `pause`, and `HydraExecutor.run` (`executor.py`) while each task is submitted.
`pool/checkpointing/suspend.py` opens windows while jobs are saved, and `integrations/hydra_tune_optuna/search/checkpoint_gc.py`
around the objective.

SIGTERM ends a Python program on the spot by default; inside `ends_in_order`, which a `with` block of `HydraExecutor` enters,
SIGTERM raises `Terminated`, and `hold_interrupts` delays SIGTERM like Ctrl-C. `hydra-tune sweep` raises `Terminated` by a
handler of its own (`cli/run/interrupt.py`). The module must not import torch, because the supervisor
(`supervision/supervisor.py`) imports the module.

Note: the state belongs to the main thread of the process. In any other thread all contexts here do nothing, so the state has
no lock. A forked process, such as a worker of `multiprocessing.Pool`, holds no interrupts, and SIGTERM ends the process on
the spot unless the program has a handler of its own.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE = 3
"""The number of the signal that gets through a protected section, because the protected code may hang."""


class Terminated(SystemExit):
    """Exception that SIGTERM raises to end the program in order; uncaught, the exit code is 143, as shells expect."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


def is_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C or SIGTERM has raised an error."""
    return isinstance(error, KeyboardInterrupt | Terminated)


class _InterruptHolder:
    """The signal handler while interrupts are held. Only the main thread enters, leaves and handles signals."""

    def __init__(self) -> None:
        self.depth = 0
        self.is_open = False
        self.pressed: list[int] = []
        self._before: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def enter(self) -> bool:
        """Hold interrupts from now on.

        Returns:
            Whether a window was open, so that interrupts got through although an outer block holds interrupts.
        """
        # User code in a window may call critical code again, which must close the window for its own length.
        was_open, self.is_open = self.is_open, False
        if self.depth == 0:
            self.pressed = []
            self._before = {}
            for number in SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):  # else the signal is ignored, or handled outside Python
                    self._before[number] = handler
                    signal.signal(number, self._handle)
        self.depth += 1
        return was_open

    def leave(self, *, to_open: bool) -> None:
        """End a block: restore the handlers after the outermost block, and pass on a signal where the caller can stand one.

        Args:
            to_open: whether the block lies in a window, where signals get through.
        """
        if not self.depth:
            return  # a fork within the block
        self.depth -= 1
        self.is_open = to_open
        if self.depth == 0:
            for number, handler in self._before.items():
                # Code in the block may have installed its own handler: only restore where the handler is still this
                # one.
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, handler)
        # Either the outermost block ends, or the block lies in a window: in both places an exception is allowed.
        if self.depth == 0 or to_open:
            self.pass_on()

    def pass_on(self) -> None:
        """Hand the first held-back signal to its original handler, usually raising."""
        if self.pressed:
            # Clear first: the handler raises, and the signal must not be raised a second time.
            number, self.pressed = self.pressed[0], []
            self._before[number](number, None)

    def release_in_child(self) -> None:
        """Restore the handlers in a forked process, in which no block holds interrupts any more."""
        self.depth, self.is_open, self.pressed = 0, False, []
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.pressed.append(number)
        if not self.is_open and len(self.pressed) < _PATIENCE:
            return
        # Close the window here, not where the exception is caught: the next signal may come before the catch.
        self.is_open, self.pressed = False, []
        self._before[number](number, frame)


# One for the process, which has a single handler for each signal.
_holder = _InterruptHolder()


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Hold SIGINT and SIGTERM within the block or decorated function; at the end the first of them is raised, once.

    Blocks nest: signals wait until the outermost block ends, or until `let_interrupts_through` opens a window. A third signal
    gets through at once. Does nothing for a signal that is ignored or has no handler in Python, and outside the main thread,
    the only thread that signals interrupt.

    Raises:
        KeyboardInterrupt: at the end; the program's own handler of the signal may act otherwise.
        Terminated: the same, for SIGTERM.
    """
    if not _is_main():
        yield
        return
    was_open = _holder.enter()
    try:
        yield
    except (KeyboardInterrupt, Terminated):
        _holder.pressed, was_open = [], False  # already being raised: do not raise again at the end
        raise
    finally:
        _holder.leave(to_open=was_open)


@contextmanager
def let_interrupts_through() -> Iterator[None]:
    """Let interrupts through at once within the block, even inside `hold_interrupts`; for waits and user code.

    Raises:
        KeyboardInterrupt: at the start, if one was held back, or from anywhere in the block.
        Terminated: the same, for SIGTERM.
    """
    if not _is_main() or _holder.depth == 0:
        yield
        return
    was_open, _holder.is_open = _holder.is_open, True
    try:
        # Inside the `try`, because the exception raised here has to close the window.
        _holder.pass_on()
        yield
    finally:
        _holder.is_open = was_open


@contextmanager
def ends_in_order() -> Iterator[None]:
    """Within the block, raise `Terminated` at the first SIGTERM that gets through; the next SIGTERM ends the process at once.

    Does nothing where the program has its own handler or ignores the signal, and outside the main thread.

    Raises:
        Terminated: from anywhere in the block, except where `hold_interrupts` delays the signal.
    """
    if not _is_main() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    signal.signal(signal.SIGTERM, _end_in_order)
    try:
        yield
    finally:
        if _is_main() and signal.getsignal(signal.SIGTERM) is _end_in_order:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end_in_order(number: int, _frame: FrameType | None) -> None:
    # Restored before raising, so that a second SIGTERM kills a program that hangs in its cleanup.
    signal.signal(number, signal.SIG_DFL)
    raise Terminated


def _in_child() -> None:
    """Let signals through in a forked process: whoever forks workers ends each with one SIGTERM, and waits for the end."""
    _holder.release_in_child()
    if signal.getsignal(signal.SIGTERM) is _end_in_order:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
