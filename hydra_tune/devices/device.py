"""The `Device` protocol: everything the rest of the package knows of a device.

Note: who allocates what. Device memory is allocated by the device's worker thread, host memory by its copy thread (through
`on_host`). On a CPU device both are ordinary memory, and the thread is what tells them apart: whatever the worker thread
allocates while a unit runs is device memory and lies under the device's budget. So what is filled in the background is
allocated by the worker before its unit computes.

Note: what goes across. Bytes that are on one device and wanted on another can be copied there in one go (`take_over`), where
the two can do that; `reach` says whether they can, and what it is worth. A copy across takes the links of both devices for as
long as one copy takes, where the way over the host takes each of them in turn.
"""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from enum import Enum
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from hydra_tune.devices.copying import Copy, Pairs
from hydra_tune.devices.libraries import Room

T = TypeVar("T")


class Reach(Enum):
    """How bytes come to a device from another one."""

    NONE = "over the host only"
    LINK = "in one copy, over the links that copies from the host take as well"
    NEAR = "in one copy, faster than from the host"


class RandomGenerator(Protocol):
    """A device's default random generator."""

    def get_state(self) -> Tensor:
        """The state, as a host tensor."""

    def set_state(self, state: Tensor) -> None:
        """Set the state."""

    def in_turn(self) -> AbstractContextManager[object]:
        """Entered around draws for which the state was set, where other threads may do the same."""


class CountingGenerator(RandomGenerator, Protocol):
    """One whose draws can be counted."""

    def draws_between(self, before: Tensor, after: Tensor) -> int | None:
        """By how many draws its stream has moved from one state to another; None if that is not found."""

    def moved(self, state: Tensor, count: int) -> Tensor:
        """The state so many draws further on."""


class DeviceStopwatch(Protocol):
    """Adds up how long a device takes for what it is asked to do, by its own time."""

    def running(self) -> AbstractContextManager[None]:
        """Around work on the device's worker thread; work that fails does not count."""

    @property
    def seconds(self) -> float:
        """All in all."""

    @property
    def ended_ns(self) -> int:
        """When the last of the work was done, by the clock of `time.perf_counter_ns`."""


class UnitMemory(Protocol):
    """What a unit takes of a device's memory, from when this was made."""

    def room(self, counted_bytes: int) -> Room:
        """What that leaves for the ledger, which has counted so many bytes meanwhile, at most."""


class Device(Protocol):
    """One device of the pool.

    Attributes:
        name: e.g. "cpu:0" or "cuda:1".
        torch_device: where its tensors are.
        budget_bytes: memory the pool may use on it.
        alignment: bytes to which its allocator aligns; views of a flat buffer are aligned alike, since kernels may round
            differently otherwise.
        shares_generator: whether its generator is also another device's (true of CPU devices).
        is_host: whether it computes with the host's cores, in the host's memory (true of CPU devices).
    """

    name: str
    torch_device: torch.device
    budget_bytes: int
    alignment: int
    shares_generator: bool
    is_host: bool

    @property
    def keeps_tensors(self) -> bool:
        """Whether it computes with the host's own tensors where they lie, so that no first copy is needed."""

    @property
    def generator(self) -> CountingGenerator:
        """The generator that stochastic operators on this device draw from."""

    def worker(self) -> AbstractContextManager[None]:
        """Entered once by the worker thread, for its whole life."""

    def empty(self, nbytes: int) -> Tensor:
        """Uninitialised device memory: `(nbytes,)`, uint8. On the worker thread."""

    def host_empty(self, nbytes: int) -> Tensor:
        """Uninitialised host memory that copies to and from the device fast: `(nbytes,)`, uint8. Inside `on_host`."""

    def on_host(self, function: Callable[[], T]) -> T:
        """Run a function on the copy thread and wait for it: host memory is made and looked at there."""

    def start_on_host(self, function: Callable[[], None]) -> Future[None]:
        """Begin to run a function on the host, which the device goes on beside; after those that were begun before."""

    def load(self, pairs: Pairs) -> None:
        """Copy host tensors to device tensors, pairs of (source, target); done when it returns."""

    def spill(self, pairs: Pairs) -> None:
        """Copy device tensors to host tensors, pairs of (source, target); done when it returns."""

    def start_load(self, pairs: Pairs) -> Copy:
        """Begin to copy host tensors to device tensors, while the device computes what is asked of it from now on.

        On the worker thread, which has allocated the targets. Nobody may touch sources or targets until the copy is over.
        """

    def start_spill(self, pairs: Pairs) -> Copy:
        """Begin to copy device tensors to host tensors, as the work asked for so far leaves them; otherwise as `start_load`."""

    def reach(self, source: "Device") -> Reach:
        """How bytes of another device come here; the same whenever it is asked."""

    def take_over(self, source: "Device", pairs: Pairs) -> None:
        """Copy tensors of another device to tensors of this one, pairs of (source, target); done when it returns.

        On this device's worker thread. Nobody may touch the tensors until it is done. Sources are copied as the work that was
        asked of their device so far leaves them.

        Args:
            source: the other device, which is in reach.
            pairs: what to copy.
        """

    def start_take_over(self, source: "Device", pairs: Pairs) -> Copy:
        """Begin to copy tensors of another device to tensors of this one, as `take_over` does; otherwise as `start_load`."""

    def synchronize(self) -> None:
        """Wait until everything started on the device is done."""

    def stopwatch(self) -> DeviceStopwatch:
        """A new one; it waits for the device only where somebody reads it."""

    def unit_memory(self) -> UnitMemory | None:
        """Look at what is taken of its memory from now on; None where that is not to be seen, or no matter."""

    def reclaim(self) -> int:
        """Give memory that nobody uses back to the system, which an allocator may have kept; on the worker thread.

        Returns:
            Bytes that are free then, by what the system says.
        """

    def close(self) -> None:
        """Stop the copy threads."""
