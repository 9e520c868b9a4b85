"""`CudaDevice`: one GPU, or a part of one: several devices may lie on one GPU, each with streams and a budget of its own.

Note: stream order. The worker thread computes on one stream, loads run on another and spills on a third, so that both go on
beside what computes. Events alone put them in order; nobody waits for the whole device. Each copy, made on a copy thread,
first has its stream wait for an event that was recorded on the compute stream when the copy was asked for. For a load that is
because the caching allocator may hand out memory whose last reader is still queued there; for a spill, because what is spilled
may still be written there. Work that the worker starts later is not waited for: that is what the copy runs beside. Behind a
copy an event is recorded on its stream, and the copy thread waits for that event on the host. So a copy is over when its
bytes are there, and whoever starts work on them then need not order it behind the copy's stream any more.
`benchmarks/stream_deletions.py` deletes these waits one at a time, and says which of them a test would miss.

Note: lifetimes. All device memory is allocated on the worker thread with the compute stream current, so it belongs to the
compute stream, and the allocator may give it to that stream's next work as soon as nobody refers to it. The copy streams work
on it too, unknown to the allocator: so a copy refers to its tensors until it is over (`Copy`), and the pager frees a block
that is on its way only when its copy is over or was never begun. No `record_stream` is needed, and none is wanted: with it
memory would come back at a time that nobody can tell. Host memory is pinned; it is referred to in the same way.

Note: from GPU to GPU. What is taken over from another GPU is copied by the GPUs themselves, over NVLink or PCIe, where they can
access each other's memory. Torch makes such a copy on the stream that is current for the source's GPU, with a barrier before
and after it to the one that is current for the target's: the source's outward stream and the target's inward stream, so that
it is in line with what leaves the one and what comes to the other. Before it both wait for the compute streams of both devices:
the source may still be written there, and the memory of the target still be read. It is waited for on the host, by a copy
thread of the target's, so that neither source nor target is given up before it is over. Between devices on one GPU it is a copy
within its memory, on the target's inward stream alone. In the background it is ordered alike, and asked for before the source's
device has more to compute on it: whoever has waits for the copy first.

Note: several devices on one GPU. They have the caching allocator in common, whose cap is the sum of their budgets; each one's
memory belongs to its own compute stream. They also have the GPU's default generator in common: whoever sets it, draws, and
reads it again does so in turn.

Note: what is for one at a time. Emptying the caching allocator is a thing of the whole process, all GPUs and streams, and fails
while any thread records a CUDA graph; so does waiting for all of a GPU (`exclusive_allocator`). Lock order: the turn with a
generator, then this.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from hydra_tune.devices.caps import is_alone
from hydra_tune.devices.copying import BackgroundCopies, Copy, CopyThread, HostThread, Pairs
from hydra_tune.devices.device import Device, Reach
from hydra_tune.devices.libraries import CudaLibraries
from hydra_tune.devices.positions import PhiloxPositions
from hydra_tune.devices.stopwatch import CudaStopwatch

T = TypeVar("T")

CUDA_ALIGNMENT = 512  # bytes; what torch's caching allocator gives

_TURNS: dict[int, threading.RLock] = {}  # by GPU: who draws from its default generator
_EMPTYING = threading.RLock()


def exclusive_allocator() -> AbstractContextManager[object]:
    """Entered around what must not go on while another thread empties the allocator, or records a CUDA graph."""
    return _EMPTYING


class CudaGenerator(PhiloxPositions):
    """A GPU's default generator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._turn = _TURNS.setdefault(device.index, threading.RLock())

    def get_state(self) -> Tensor:
        """The state, as a host tensor."""
        return torch.cuda.get_rng_state(self._device)

    def set_state(self, state: Tensor) -> None:
        """Set the state."""
        torch.cuda.set_rng_state(state, self._device)

    def in_turn(self) -> AbstractContextManager[object]:
        """One thread at a time on a GPU; it may enter again within."""
        return self._turn


class CudaDevice:
    """One GPU, or a part of one.

    Args:
        index: as CUDA counts them.
        budget_bytes: memory the pool may use on it; the caching allocator is held to it.
        part: its number among several devices on this GPU; None: it is the only one.
        closed: called when it is closed; may be called again.
        gives_back: whether the budget may grow where libraries need less than was left to them.

    Attributes:
        outward: the stream of copies that leave its memory.
    """

    shares_generator = False  # each draws from its GPU's, in turn
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
        self._libraries = CudaLibraries(self.torch_device, budget_bytes, gives_back=gives_back)
        self._compute = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._inward = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self.outward = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._copies = CopyThread(self.name, self._choose)
        self._beside = HostThread(self.name)
        self._loads = BackgroundCopies(f"{self.name}-in", self._choose)
        self._spills = BackgroundCopies(f"{self.name}-out", self._choose)

    @contextmanager
    def worker(self) -> Iterator[None]:
        """The compute stream is current for the worker's whole life."""
        torch.set_num_threads(1)
        with torch.cuda.device(self.torch_device), torch.cuda.stream(self._compute):
            yield
            self._compute.synchronize()

    def empty(self, nbytes: int) -> Tensor:
        """Uninitialised device memory, uint8."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def host_empty(self, nbytes: int) -> Tensor:
        """Uninitialised pinned memory, uint8: only pinned memory is copied by the GPU itself."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def on_host(self, function: Callable[[], T]) -> T:
        """Run a function on the copy thread and wait for it."""
        return self._copies.run(function)

    def start_on_host(self, function: Callable[[], None]) -> Future[None]:
        """Run a function on a thread of its own, with one intra-op thread."""
        return self._beside.start(function)

    def load(self, pairs: Pairs) -> None:
        """Copy host to device."""
        ready = self.computed()
        self._copies.run(lambda: _copy(pairs, self._inward, ready))

    def spill(self, pairs: Pairs) -> None:
        """Copy device to host."""
        ready = self.computed()
        self._copies.run(lambda: _copy(pairs, self.outward, ready))

    def start_load(self, pairs: Pairs) -> Copy:
        """Copy host to device, in the background."""
        ready = self.computed()
        return self._loads.start(pairs, lambda found: _copy(found, self._inward, ready))

    def start_spill(self, pairs: Pairs) -> Copy:
        """Copy device to host, in the background."""
        ready = self.computed()
        return self._spills.start(pairs, lambda found: _copy(found, self.outward, ready))

    def reach(self, source: Device) -> Reach:
        """Near is where a GPU, here the source's, can write to the other one's memory itself."""
        if not isinstance(source, CudaDevice):
            return Reach.NONE
        here, there = self.torch_device, source.torch_device
        is_near = here == there or torch.cuda.can_device_access_peer(there, here)
        return Reach.NEAR if is_near else Reach.NONE

    def take_over(self, source: Device, pairs: Pairs) -> None:
        """Copy from another device's memory, GPU to GPU."""
        copy = self._copy_from(source)
        self._copies.run(lambda: copy(pairs))

    def start_take_over(self, source: Device, pairs: Pairs) -> Copy:
        """Copy from another device's memory, in the background."""
        return self._loads.start(pairs, self._copy_from(source))

    def synchronize(self) -> None:
        """Wait for the compute stream."""
        self._compute.synchronize()

    def stopwatch(self) -> CudaStopwatch:
        """By events on the compute stream, which is the worker's current one."""
        return CudaStopwatch(self.torch_device)

    def unit_memory(self) -> CudaLibraries | None:
        """By the allocator's figures, which several devices on a GPU have in common."""
        if not is_alone(self.torch_device.index):
            return None
        self._libraries.begin()
        return self._libraries

    def reclaim(self) -> int:
        """Empty the caching allocators: segments that no tensor lies in go, and come back in other sizes; pinned memory too."""
        self._compute.synchronize()
        with exclusive_allocator():
            torch.cuda.empty_cache()
            empty_host_cache = getattr(torch._C, "_host_emptyCache", None)  # noqa: SLF001 - torch has no public name for it
            if empty_host_cache is not None:
                empty_host_cache()
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return free

    def close(self) -> None:
        """Stop the copy threads."""
        for thread in (self._beside, self._loads, self._spills, self._copies):
            thread.close()
        self._closed()

    def _copy_from(self, source: Device) -> Callable[[Pairs], None]:
        """Copies what another device has computed by now to memory that is free here by now."""
        assert isinstance(source, CudaDevice), "not in reach"
        ready = [source.computed(), self.computed()]
        beside = () if source.torch_device == self.torch_device else (source.outward,)
        return lambda pairs: _copy(pairs, self._inward, *ready, beside=beside)

    def _choose(self) -> None:
        torch.cuda.set_device(self.torch_device)

    def computed(self) -> torch.cuda.Event:
        """What is queued on the compute stream by now."""
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(self._compute)
        return ready


def cuda_name(index: int, part: int | None) -> str:
    """What a device is called."""
    return f"cuda:{index}" if part is None else f"cuda:{index}/{part}"


def _copy(
    pairs: Pairs, stream: torch.cuda.Stream, *ready: torch.cuda.Event, beside: Sequence[torch.cuda.Stream] = ()
) -> None:
    """Copy on a stream, behind events, and wait for it.

    Args:
        pairs: what to copy.
        stream: on which.
        ready: what it waits for.
        beside: streams to be current on other GPUs meanwhile.
    """
    copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    with ExitStack() as current:
        for one in (*beside, stream):
            current.enter_context(torch.cuda.stream(one))
            for event in ready:
                one.wait_event(event)
        for source, target in pairs:
            target.copy_(source, non_blocking=True)
        copied.record(stream)
    copied.synchronize()
