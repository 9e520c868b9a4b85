"""The copy threads that every device has: one that somebody always waits for, and some for copies in the background.

Beside them is a thread for work on the host that goes on while the device computes (`HostThread`).

Note: copies in the background. What is waited for anyway (`CopyThread`) never stands in line behind what is not: background
copies have threads of their own, one for each direction that the device can copy in at once, and the copies of a direction
are made in the order in which they were asked for. The copy owns its tensors until it is over, and lets go of them before it
says so: whoever frees memory after that frees it really. A thread that copies takes no lock of anybody's, so a copy ends
whatever its waiters hold.
"""

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Source and target of each copy."""


class CopyThread:
    """One thread that owns a device's host memory and does its copies, in order.

    Args:
        name: of the device, for the thread's name.
        setup: run once on the thread, e.g. to choose the CUDA device.
    """

    def __init__(self, name: str, setup: Callable[[], None] | None = None) -> None:
        self._pool = ThreadPoolExecutor(1, f"hydra-copy-{name}", initializer=_start, initargs=(setup,))

    def run(self, function: Callable[[], T]) -> T:
        """Run a function on the thread; returns its result or raises its exception.

        The thread has let go of the function by then, and of the tensors that it holds: whoever frees them frees them really.
        """
        held = [function]

        def run() -> T:
            return held.pop()()

        return self._pool.submit(run).result()

    def close(self) -> None:
        """Finish what was asked for and end the thread."""
        self._pool.shutdown(wait=True)


class Copy:
    """A copy in the background.

    Args:
        pairs: what to copy; held until it is over.

    Attributes:
        began_ns, ended_ns: when it was made, by the clock of `time.perf_counter_ns`; 0 until then.
    """

    def __init__(self, pairs: Pairs) -> None:
        self.began_ns = 0
        self.ended_ns = 0
        self._pairs = pairs
        self._future: Future[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether it is done, has failed, or will never begin."""
        assert self._future is not None
        return self._future.done()

    def cancel(self) -> bool:
        """Have it never begin; False if it has, and has to be waited for."""
        assert self._future is not None
        if not self._future.cancel():
            return False
        self._pairs = ()
        return True

    def wait(self) -> None:
        """Wait until it is over; raises what it has raised."""
        assert self._future is not None
        self._future.result()

    def wait_quietly(self) -> bool:
        """Wait until it is over, however it ends; returns whether it was made."""
        assert self._future is not None
        return self._future.exception() is None

    def start(self, pool: ThreadPoolExecutor, make: Callable[[Pairs], None]) -> None:
        """Have it made on a thread, after what was asked for before."""
        self._future = pool.submit(self._run, make)

    def _run(self, make: Callable[[Pairs], None]) -> None:
        pairs, self._pairs = self._pairs, ()
        self.began_ns = time.perf_counter_ns()
        try:
            make(pairs)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # which hold the tensors
            raise
        finally:
            self.ended_ns = time.perf_counter_ns()
            del pairs


class BackgroundCopies:
    """One thread whose copies nobody waits for, unless he needs just that one.

    Args:
        name: of the device, for the thread's name.
        setup: run once on the thread.
    """

    def __init__(self, name: str, setup: Callable[[], None] | None = None) -> None:
        self._pool = ThreadPoolExecutor(1, f"hydra-ahead-{name}", initializer=_start, initargs=(setup,))

    def start(self, pairs: Pairs, make: Callable[[Pairs], None]) -> Copy:
        """Copy some pairs when all that was asked for before is over; `make` returns when they are copied."""
        copy = Copy(pairs)
        copy.start(self._pool, make)
        return copy

    def close(self) -> None:
        """Finish what has begun, forget the rest, and end the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class HostThread:
    """One thread that computes on the host while its device goes on; made when it is first asked.

    Args:
        name: of the device, for the thread's name.
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, f"hydra-host-{name}", initializer=_start, initargs=(None,))

    def start(self, function: Callable[[], None]) -> Future[None]:
        """Have a function run after those that were asked for before."""
        return self._pool.submit(function)

    def close(self) -> None:
        """Finish what was asked for and end the thread."""
        self._pool.shutdown(wait=True)


class Link:
    """A link of a given bandwidth, which one copy has at a time; one that is waited for goes first.

    Args:
        bytes_per_second: what it takes.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._changed = threading.Condition()
        self._is_busy = False
        self._num_waited_for = 0

    def send(self, copy: Callable[[], None], nbytes: int, *, is_waited_for: bool) -> None:
        """Make a copy, and have the link for as long as that many bytes need."""
        with self._changed:
            self._num_waited_for += is_waited_for
            self._changed.wait_for(lambda: not self._is_busy and (is_waited_for or not self._num_waited_for))
            self._is_busy = True
        try:
            start = time.perf_counter()
            copy()
            time.sleep(max(0.0, start + nbytes / self._bytes_per_second - time.perf_counter()))
        finally:
            with self._changed:
                self._is_busy = False
                self._num_waited_for -= is_waited_for
                self._changed.notify_all()


def _start(setup: Callable[[], None] | None) -> None:
    torch.set_num_threads(1)
    if setup is not None:
        setup()
