"""`WeightlessDevice`: stands for a device where only sizes count. Nothing is copied, and its memory is made by whoever asks.

Inside torch's `FakeTensorMode` that memory is none at all, so a step can be rehearsed on a device that is not there.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from hydra_tune.devices.copying import Copy, Pairs
from hydra_tune.devices.cpu import DefaultCpuGenerator
from hydra_tune.devices.device import Device, Reach

T = TypeVar("T")


class _Passing(Copy):
    """A copy in the background that is over when the unit beside which it was begun is."""

    def __init__(self, device: "WeightlessDevice") -> None:
        super().__init__(())
        self._device, self._moment = device, device.moment

    @property
    def is_over(self) -> bool:
        """Whether that unit has ended."""
        return self._device.moment > self._moment

    def cancel(self) -> bool:
        """It has begun."""
        return False

    def wait(self) -> None:
        """It takes no time."""

    def wait_quietly(self) -> bool:
        """It is made."""
        return True


class WeightlessDevice:
    """A device of the same name, budget and alignment as another one.

    Args:
        like: that one; it is left alone.

    Attributes:
        like: the device it stands for.
        moment: units that have ended here; to be counted by whoever runs them.
    """

    def __init__(self, like: Device) -> None:
        self.name = like.name
        self.torch_device = torch.device("cpu")
        self.budget_bytes = like.budget_bytes
        self.alignment = like.alignment
        self.shares_generator = like.shares_generator
        self.generator = DefaultCpuGenerator()
        self.moment = 0
        self.like = like

    @contextmanager
    def worker(self) -> Iterator[None]:
        """It has no thread of its own."""
        yield

    def empty(self, nbytes: int) -> Tensor:
        """Device memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def host_empty(self, nbytes: int) -> Tensor:
        """Host memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def on_host(self, function: Callable[[], T]) -> T:
        """Run a function at once."""
        return function()

    def start_on_host(self, function: Callable[[], None]) -> Future[None]:
        """Run a function at once."""
        over: Future[None] = Future()
        try:
            function()
        except Exception as error:  # noqa: BLE001 - it is raised to whoever waits
            over.set_exception(error)
        else:
            over.set_result(None)
        return over

    def load(self, pairs: Pairs) -> None:
        """There is nothing to copy."""

    def spill(self, pairs: Pairs) -> None:
        """There is nothing to copy."""

    def start_load(self, pairs: Pairs) -> Copy:
        """There is nothing to copy, and that takes as long as the unit that runs."""
        del pairs
        return _Passing(self)

    def start_spill(self, pairs: Pairs) -> Copy:
        """There is nothing to copy, and that takes as long as the unit that runs."""
        del pairs
        return _Passing(self)

    def reach(self, source: Device) -> Reach:
        """As between those that both are like."""
        return self.like.reach(source.like) if isinstance(source, WeightlessDevice) else Reach.NONE

    def take_over(self, source: Device, pairs: Pairs) -> None:
        """There is nothing to copy."""

    def reclaim(self) -> int:
        """There is nothing to give back."""
        return 0

    def synchronize(self) -> None:
        """Nothing is ever pending."""

    def close(self) -> None:
        """Nothing has to be stopped."""
