"""`CpuDevice`: a virtual accelerator on the CPU, with its own memory budget and with real copies.

`devices/hardware/discovery.py` opens CPU devices when a pool starts, and stand-ins when a pool only plans;
`train/timing/step_timing.py` and `shard/cost/eager_pilot.py` open further devices for the length of a measurement.
`fusion/runtime/planned_executor.py` sends planned copies over the simulated link of a `CpuDevice`, and `host_of`
(`fusion/runtime/profiling_device.py`) asks for the link's bandwidth. `WeightlessDevice` (`weightless.py`) and
`shard/verify/step_outcome.py` use `DefaultCpuGenerator`, too. The module must not know blocks, models or trials.

Note: links. A device with a limited link has a single link for all copies. A copy from another device occupies the links
of both devices at the same time, for as long as the slower link needs. Every thread takes links in the same order, so two
devices that copy from each other cannot deadlock.

Note: copying threads. The waiting thread itself makes an awaited copy: waking another thread, and being woken by a
thread on another core with cold caches, costs a small model a fifth of its step. No torch dispatch mode sees a device's
copies, so a mode that observes operators (the pool's count of a model's allocations, or a mode of the user) never takes
host memory for device memory.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TypeVar

import psutil
import torch
from torch import Tensor

from hydra_tune.devices.copying import (
    AwaitedCopyThread,
    BackgroundCopy,
    BackgroundCopyThread,
    HostComputeThread,
    Pairs,
    SimulatedLink,
)
from hydra_tune.devices.device import Device, DeviceCopyRoute
from hydra_tune.devices.hardware.heap import STEP_BYTES, keep_freed_memory
from hydra_tune.devices.own_generator import own_generator
from hydra_tune.devices.positions import MersennePositions
from hydra_tune.devices.stopwatch import WallStopwatch
from hydra_tune.older_torch import keep_cuda_guard

T = TypeVar("T")

CPU_ALIGNMENT = 64  # bytes; alignment of torch's CPU allocator


class DefaultCpuGenerator(MersennePositions):
    """Generator of operators on CPU devices: the calling thread's own generator, or torch's default generator."""

    def get_state(self) -> Tensor:
        """As of `RandomGenerator`."""
        thread_generator = own_generator()
        return torch.get_rng_state() if thread_generator is None else thread_generator.get_state()

    def set_state(self, state: Tensor) -> None:
        """As of `RandomGenerator`."""
        thread_generator = own_generator()
        if thread_generator is None:
            torch.set_rng_state(state)
        else:
            thread_generator.set_state(state)

    def in_turn(self) -> AbstractContextManager[object]:
        """Return an empty context, because threads that work for trials draw from their own generators."""
        return nullcontext()


class CpuDevice:
    """A CPU core as a device.

    Args:
        index: number in the device's name.
        budget_bytes: memory that the pool may use on the device, in bytes.
        link_bandwidth: bytes per second of the device's copies, both directions together; None: not limited.

    Attributes:
        link: the simulated link, if the bandwidth is limited.
    """

    shares_generator = True
    is_host = True

    def __init__(self, index: int, budget_bytes: int, link_bandwidth: float | None = None) -> None:
        # Here, because the first devices are opened before the pool starts its first thread.
        keep_cuda_guard()
        keep_freed_memory(STEP_BYTES)
        self.name = f"cpu:{index}"
        self.torch_device = torch.device("cpu")
        self.budget_bytes = budget_bytes
        self.alignment = CPU_ALIGNMENT
        self.generator = DefaultCpuGenerator()
        self.bandwidth = link_bandwidth
        self.link = None if link_bandwidth is None else SimulatedLink(link_bandwidth)
        self._copies = AwaitedCopyThread(self.name)
        self._beside = HostComputeThread(self.name)
        self._ahead = BackgroundCopyThread(self.name)

    @property
    def keeps_tensors(self) -> bool:
        """Whether the device computes on the host's tensors in place; False for a device behind a simulated link."""
        return self.link is None

    @contextmanager
    def worker(self) -> Iterator[None]:
        """Set one intra-op thread: more threads would change the last bits of results, and devices run side by side."""
        torch.set_num_threads(1)
        yield

    def empty(self, nbytes: int) -> Tensor:
        """As of `Device`."""
        return torch.empty(nbytes, dtype=torch.uint8)

    host_empty = empty

    def on_host(self, function: Callable[[], T]) -> T:
        """As of `Device`."""
        return self._copies.run(function)

    def start_on_host(self, function: Callable[[], None]) -> Future[None]:
        """As of `Device`, with one intra-op thread."""
        return self._beside.start(function)

    def load(self, pairs: Pairs) -> None:
        """As of `Device`."""
        self._send(pairs, is_waited_for=True)

    spill = load

    def start_load(self, pairs: Pairs) -> BackgroundCopy:
        """As of `Device`."""
        return self._ahead.start(pairs, lambda handed_pairs: self._send(handed_pairs, is_waited_for=False))

    start_spill = start_load

    def reach(self, source: Device) -> DeviceCopyRoute:
        """Return `LINK` for a CPU device, whose memory is no nearer than the host's, and `NONE` for other devices."""
        return DeviceCopyRoute.LINK if isinstance(source, CpuDevice) else DeviceCopyRoute.NONE

    def take_over(self, source: Device, pairs: Pairs) -> None:
        """Copy from another CPU device's memory, over both links at the same time."""
        self._take(source, pairs, is_waited_for=True)

    def start_take_over(self, source: Device, pairs: Pairs) -> BackgroundCopy:
        """As of `Device`."""
        # The copy hands its pairs over: a closure over `pairs` would keep the tensors alive beyond the copy's end.
        return self._ahead.start(pairs, lambda handed_pairs: self._take(source, handed_pairs, is_waited_for=False))

    def synchronize(self) -> None:
        """Do nothing: a CPU operator is complete when the operator returns."""

    def stopwatch(self) -> WallStopwatch:
        """As of `Device`, on the host's clock."""
        return WallStopwatch()

    def unit_memory(self) -> None:
        """Return None: libraries use the host's memory, outside the budget."""

    def reclaim(self) -> int:
        """Return the host's free memory in bytes; there is no allocator cache to give back."""
        return int(psutil.virtual_memory().available)

    def close(self) -> None:
        """Stop the copy threads and the thread for host computing."""
        self._beside.close()
        self._ahead.close()
        self._copies.close()

    def _send(self, pairs: Pairs, *, is_waited_for: bool) -> None:
        _over(() if self.link is None else (self.link,), pairs, is_waited_for=is_waited_for)

    def _take(self, source: Device, pairs: Pairs, *, is_waited_for: bool) -> None:
        assert isinstance(source, CpuDevice), "not in reach"
        # Sorted by id, the same order on every thread (note above).
        links = sorted({link for link in (source.link, self.link) if link is not None}, key=id)
        _over(links, pairs, is_waited_for=is_waited_for)


def _over(links: Sequence[SimulatedLink], pairs: Pairs, *, is_waited_for: bool) -> None:
    """Copy while all given links are occupied, taken in the given order."""
    copy, nbytes = partial(_copy, pairs), sum(target.nbytes for _, target in pairs)
    # Wrapped from the inside out: the last wrapper runs first, so links are taken in the given order.
    for link in reversed(links):
        copy = partial(link.send, copy, nbytes, is_waited_for=is_waited_for)
    copy()


def _copy(pairs: Pairs) -> None:
    with torch._C._DisableTorchDispatch():  # noqa: SLF001 - torch has no other name for it
        for source, target in pairs:
            target.copy_(source)
