"""`CpuDevice`: a virtual accelerator on the CPU, with a memory budget of its own and copies that really copy.

Everything above devices is the same code as on a GPU, so the whole system runs, and is tested, without one.

Note: links. A device whose link is slowed down has one link for all of its copies. A copy from another device goes out on that
one's link and comes in on its own, at the same time: it has both for as long as the slower one needs. Links are taken in one
order everywhere, so that two devices that copy from each other do not wait for each other.

Note: who copies. A copy that is waited for is made by whoever waits: to wake another thread, and be woken by it on another core
with cold caches, costs a small model a fifth of its step. No mode of torch's sees such a copy, so that nothing that follows
operators (the pool's own count of what a model makes, or a mode of the user's) takes what is on the host for device memory.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TypeVar

import psutil
import torch
from torch import Tensor

from hydra_tune.devices.copying import BackgroundCopies, Copy, CopyThread, HostThread, Link, Pairs
from hydra_tune.devices.device import Device, Reach
from hydra_tune.devices.heap import STEP_BYTES, keep_freed_memory
from hydra_tune.devices.own_generator import own_generator
from hydra_tune.devices.positions import MersennePositions
from hydra_tune.devices.stopwatch import WallStopwatch
from hydra_tune.older_torch import keep_cuda_guard

T = TypeVar("T")

CPU_ALIGNMENT = 64  # bytes; what torch's CPU allocator gives


class DefaultCpuGenerator(MersennePositions):
    """What operators on CPU devices draw from: torch's default generator, which all share, or the thread's own."""

    def get_state(self) -> Tensor:
        """The state, as a host tensor."""
        own = own_generator()
        return torch.get_rng_state() if own is None else own.get_state()

    def set_state(self, state: Tensor) -> None:
        """Set the state."""
        own = own_generator()
        if own is None:
            torch.set_rng_state(state)
        else:
            own.set_state(state)

    def in_turn(self) -> AbstractContextManager[object]:
        """Nothing to wait for: threads that work for trials draw from generators of their own."""
        return nullcontext()


class CpuDevice:
    """One CPU core as a device.

    Args:
        index: the number in its name.
        budget_bytes: memory the pool may use on it.
        link_bandwidth: bytes a second that its copies take, both ways together; None: as fast as they are.

    Attributes:
        bandwidth: as given.
        link: what slows its copies down, if anything does.
    """

    shares_generator = True
    is_host = True

    def __init__(self, index: int, budget_bytes: int, link_bandwidth: float | None = None) -> None:
        keep_cuda_guard()
        keep_freed_memory(STEP_BYTES)
        self.name = f"cpu:{index}"
        self.torch_device = torch.device("cpu")
        self.budget_bytes = budget_bytes
        self.alignment = CPU_ALIGNMENT
        self.generator = DefaultCpuGenerator()
        self.bandwidth = link_bandwidth
        self.link = None if link_bandwidth is None else Link(link_bandwidth)
        self._copies = CopyThread(self.name)
        self._beside = HostThread(self.name)
        self._ahead = BackgroundCopies(self.name)

    @property
    def keeps_tensors(self) -> bool:
        """Yes, unless the device stands for one behind a link, over which everything has to come."""
        return self.link is None

    @contextmanager
    def worker(self) -> Iterator[None]:
        """One intra-op thread: more would change the last bits of results, and devices are to run side by side."""
        torch.set_num_threads(1)
        yield

    def empty(self, nbytes: int) -> Tensor:
        """Uninitialised device memory, uint8."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def host_empty(self, nbytes: int) -> Tensor:
        """Uninitialised host memory, uint8."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def on_host(self, function: Callable[[], T]) -> T:
        """Run a function on the copy thread and wait for it."""
        return self._copies.run(function)

    def start_on_host(self, function: Callable[[], None]) -> Future[None]:
        """Run a function on a thread of its own, with one intra-op thread."""
        return self._beside.start(function)

    def load(self, pairs: Pairs) -> None:
        """Copy host to device."""
        self._send(pairs, is_waited_for=True)

    def spill(self, pairs: Pairs) -> None:
        """Copy device to host."""
        self._send(pairs, is_waited_for=True)

    def start_load(self, pairs: Pairs) -> Copy:
        """Copy host to device, in the background."""
        return self._ahead.start(pairs, lambda found: self._send(found, is_waited_for=False))

    def start_spill(self, pairs: Pairs) -> Copy:
        """Copy device to host, in the background."""
        return self._ahead.start(pairs, lambda found: self._send(found, is_waited_for=False))

    def reach(self, source: Device) -> Reach:
        """Memory is memory: no nearer than the host's."""
        return Reach.LINK if isinstance(source, CpuDevice) else Reach.NONE

    def take_over(self, source: Device, pairs: Pairs) -> None:
        """Copy from another CPU device's memory, over both links at once."""
        self._take(source, pairs, is_waited_for=True)

    def start_take_over(self, source: Device, pairs: Pairs) -> Copy:
        """Copy from another CPU device's memory, in the background."""
        return self._ahead.start(pairs, lambda found: self._take(source, found, is_waited_for=False))

    def synchronize(self) -> None:
        """Nothing is ever pending: CPU operators are done when they return."""

    def stopwatch(self) -> WallStopwatch:
        """By the host's clock."""
        return WallStopwatch()

    def unit_memory(self) -> None:
        """Libraries have the host's memory."""

    def reclaim(self) -> int:
        """Nothing is kept: what is free of the host's memory."""
        return int(psutil.virtual_memory().available)

    def close(self) -> None:
        """Stop the copy threads."""
        self._beside.close()
        self._ahead.close()
        self._copies.close()

    def _send(self, pairs: Pairs, *, is_waited_for: bool) -> None:
        _over(() if self.link is None else (self.link,), pairs, is_waited_for=is_waited_for)

    def _take(self, source: Device, pairs: Pairs, *, is_waited_for: bool) -> None:
        assert isinstance(source, CpuDevice), "not in reach"
        links = sorted({link for link in (source.link, self.link) if link is not None}, key=id)
        _over(links, pairs, is_waited_for=is_waited_for)


def _over(links: Sequence[Link], pairs: Pairs, *, is_waited_for: bool) -> None:
    """Copy, and have all of these links meanwhile, taken in their order."""
    copy, nbytes = partial(_copy, pairs), sum(target.nbytes for _, target in pairs)
    for link in reversed(links):
        copy = partial(link.send, copy, nbytes, is_waited_for=is_waited_for)
    copy()


def _copy(pairs: Pairs) -> None:
    with torch._C._DisableTorchDispatch():  # noqa: SLF001 - torch has no other name for it
        for source, target in pairs:
            target.copy_(source)
