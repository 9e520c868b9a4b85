"""The copy thread that every device has."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class CopyThread:
    """One thread that owns a device's host memory and does its copies, in order.

    Args:
        name: of the device, for the thread's name.
        setup: run once on the thread, e.g. to choose the CUDA device.
    """

    def __init__(self, name: str, setup: Callable[[], None] | None = None) -> None:
        def start() -> None:
            torch.set_num_threads(1)
            if setup is not None:
                setup()

        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"hydra-copy-{name}", initializer=start)

    def run(self, function: Callable[[], T]) -> T:
        """Run a function on the thread; returns its result or raises its exception."""
        return self._pool.submit(function).result()

    def throttled(self, function: Callable[[], None], nbytes: int, bytes_per_second: float) -> None:
        """Run a copy on the thread, and keep the thread for as long as a link of this speed would need."""

        def run() -> None:
            start = time.perf_counter()
            function()
            time.sleep(max(0.0, start + nbytes / bytes_per_second - time.perf_counter()))

        self.run(run)

    def close(self) -> None:
        """Finish what was asked for and end the thread."""
        self._pool.shutdown(wait=True)
