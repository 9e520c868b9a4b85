"""A thread that calls a function regularly at a small share of the CPU.

`LiveView` (`terminal.py`), `NotebookView` (`notebook.py`) and `PlainView` (`plain_lines.py`) refresh themselves with a
`ViewRefreshTimer` while a sweep is shown. An error of the function must not reach training: the error ends the calls.
"""

import contextvars
import logging
import threading
import time
from collections.abc import Callable

_PERIOD_SECONDS = 0.5
_SHARE = 0.005
_MOST_SECONDS = 2.5

_LOGGER = logging.getLogger(__name__)


class ViewRefreshTimer:
    """Calls a function regularly, mostly within half a per cent of this process's CPU time, until stopped.

    The limit keeps the cost to training negligible, however large the view and however slow the machine. Where the limit
    would delay a call longer, the call comes at the first look after 2.5 s.

    Args:
        function: the function to call, on the timer's thread. An error ends the calls, and goes to the log.
        on_error: called after an error, on the same thread.
        period_seconds: shortest time between a call's end and the next call.

    Attributes:
        cpu_seconds: CPU time of the timer's thread up to the last call.
    """

    def __init__(
        self,
        function: Callable[[], object],
        *,
        on_error: Callable[[], object] | None = None,
        period_seconds: float = _PERIOD_SECONDS,
    ) -> None:
        self.cpu_seconds = 0.0
        self._function = function
        self._on_error = on_error
        self._period_seconds = period_seconds
        self._over = threading.Event()
        # Output in a notebook finds its cell by the context.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="hydra-view", daemon=True)

    def start(self) -> None:
        """Start the thread; the first call comes after one period."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the calls, and wait for a call under way."""
        self._over.set()
        # A thread that was never started cannot be joined.
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        called, spent, cpu = time.monotonic(), 0.0, time.process_time()
        while not self._over.wait(self._period_seconds):
            # Both are CPU times: of the whole process since the last call, and of the last call alone.
            used = time.process_time() - cpu
            if spent > _SHARE * used and time.monotonic() - called < _MOST_SECONDS:
                continue
            # `thread_time`, because `process_time` counts the training threads beside the function, too.
            called, cpu, before = time.monotonic(), time.process_time(), time.thread_time()
            try:
                self._function()
            except Exception as error:  # noqa: BLE001 - whatever is wrong with the view is not wrong with the training
                if self._on_error is not None:
                    self._on_error()
                _LOGGER.warning("the live view ends here, and training goes on without it: %r", error)
                return
            self.cpu_seconds = time.thread_time()
            spent = self.cpu_seconds - before
