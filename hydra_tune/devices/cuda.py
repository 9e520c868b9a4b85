"""`CudaDevice`: a GPU, or a part of a GPU. Several devices may share a GPU, each with its own streams and budget.

`devices/hardware/discovery.py` opens the devices when a pool starts, for the workers and pagers of the pool;
`cuda_graphs.py` and `planner/profile/profiling_interpreter.py` record or run graphs in the turn of a `CudaGenerator`.
The module must not know blocks, models or trials: a device copies tensors and runs functions.

Note: stream order. The worker thread computes on a compute stream. Loads run on a second stream and spills on a third.
Only events order the streams; no copy waits for the whole GPU. At the request for a copy, an event is recorded on the
compute stream, and the copy's stream waits for this event. A load needs the wait because the caching allocator may hand
out memory with a reader still queued on the compute stream; a spill needs the wait because queued work may still write
the source. After the copy, the copy thread records an event on the copy's stream and waits for the event on the host. A
copy is therefore over only when its bytes have arrived, and later work needs no ordering against the copy's stream.
`benchmarks/stream_deletions.py` deletes these waits one at a time, and reports which deletions a test would miss.

Note: lifetimes. The worker thread allocates device memory while the compute stream is current, except for recordings of
CUDA graphs, which allocate on a stream of their own. So the memory belongs to the compute stream, and the allocator may
give the memory to that stream's next work as soon as the last reference is gone. The allocator does not know that the
copy streams use the memory, too. Therefore a copy holds references to its tensors until its end (`BackgroundCopy`), and
the pager frees a block in transit only after the copy has ended or was cancelled before its begin. References protect
pinned host memory in the same way.

Note: from GPU to GPU. GPUs that can access each other's memory copy a takeover directly, over NVLink or PCIe. Torch
makes such a copy on the current stream of the source's GPU, with barriers before and after against the current stream
of the target's GPU. The current streams are the source's outward stream and the target's inward stream, which orders
the copy with everything that leaves the source and reaches the target. Before the copy, both streams wait for both
devices' compute streams, because queued work may still write the source or read the target's memory. A copy thread of
the target waits for the copy on the host, so neither source nor target is released before the copy's end. Between
devices on the same GPU, the copy runs on the target's inward stream alone. A background takeover is ordered in the same
way; a unit that needs the block on the source's device waits for the copy first.

Note: several devices on a GPU. The devices share the caching allocator, whose cap `devices/hardware/caps.py` sets; each
device's memory belongs to its own compute stream. The devices also share the GPU's default generator: a thread that sets the
generator, draws, and reads the state again holds the generator's turn.

Note: exclusive operations. Emptying the caching allocator affects all GPUs and streams of the process, and fails while
any thread records a CUDA graph; waiting for a whole GPU fails likewise (`exclusive_allocator`). Lock order: the turn
with a generator, then `exclusive_allocator`.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from hydra_tune.devices.copying import AwaitedCopyThread, BackgroundCopy, BackgroundCopyThread, HostComputeThread, Pairs
from hydra_tune.devices.device import Device, DeviceCopyRoute, working_on
from hydra_tune.devices.hardware.caps import is_alone
from hydra_tune.devices.hardware.libraries import CudaUnitMemory
from hydra_tune.devices.positions import PhiloxPositions
from hydra_tune.devices.stopwatch import CudaStopwatch

T = TypeVar("T")

CUDA_ALIGNMENT = 512  # bytes; alignment of torch's caching allocator

_TURNS: dict[int, threading.RLock] = {}  # by GPU: lock for draws from the default generator
_EMPTYING = threading.RLock()


def exclusive_allocator() -> AbstractContextManager[object]:
    """Return the lock around work that must not overlap with emptying the allocator or recording a CUDA graph."""
    return _EMPTYING


class CudaGenerator(PhiloxPositions):
    """A GPU's default generator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._turn = _TURNS.setdefault(device.index, threading.RLock())

    def get_state(self) -> Tensor:
        """As of `RandomGenerator`."""
        return torch.cuda.get_rng_state(self._device)

    def set_state(self, state: Tensor) -> None:
        """As of `RandomGenerator`."""
        torch.cuda.set_rng_state(state, self._device)

    def in_turn(self) -> AbstractContextManager[object]:
        """Return the GPU's reentrant lock for draws."""
        return self._turn


class CudaDevice:
    """A GPU, or a part of a GPU.

    Args:
        index: index of the GPU, as CUDA counts.
        budget_bytes: memory that the pool may use on the device, in bytes; the caching allocator is capped accordingly.
        part: number among several devices on the same GPU; None: the only device.
        closed: function to call when the device is closed; further calls must be harmless.
        gives_back: whether the budget may grow where libraries need less memory than reserved.

    Attributes:
        outward: the stream of copies that leave the device's memory.
    """

    shares_generator = False  # devices draw from their GPU's generator, in turn
    is_host = False
    keeps_tensors = False

    def __init__(
        self,
        index: int,
        budget_bytes: int,
        part: int | None = None,
        closed: Callable[[], None] = lambda: None,
        *,
        gives_back: bool = False,
    ) -> None:
        self.name = cuda_name(index, part)
        self._closed = closed
        self.torch_device = torch.device("cuda", index)
        self.budget_bytes = budget_bytes
        self.alignment = CUDA_ALIGNMENT
        self.generator = CudaGenerator(self.torch_device)
        self._libraries = CudaUnitMemory(self.torch_device, budget_bytes, gives_back=gives_back)
        self._compute = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._inward = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self.outward = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._copies = AwaitedCopyThread(self.name, self._choose)
        self._beside = HostComputeThread(self.name)
        self._loads = BackgroundCopyThread(f"{self.name}-in", self._choose)
        self._spills = BackgroundCopyThread(f"{self.name}-out", self._choose)

    @contextmanager
    def worker(self) -> Iterator[None]:
        """Make the compute stream current for the thread inside the context, and wait for the stream at the end."""
        torch.set_num_threads(1)
        with torch.cuda.device(self.torch_device), torch.cuda.stream(self._compute), working_on(self.torch_device):
            yield
            # The last unit's work may still be queued when the unit has returned to the host.
            self._compute.synchronize()

    def empty(self, nbytes: int) -> Tensor:
        """As of `Device`."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def host_empty(self, nbytes: int) -> Tensor:
        """As of `Device`, pinned: a GPU copies asynchronously only to and from pinned memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def on_host(self, function: Callable[[], T]) -> T:
        """As of `Device`."""
        return self._copies.run(function)

    def start_on_host(self, function: Callable[[], None]) -> Future[None]:
        """As of `Device`."""
        return self._beside.start(function)

    def load(self, pairs: Pairs) -> None:
        """As of `Device`."""
        ready = self.computed()
        self._copies.run(lambda: _copy(pairs, self._inward, ready))

    def spill(self, pairs: Pairs) -> None:
        """As of `Device`."""
        ready = self.computed()
        self._copies.run(lambda: _copy(pairs, self.outward, ready))

    def start_load(self, pairs: Pairs) -> BackgroundCopy:
        """As of `Device`."""
        # The event is recorded now and not by the copy thread: the copy must not wait for work requested later. The
        # copy hands its pairs over, because a closure over `pairs` would keep the tensors alive beyond the copy's end.
        ready = self.computed()
        return self._loads.start(pairs, lambda handed_pairs: _copy(handed_pairs, self._inward, ready))

    def start_spill(self, pairs: Pairs) -> BackgroundCopy:
        """As of `Device`."""
        ready = self.computed()
        return self._spills.start(pairs, lambda handed_pairs: _copy(handed_pairs, self.outward, ready))

    def reach(self, source: Device) -> DeviceCopyRoute:
        """Return `NEAR` if the source's GPU can write to this GPU's memory itself."""
        if not isinstance(source, CudaDevice):
            return DeviceCopyRoute.NONE
        here, there = self.torch_device, source.torch_device
        # The source's GPU makes the copy (note above), so its access to this GPU's memory counts.
        is_near = here == there or torch.cuda.can_device_access_peer(there, here)
        return DeviceCopyRoute.NEAR if is_near else DeviceCopyRoute.NONE

    def take_over(self, source: Device, pairs: Pairs) -> None:
        """As of `Device`, GPU to GPU."""
        copy = self._copy_from(source)
        self._copies.run(lambda: copy(pairs))

    def start_take_over(self, source: Device, pairs: Pairs) -> BackgroundCopy:
        """As of `Device`."""
        return self._loads.start(pairs, self._copy_from(source))

    def synchronize(self) -> None:
        """Wait for the compute stream."""
        self._compute.synchronize()

    def stopwatch(self) -> CudaStopwatch:
        """Return a stopwatch on events of the compute stream, which is the worker's current stream."""
        return CudaStopwatch(self.torch_device)

    def unit_memory(self) -> CudaUnitMemory | None:
        """As of `Device`, by the allocator's statistics; None where several devices share the GPU, and so the statistics."""
        if not is_alone(self.torch_device.index):
            return None
        self._libraries.begin()
        return self._libraries

    def reclaim(self) -> int:
        """Empty the caching allocators, of all GPUs and of pinned memory; return this GPU's free bytes.

        Unused segments go back to the system, and may return in other sizes.
        """
        self._compute.synchronize()
        # Emptying the allocator during another thread's recording of a graph would fail (note above).
        with exclusive_allocator():
            torch.cuda.empty_cache()
            empty_host_cache = getattr(torch._C, "_host_emptyCache", None)  # noqa: SLF001 - torch has no public name for it
            if empty_host_cache is not None:
                empty_host_cache()
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return free

    def close(self) -> None:
        """Stop the copy threads and the thread for computations on the host, and call `closed`."""
        for thread in (self._beside, self._loads, self._spills, self._copies):
            thread.close()
        self._closed()

    def _copy_from(self, source: Device) -> Callable[[Pairs], None]:
        """Return the function that copies finished work of another device to memory that is free here.

        Both events are recorded now, at the request.
        """
        assert isinstance(source, CudaDevice), "not in reach"
        ready = [source.computed(), self.computed()]
        beside = () if source.torch_device == self.torch_device else (source.outward,)
        return lambda pairs: _copy(pairs, self._inward, *ready, beside=beside)

    def _choose(self) -> None:
        # CUDA keeps the current GPU per thread, and a new thread starts with GPU 0.
        torch.cuda.set_device(self.torch_device)

    def computed(self) -> torch.cuda.Event:
        """Record an event behind all work now queued on the compute stream."""
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(self._compute)
        return ready


def cuda_name(index: int, part: int | None) -> str:
    """Return a device's name."""
    return f"cuda:{index}" if part is None else f"cuda:{index}/{part}"


def _copy(
    pairs: Pairs, stream: torch.cuda.Stream, *ready: torch.cuda.Event, beside: Sequence[torch.cuda.Stream] = ()
) -> None:
    """Copy on a stream, after the given events, and wait for the end; `beside` are current on other GPUs meanwhile."""
    # Blocking: the waiting copy thread sleeps instead of spinning on a core that the trials' own code needs.
    copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    with ExitStack() as current:
        # The copy's own stream comes last: it has to be the current stream of the current GPU.
        for copy_stream in (*beside, stream):
            current.enter_context(torch.cuda.stream(copy_stream))
            for event in ready:
                copy_stream.wait_event(event)
        for source, target in pairs:
            target.copy_(source, non_blocking=True)
        copied.record(stream)
    copied.synchronize()
