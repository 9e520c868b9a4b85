"""The `Device` protocol: the whole interface between a device and the rest of the package.

`CpuDevice` (`cpu.py`), `CudaDevice` (`cuda.py`) and `WeightlessDevice` (`weightless.py`) implement the protocol.
`devices/hardware/discovery.py` opens the devices when a pool starts, and `pool/dry_run/report.py` makes the weightless
devices of a forecast. `Worker` (`pool/runtime/worker.py`) runs each unit on a device, `Pager` (`memory/pager.py`) copies
blocks to and from the device, and `RandomStreams` (`train/rng/rng_streams.py`) sets the device's generator before a unit
draws. `train/state/host_optimizer.py` runs updates by `start_on_host`, and `LedgerFitter`
(`pool/devices/library_memory.py`) measures by `unit_memory`. `shard/capture/graph_device.py` asks for the device of the
calling thread (`worker_place`). A change of the protocol needs the same change in all three devices. The module must not
know blocks, models or trials.

Note: allocation. A device's worker thread allocates device memory, and its copy thread allocates host memory (through
`on_host`). On a CPU device both are ordinary memory, and only the thread distinguishes them: everything that the worker
thread allocates during a unit is device memory, and counts against the device's budget. So the worker allocates the
targets of background copies before its unit computes.

Note: copies between devices. Bytes on one device that another device needs can be copied in a single step
(`take_over`), where `reach` says so. A direct copy occupies the links of both devices for the duration of a single copy,
whereas the way over the host occupies each link in turn.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from hydra_tune.devices.copying import BackgroundCopy, Pairs
from hydra_tune.devices.hardware.libraries import LedgerAllowance

T = TypeVar("T")
_WORKER = threading.local()


class DeviceCopyRoute(Enum):
    """How bytes reach a device from another device."""

    NONE = "over the host only"
    LINK = "in one copy, over the links that copies from the host take as well"
    NEAR = "in one copy, faster than from the host"


class RandomGenerator(Protocol):
    """A device's default random generator."""

    def get_state(self) -> Tensor:
        """Return the state as a host tensor."""

    def set_state(self, state: Tensor) -> None:
        """Set the state."""

    def in_turn(self) -> AbstractContextManager[object]:
        """Return a context for draws from a state set before, where other threads may set the state, too."""


class CountingGenerator(RandomGenerator, Protocol):
    """A generator whose draws can be counted."""

    def draws_between(self, before: Tensor, after: Tensor) -> int | None:
        """Return the number of draws between two states of the stream; None if not found."""

    def moved(self, state: Tensor, count: int) -> Tensor:
        """Return the state after `count` further draws."""


class DeviceStopwatch(Protocol):
    """Adds up the time of a device's work, by the device's own clock."""

    def running(self) -> AbstractContextManager[None]:
        """Measure work on the device's worker thread; failed work does not count."""

    @property
    def seconds(self) -> float:
        """Total seconds."""

    @property
    def ended_ns(self) -> int:
        """End of the latest work, by the clock of `time.perf_counter_ns`."""


class UnitMemory(Protocol):
    """Device memory taken by a unit, measured from the creation of this object."""

    def room(self, counted_bytes: int) -> LedgerAllowance:
        """Return the room left for the ledger, whose count during the unit was `counted_bytes` at most."""


class Device(Protocol):
    """A device of the pool.

    Attributes:
        name: e.g. "cpu:0" or "cuda:1".
        budget_bytes: memory that the pool may use on the device, in bytes.
        alignment: alignment of the device's allocator in bytes; views of a flat buffer are aligned alike, since kernels
            may round differently otherwise.
        shares_generator: whether units draw from the calling thread's generator of the host (true of CPU devices).
        is_host: whether the device computes with the host's cores, in the host's memory (true of CPU devices).
    """

    name: str
    torch_device: torch.device
    budget_bytes: int
    alignment: int
    shares_generator: bool
    is_host: bool

    @property
    def keeps_tensors(self) -> bool:
        """Whether the device computes on the host's own tensors in place, without a first copy."""

    @property
    def generator(self) -> CountingGenerator:
        """The generator of stochastic operators on the device."""

    def worker(self) -> AbstractContextManager[None]:
        """Return the context of a thread that computes on the device.

        The worker thread stays in the context for its whole life; a loop's thread, and threads that measure or profile,
        enter the context for a while. The number of intra-op threads stays changed afterwards.
        """

    def empty(self, nbytes: int) -> Tensor:
        """Allocate uninitialised device memory: `(nbytes,)`, uint8. On the worker thread."""

    def host_empty(self, nbytes: int) -> Tensor:
        """Allocate uninitialised host memory, `(nbytes,)`, uint8, for fast copies. Called inside `on_host`."""

    def on_host(self, function: Callable[[], T]) -> T:
        """Run a function on the copy thread and wait; the package allocates host memory there."""

    def start_on_host(self, function: Callable[[], None]) -> Future[None]:
        """Start a function on the host beside the device's work, after all functions started before."""

    def load(self, pairs: Pairs) -> None:
        """Copy host tensors to device tensors, pairs of (source, target); done on return."""

    def spill(self, pairs: Pairs) -> None:
        """Copy device tensors to host tensors, pairs of (source, target); done on return."""

    def start_load(self, pairs: Pairs) -> BackgroundCopy:
        """Start copying host tensors to device tensors, while the device computes work requested later.

        Called on the worker thread, which has allocated the targets. Nobody may touch sources or targets before the
        copy's end.
        """

    def start_spill(self, pairs: Pairs) -> BackgroundCopy:
        """Start copying device tensors to host tensors; otherwise like `start_load`.

        The copy reads the sources as left by the work requested so far.
        """

    def reach(self, source: "Device") -> DeviceCopyRoute:
        """Return how bytes of another device reach this device; constant for a pair of devices."""

    def take_over(self, source: "Device", pairs: Pairs) -> None:
        """Copy tensors of another device in reach to tensors of this device, pairs of (source, target); done on return.

        Called on this device's worker thread. Nobody may touch the tensors before the copy's end. The copy reads the
        sources as left by the work requested of the source's device so far.
        """

    def start_take_over(self, source: "Device", pairs: Pairs) -> BackgroundCopy:
        """Start copying tensors of another device to this device, like `take_over`; otherwise like `start_load`."""

    def synchronize(self) -> None:
        """Wait for the end of all work started on the device."""

    def stopwatch(self) -> DeviceStopwatch:
        """Return a new stopwatch, which waits for the device only when read."""

    def unit_memory(self) -> UnitMemory | None:
        """Start measuring the device's memory; None where the memory cannot be observed, or does not matter."""

    def reclaim(self) -> int:
        """Give unused memory kept by an allocator back to the system, on the worker thread; return the system's free bytes."""

    def close(self) -> None:
        """Stop the device's threads."""


@contextmanager
def working_on(place: torch.device) -> Iterator[None]:
    """Make a device outside the host the device of the calling thread inside the context."""
    before, _WORKER.place = worker_place(), place
    try:
        yield
    finally:
        _WORKER.place = before


def worker_place() -> torch.device | None:
    """Return the device outside the host on which the calling thread computes, inside `Device.worker`; None elsewhere."""
    return getattr(_WORKER, "place", None)
