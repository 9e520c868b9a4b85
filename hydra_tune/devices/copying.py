"""Copy threads of a device: a thread for host memory and awaited copies, and threads for background copies.

In addition, a `HostComputeThread` computes on the host while the device computes, for updates on the host
(`train/state/host_optimizer.py`). `CpuDevice` (`cpu.py`) and `CudaDevice` (`cuda.py`) make the threads when a device is
opened. `CudaDevice` makes the pager's awaited copies on the `AwaitedCopyThread`; `CpuDevice` makes such copies on the
waiting thread, and only host memory on the `AwaitedCopyThread`. Both make the background copies for `memory/prefetch.py` on
a `BackgroundCopyThread`; `weightless.py` derives copies of a forecast from `BackgroundCopy`. `CpuDevice` and the planner
(`planner/run/copy_engine.py`) send copies over a `SimulatedLink`, and fused steps (`fusion/runtime/step_arguments.py`,
`fusion/group/multi_step_unit.py`) bring small tensors to a GPU by `sent`. The module must not know blocks, models or trials.

Note: background copies. An awaited copy never queues behind a background copy that has not begun: background copies have
threads of their own, a thread for each direction in which the device can copy at the same time. Copies of the same
direction run in the order of the requests. A copy holds references to its tensors until its end, and drops the
references before it reports the end, so a caller who then drops its own references really frees the memory. The thread
of a background copy takes no other component's lock, so such a copy ends no matter which locks its waiters hold.
"""

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from hydra_tune.devices.single_thread import SingleThreadExecutor

T = TypeVar("T")

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Source and target of each copy."""


class AwaitedCopyThread:
    """A thread that allocates a device's host memory and, of a GPU, makes awaited copies; all requests run in order.

    `setup` runs once on the thread, e.g. to choose the CUDA device.
    """

    def __init__(self, name: str, setup: Callable[[], None] | None = None) -> None:
        self._pool = SingleThreadExecutor(f"hydra-copy-{name}", partial(_start, setup))

    def run(self, function: Callable[[], T]) -> T:
        """Run a function on the thread; return the result or raise the exception.

        On return, the thread no longer refers to the function or to its tensors, so the caller can really free the
        tensors.
        """
        # `pop` hands the only reference over: the executor's work item may outlive `result()` and would keep the
        # tensors alive.
        last_reference = [function]

        def run() -> T:
            return last_reference.pop()()

        return self._pool.submit(run).result()

    def close(self) -> None:
        """Finish all requests and end the thread."""
        self._pool.shutdown()


class BackgroundCopy:
    """A background copy, which holds its tensors until its end.

    Attributes:
        began_ns, ended_ns: begin and end of the copy, by the clock of `time.perf_counter_ns`; 0 before.
    """

    def __init__(self, pairs: Pairs) -> None:
        self.began_ns = 0
        self.ended_ns = 0
        self._pairs = pairs
        self._future: Future[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether the copy is done, has failed, or will never begin."""
        assert self._future is not None
        return self._future.done()

    def cancel(self) -> bool:
        """Cancel the copy before its begin; return False for a copy that has begun, and has to be awaited."""
        assert self._future is not None
        if not self._future.cancel():
            return False
        self._pairs = ()
        return True

    def wait(self) -> None:
        """Wait for the end of the copy; raise the copy's exception, if any."""
        assert self._future is not None
        self._future.result()

    def wait_quietly(self) -> bool:
        """Wait for the end of the copy without raising; return whether the copy was made."""
        assert self._future is not None
        try:
            return self._future.exception() is None
        except CancelledError:  # still queued when the thread of copies was closed
            return False

    def start(self, pool: SingleThreadExecutor, make: Callable[[Pairs], None]) -> None:
        """Queue the copy on a thread, after all earlier requests."""
        self._future = pool.submit(partial(self._run, make))

    def _run(self, make: Callable[[Pairs], None]) -> None:
        # The references have to be gone before the future is done (note above).
        pairs, self._pairs = self._pairs, ()
        self.began_ns = time.perf_counter_ns()
        try:
            make(pairs)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # the frames hold the tensors
            raise
        finally:
            self.ended_ns = time.perf_counter_ns()
            del pairs


class BackgroundCopyThread:
    """A thread for copies that nobody waits for, except a caller in need of a particular copy."""

    def __init__(self, name: str, setup: Callable[[], None] | None = None) -> None:
        self._pool = SingleThreadExecutor(f"hydra-ahead-{name}", partial(_start, setup))

    def start(self, pairs: Pairs, make: Callable[[Pairs], None]) -> BackgroundCopy:
        """Copy pairs after all earlier requests; `make` returns when the pairs are copied."""
        copy = BackgroundCopy(pairs)
        copy.start(self._pool, make)
        return copy

    def close(self) -> None:
        """Finish the running copy, drop the others, and end the thread."""
        self._pool.shutdown(cancel_futures=True)


class HostComputeThread:
    """A thread that computes on the host beside its device."""

    def __init__(self, name: str) -> None:
        self._pool = SingleThreadExecutor(f"hydra-host-{name}", partial(_start, None))

    def start(self, function: Callable[[], None]) -> Future[None]:
        """Run a function after all earlier functions."""
        return self._pool.submit(function)

    def close(self) -> None:
        """Finish all requests and end the thread."""
        self._pool.shutdown()


class SimulatedLink:
    """A simulated link of limited bandwidth for one copy at a time; awaited copies go first."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._changed = threading.Condition()
        self._is_busy = False
        self._num_waited_for = 0

    def send(self, copy: Callable[[], object], nbytes: int, *, is_waited_for: bool) -> None:
        """Make a copy, and occupy the link for as long as `nbytes` take at the link's bandwidth."""
        with self._changed:
            # Counted before the wait: from now on, no background copy may begin before this copy.
            self._num_waited_for += is_waited_for
            self._changed.wait_for(lambda: not self._is_busy and (is_waited_for or not self._num_waited_for))
            self._is_busy = True
        try:
            start = time.perf_counter()
            copy()
            # The time of the real copy counts, so only the rest is slept.
            time.sleep(max(0.0, start + nbytes / self._bytes_per_second - time.perf_counter()))
        finally:
            with self._changed:
                self._is_busy = False
                self._num_waited_for -= is_waited_for
                self._changed.notify_all()


def _start(setup: Callable[[], None] | None) -> None:
    # A copy on several intra-op threads would take cores from the devices' workers.
    torch.set_num_threads(1)
    if setup is not None:
        setup()


def sent(tensor: Tensor, place: torch.device) -> Tensor:
    """Return a tensor on the computing device, for later work on the device; the host does not wait.

    A GPU copies only pinned memory asynchronously, in order with its queued work. Torch's allocator for pinned memory
    tracks the copy and does not reuse the memory before the copy has finished.
    """
    if place.type == "cpu" or tensor.device == place:
        return tensor
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(place, non_blocking=True)
