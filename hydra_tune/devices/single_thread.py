"""`SingleThreadExecutor`: makes calls in order on a thread of its own, with a future for each call.

The threads of a device (`copying.py`), the thread of the disk (`memory/host/disk.py`) and each worker's thread that releases
ended trials (`pool/runtime/worker.py`) are such executors. `pool/dry_run/report.py`, `pool/dry_run/simulator_profile.py` and
`devices/hardware/link.py` make an executor for a single forecast, profile or measurement. The module must not know blocks,
models or trials.

Note: locks. Any thread may call `submit` and `shutdown`, except that `shutdown` waits for the executor's own thread, and so
must not be called there. The executor makes no call with its lock held.

Note: names. `_WAITS` in `train/data/worker_server.py` names `_work` of this file, as a function in which a thread waits.
After a change of one name without the other, workers of loaders start slowly.

Note: end of the program. `concurrent.futures.ThreadPoolExecutor` refuses calls once the main thread has ended, although
a program goes on until its other threads have ended, and one of these may be waiting for a pool's trials. The thread
here takes calls until `shutdown`.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class SingleThreadExecutor:
    """A thread for calls in order; started at the first call. `with` ends the thread.

    Args:
        begin: called on the thread before the first call. An error goes to the call, and the next call calls `begin` again.
            None: nothing is called.
    """

    def __init__(self, name: str, begin: Callable[[], None] | None = None) -> None:
        self._name = name
        self._begin = begin
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Make a call after all earlier calls.

        Raises:
            RuntimeError: after `shutdown`.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"thread {self._name} has ended and takes no further calls")
            self._calls.put((future, function))
            if self._thread is None:
                # A daemon: the interpreter waits for other threads before pools that are still open are shut down.
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
        return future

    def shutdown(self, *, cancel_futures: bool = False) -> None:
        """Finish all calls, or with `cancel_futures` the running call alone, and wait for the end of the thread."""
        with self._lock:
            self._is_closed = True
            while cancel_futures and not self._calls.empty():
                if (call := self._next()) is not None:
                    call[0].cancel()
            self._calls.put(None)
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        try:
            return self._calls.get_nowait()
        except queue.Empty:  # the thread was faster
            return None

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            self._make(*call)
            del call  # else the call's tensors would live until the next call arrives

    def _make(self, future: Future[T], function: Callable[[], T]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            if self._begin is not None:
                self._begin()
                self._begin = None
            result = function()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the caller gets it
            future.set_exception(error)
            # The error's traceback holds this frame, and the future the error.
            del future, function
        else:
            future.set_result(result)
