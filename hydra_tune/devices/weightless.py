"""`WeightlessDevice`: stands for a device where only sizes count. Nothing is copied, and its memory is made by whoever asks.

Inside torch's `FakeTensorMode` that memory is none at all, so a step can be rehearsed on a device that is not there.

Note: its clock. Whoever runs units there moves `now` on by what they take. A copy that is waited for moves it on by itself;
one in the background is over when the clock has come so far: those are made one after the other, and on a link that all copies
share, one that is waited for goes before any that has not begun. Where nothing is known of copies, one in the background is
over when the unit is beside which it was begun.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from hydra_tune.devices.copying import Copy, Pairs
from hydra_tune.devices.cpu import CpuDevice, DefaultCpuGenerator
from hydra_tune.devices.device import Device, Reach
from hydra_tune.devices.link import Link
from hydra_tune.devices.stopwatch import WallStopwatch

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


class _Timed(Copy):
    """A copy in the background that takes its time."""

    def __init__(self, line: "_Line", asked: float, seconds: float) -> None:
        super().__init__(())
        self._line, self.asked, self.seconds = line, asked, seconds
        self.end: float | None = None  # once it has begun

    @property
    def is_over(self) -> bool:
        """Whether it is made by now."""
        self._line.catch_up()
        return self.end is not None and self.end <= self._line.device.now

    def cancel(self) -> bool:
        """Have it never begin."""
        self._line.catch_up()
        if self.end is not None:
            return False
        self._line.waiting.remove(self)
        return True

    def wait(self) -> None:
        """Wait until it is made."""
        device = self._line.device
        while self.end is None:
            self._line.begin_next()
        device.now = max(device.now, self.end)

    def wait_quietly(self) -> bool:
        """The same; it is made always."""
        self.wait()
        return True


class _Line:
    """The copies in the background that one device has to make, in their order."""

    def __init__(self, device: "WeightlessDevice") -> None:
        self.device = device
        self.waiting: deque[_Timed] = deque()
        self.free_at = 0.0

    def start(self, seconds: float) -> _Timed:
        """One more."""
        copy = _Timed(self, self.device.now, seconds)
        self.waiting.append(copy)
        return copy

    def begin_next(self) -> None:
        """The first of those that wait begins as soon as it can."""
        copy = self.waiting.popleft()
        copy.end = self.free_at = max(self.free_at, copy.asked) + copy.seconds

    def catch_up(self) -> None:
        """Those begin that would have by now."""
        while self.waiting and max(self.free_at, self.waiting[0].asked) <= self.device.now:
            self.begin_next()


class WeightlessDevice:
    """A device of the same name, budget and alignment as another one.

    Args:
        like: that one; it is left alone.
        link: what its copies take; None where that is not known.

    Attributes:
        like: the device it stands for.
        moment: units that have ended here; to be counted by whoever runs them.
        now: its clock, in seconds; to be moved on by whoever runs units.
    """

    def __init__(self, like: Device, link: Link | None = None) -> None:
        self.name = like.name
        self.torch_device = torch.device("cpu")
        self.budget_bytes = like.budget_bytes
        self.alignment = like.alignment
        self.shares_generator, self.is_host = like.shares_generator, like.is_host
        self.keeps_tensors = False
        self.generator = DefaultCpuGenerator()
        self.moment = 0
        self.now = 0.0
        self.like = like
        self._link = link
        self._is_shared = isinstance(like, CpuDevice) and like.link is not None
        self._line = _Line(self)

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
        """There is nothing to copy, and that takes its time."""
        self._make(pairs)

    def spill(self, pairs: Pairs) -> None:
        """There is nothing to copy, and that takes its time."""
        self._make(pairs)

    def start_load(self, pairs: Pairs) -> Copy:
        """There is nothing to copy, in the background."""
        return self._start(pairs)

    def start_spill(self, pairs: Pairs) -> Copy:
        """There is nothing to copy, in the background."""
        return self._start(pairs)

    def reach(self, source: Device) -> Reach:
        """As between those that both are like."""
        return self.like.reach(source.like) if isinstance(source, WeightlessDevice) else Reach.NONE

    def take_over(self, source: Device, pairs: Pairs) -> None:
        """There is nothing to copy, and that takes its time."""
        del source
        self._make(pairs)

    def stopwatch(self) -> WallStopwatch:
        """By the host's clock; nobody asks for its own."""
        return WallStopwatch()

    def unit_memory(self) -> None:
        """It has no memory."""

    def start_take_over(self, source: Device, pairs: Pairs) -> Copy:
        """There is nothing to copy, in the background."""
        del source
        return self._start(pairs)

    def reclaim(self) -> int:
        """There is nothing to give back."""
        return 0

    def synchronize(self) -> None:
        """Nothing is ever pending."""

    def close(self) -> None:
        """Nothing has to be stopped."""

    def _make(self, pairs: Pairs) -> None:
        if self._link is None:
            return
        line, seconds = self._line, self._seconds(self._link, pairs)
        line.catch_up()
        if self._is_shared:
            self.now = line.free_at = max(self.now, line.free_at) + seconds
        else:
            self.now += seconds

    def _start(self, pairs: Pairs) -> Copy:
        return _Passing(self) if self._link is None else self._line.start(self._seconds(self._link, pairs))

    @staticmethod
    def _seconds(link: Link, pairs: Pairs) -> float:
        return link.seconds(sum(target.nbytes for _, target in pairs), len(pairs))
