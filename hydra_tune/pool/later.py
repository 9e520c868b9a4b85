"""A thread that does what others have no time for."""

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

import torch

_LOGGER = logging.getLogger(__name__)
_END_SECONDS = 5.0  # for which its end is waited for: it may hang in a user's code


class Later:
    """Calls that are made one after the other, on a thread that is there from the first one on.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def do(self, call: Callable[[], None], seconds: float = 0.0) -> None:
        """Make a call, in so many seconds or when those before it are over; after `close`, never."""
        with self._changed:
            if self._is_closed:
                return
            heapq.heappush(self._calls, (time.monotonic() + seconds, next(self._numbers), call))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def is_at_work_on(self, thread: int) -> bool:
        """Whether calls are made on this thread."""
        return self._thread is not None and self._thread.ident == thread

    def replace(self, thread: int) -> None:
        """A thread here hangs in its call: another makes the next ones, and it ends should it come back."""
        with self._changed:
            if self.is_at_work_on(thread) and not self._is_closed:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Make no more calls, and wait for the one under way, though not for ever."""
        with self._changed:
            self._is_closed = True
            self._calls.clear()
            self._changed.notify_all()
        if self._thread not in (None, threading.current_thread()):
            assert self._thread is not None
            self._thread.join(_END_SECONDS)

    def _work(self) -> None:
        torch.set_num_threads(1)
        while (call := self._next()) is not None:
            try:
                call()
            except Exception:
                _LOGGER.exception("%s: a call has failed", self._name)
            del call
            if threading.current_thread() is not self._thread:
                return

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._is_closed:
                left = self._calls[0][0] - time.monotonic() if self._calls else None
                if left is not None and left <= 0:
                    return heapq.heappop(self._calls)[2]
                self._changed.wait(left)
        return None
