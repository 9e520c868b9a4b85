"""`CudaDevice`: one GPU.

Note: stream order. The worker thread computes on one stream, loads run on another and spills on a third, so that both go on
beside what computes. Events alone put them in order; nobody waits for the whole device. Each copy, made on a copy thread,
first has its stream wait for an event that was recorded on the compute stream when the copy was asked for. For a load that is
because the caching allocator may hand out memory whose last reader is still queued there; for a spill, because what is spilled
may still be written there. Work that the worker starts later is not waited for: that is what the copy runs beside. Behind a
copy an event is recorded on its stream, and the copy thread waits for that event on the host. So a copy is over when its
bytes are there, and whoever starts work on them then need not order it behind the copy's stream any more.

Note: lifetimes. All device memory is allocated on the worker thread with the compute stream current, so it belongs to the
compute stream, and the allocator may give it to that stream's next work as soon as nobody refers to it. The copy streams work
on it too, unknown to the allocator: so a copy refers to its tensors until it is over (`Copy`), and the pager frees a block
that is on its way only when its copy is over or was never begun. No `record_stream` is needed, and none is wanted: with it
memory would come back at a time that nobody can tell. Host memory is pinned; it is referred to in the same way.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from hydra_tune.devices.copying import BackgroundCopies, Copy, CopyThread, Pairs

T = TypeVar("T")

CUDA_ALIGNMENT = 512  # bytes; what torch's caching allocator gives


class CudaGenerator:
    """A GPU's default generator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def get_state(self) -> Tensor:
        """The state, as a host tensor."""
        return torch.cuda.get_rng_state(self._device)

    def set_state(self, state: Tensor) -> None:
        """Set the state."""
        torch.cuda.set_rng_state(state, self._device)


class CudaDevice:
    """One GPU.

    Args:
        index: as CUDA counts them.
        budget_bytes: memory the pool may use on it; the caching allocator is held to it.
    """

    shares_generator = False

    def __init__(self, index: int, budget_bytes: int) -> None:
        self.name = f"cuda:{index}"
        self.torch_device = torch.device("cuda", index)
        self.budget_bytes = budget_bytes
        self.alignment = CUDA_ALIGNMENT
        self.generator = CudaGenerator(self.torch_device)
        self._compute = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._inward = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._outward = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._copies = CopyThread(self.name, self._choose)
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

    def load(self, pairs: Pairs) -> None:
        """Copy host to device."""
        ready = self._computed()
        self._copies.run(lambda: _copy(pairs, self._inward, ready))

    def spill(self, pairs: Pairs) -> None:
        """Copy device to host."""
        ready = self._computed()
        self._copies.run(lambda: _copy(pairs, self._outward, ready))

    def start_load(self, pairs: Pairs) -> Copy:
        """Copy host to device, in the background."""
        ready = self._computed()
        return self._loads.start(pairs, lambda found: _copy(found, self._inward, ready))

    def start_spill(self, pairs: Pairs) -> Copy:
        """Copy device to host, in the background."""
        ready = self._computed()
        return self._spills.start(pairs, lambda found: _copy(found, self._outward, ready))

    def synchronize(self) -> None:
        """Wait for the compute stream."""
        self._compute.synchronize()

    def reclaim(self) -> int:
        """Empty the caching allocator: segments that no tensor lies in go, and come back in other sizes."""
        self._compute.synchronize()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return free

    def close(self) -> None:
        """Stop the copy threads."""
        for thread in (self._loads, self._spills, self._copies):
            thread.close()

    def _choose(self) -> None:
        torch.cuda.set_device(self.torch_device)

    def _computed(self) -> torch.cuda.Event:
        """What is queued on the compute stream by now."""
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(self._compute)
        return ready


def _copy(pairs: Pairs, stream: torch.cuda.Stream, ready: torch.cuda.Event) -> None:
    """Copy on a stream, behind an event, and wait for it."""
    copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        stream.wait_event(ready)
        for source, target in pairs:
            target.copy_(source, non_blocking=True)
        copied.record(stream)
    copied.synchronize()
