"""Ctrl-C, once, twice and three times."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_INSIST = 3


@contextmanager
def interrupts(on_first: Callable[[], None]) -> Iterator[None]:
    """Within the block, the first Ctrl-C calls `on_first` and raises KeyboardInterrupt, the second does nothing.

    People press it twice, and the second would cut short the work that the first began: to tell trials that they have
    failed, and to wait for the units still running. The third raises again.

    Args:
        on_first: called in the main thread; must not block.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread is given signals
        yield
        return
    count = 0

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count == 1:
            on_first()
        if count == 1 or count >= _INSIST:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
