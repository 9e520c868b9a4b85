"""A background thread for calls that other threads have no time for, or must not make under a lock.

`FusedJobTable` (`pool/fusion/job_table.py`) keeps two queues: `building` for a job that joins a running group, for a
plan of another group size or for timing smaller groups, and `timer` for a call into the pool that has to wait or must
not hold the lock. `LiveGroup` (`pool/fusion/live_group.py`), `GroupJobLauncher` (`pool/fusion/group_jobs.py`),
`GroupEndHandler` (`pool/fusion/group_completion.py`) and `FusedPool` (`pool/fusion/fused_pool.py`)
queue the calls. `_DrawingFusedJob` (`pool/fusion/group_loaders.py`) replaces the `building`
thread where a joining trial's loader hangs. An error of a call goes to the log, and the queue goes on.

Note: locks. A caller of `do` may hold the pool's lock, which comes before the queue's lock. The thread holds no lock
while a call runs. `close` waits for the thread up to `_END_SECONDS`, so its caller must not hold the pool's lock.
"""

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

import torch

_LOGGER = logging.getLogger(__name__)
_END_SECONDS = 5.0  # longest wait for the thread's end: a call may hang in a user's code


class BackgroundCallQueue:
    """A queue of calls on a thread of its own, started when the first call is queued."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def do(self, call: Callable[[], None], seconds: float = 0.0) -> None:
        """Queue a call, due `seconds` from now, behind calls that are due earlier; after `close`, drop the call."""
        with self._changed:
            if self._is_closed:
                return
            # The number keeps calls of equal times in order, and keeps `heapq` from comparing functions.
            heapq.heappush(self._calls, (time.monotonic() + seconds, next(self._numbers), call))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def is_at_work_on(self, thread: int) -> bool:
        """Return whether the given thread is the present thread of the queue."""
        return self._thread is not None and self._thread.ident == thread

    def replace(self, thread: int) -> None:
        """Start a new thread in place of a thread that hangs in a call; the old thread ends if its call returns.

        Do nothing if the given thread is not the present thread, or the queue is closed.
        """
        with self._changed:
            if self.is_at_work_on(thread) and not self._is_closed:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Drop all queued calls, and wait at most a few seconds for the running call, unless that call closes the queue."""
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
            # The thread serves all jobs, and the caller of `do` is gone: the log is the only place for the error.
            except Exception:
                _LOGGER.exception("%s: a call has failed", self._name)
            # Otherwise the call's arguments, a model among them, would live until the next call.
            del call
            # The thread was replaced while its call hung, and the replacement serves the queue.
            if threading.current_thread() is not self._thread:
                return

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._is_closed:
                wait_seconds = self._calls[0][0] - time.monotonic() if self._calls else None
                if wait_seconds is not None and wait_seconds <= 0:
                    return heapq.heappop(self._calls)[2]
                self._changed.wait(wait_seconds)
        return None
