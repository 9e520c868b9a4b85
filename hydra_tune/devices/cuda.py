"""`CudaDevice`: one GPU.

Note: stream order. The worker thread computes on its own stream, the copy thread copies on another. A load waits for the
compute stream before it writes, because the caching allocator may hand out memory whose last reader is still queued there;
the compute stream waits for the load before it reads. A spill waits for the compute stream before it reads. Both are waited
for on the host before they return, so no buffer is reused or freed while a copy is under way. Copies that overlap compute
need the same events without the waits.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from hydra_tune.devices.copying import CopyThread

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
        self._transfer = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._copies = CopyThread(self.name, lambda: torch.cuda.set_device(self.torch_device))

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

    def load(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy host to device."""
        self._copy(pairs)

    def spill(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy device to host."""
        self._copy(pairs)

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(self._compute)

        def copy() -> None:
            with torch.cuda.stream(self._transfer):
                self._transfer.wait_event(ready)
                for source, target in pairs:
                    target.copy_(source, non_blocking=True)
                self._transfer.synchronize()

        self._copies.run(copy)

    def synchronize(self) -> None:
        """Wait for the compute stream."""
        self._compute.synchronize()

    def close(self) -> None:
        """Stop the copy thread."""
        self._copies.close()
