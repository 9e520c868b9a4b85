"""A thread that does something every now and then, and takes little of the machine."""

import contextvars
import logging
import threading
import time
from collections.abc import Callable

_PERIOD_SECONDS = 0.5
_SHARE = 0.005
_MOST_SECONDS = 2.5

_LOGGER = logging.getLogger(__name__)


class Ticker:
    """Calls a function until it is stopped, often, but for no more than half a per cent of this process's CPU time.

    So what is shown costs training next to nothing, however much there is to show and however slow the machine is. At least
    every 2.5 s it is called.

    Args:
        function: what to call. If it raises, it is not called again.
        on_error: called then, on the same thread.
        period_seconds: between the calls, at least.
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
        # What is printed in a notebook finds its cell by the context.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="hydra-view", daemon=True)

    def start(self) -> None:
        """Begin; the first call is after a period."""
        self._thread.start()

    def stop(self) -> None:
        """Call it no more, and wait for the call under way."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        called, spent, cpu = time.monotonic(), 0.0, time.process_time()
        while not self._over.wait(self._period_seconds):
            used = time.process_time() - cpu
            if spent > _SHARE * used and time.monotonic() - called < _MOST_SECONDS:
                continue
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
