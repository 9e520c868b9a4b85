"""`WeightlessDevice`: a stand-in for a device where only sizes count: copies move nothing, and nothing is sent to a GPU.

Inside torch's `FakeTensorMode`, the allocated memory takes no space. `pool/dry_run/report.py` makes the devices,
`TrialRehearsal` (`train/timing/fake_trial.py`) lays out a trial's blocks for such a device, and `PoolRehearsal`
(`pool/dry_run/executor.py`) runs units on the devices while `HydraExecutor.plan` forecasts a pool. The module must not know
blocks, models or trials. A device has no thread and no lock: one thread rehearses.

Note: virtual clock. `PoolRehearsal` advances `now` by the units' times. An awaited copy advances `now` itself, if the
cost of copies is known. A background copy is over when the clock has reached the copy's end. Background copies run in
sequence. On a link shared by all copies, an awaited copy overtakes every copy that has not begun. If the cost of copies
is unknown, a background copy ends with the unit beside which it began.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from hydra_tune.devices.copying import BackgroundCopy, Pairs
from hydra_tune.devices.cpu import CpuDevice, DefaultCpuGenerator
from hydra_tune.devices.device import Device, DeviceCopyRoute
from hydra_tune.devices.hardware.link import LinkCostModel
from hydra_tune.devices.stopwatch import WallStopwatch

T = TypeVar("T")


class _UntimedCopy(BackgroundCopy):
    """A background copy that ends with the unit beside which it began."""

    def __init__(self, device: "WeightlessDevice") -> None:
        super().__init__(())
        self._device, self._moment = device, device.moment

    @property
    def is_over(self) -> bool:
        """Whether the unit has ended."""
        return self._device.moment > self._moment

    def cancel(self) -> bool:
        """Return False: the copy has begun."""
        return False

    def wait(self) -> None:
        """Return at once: the copy takes no time."""

    def wait_quietly(self) -> bool:
        """Return True."""
        return True


class _TimedCopy(BackgroundCopy):
    """A background copy with a duration."""

    def __init__(self, line: "_TimedCopyQueue", asked: float, seconds: float) -> None:
        super().__init__(())
        self._line, self.asked, self.seconds = line, asked, seconds
        self.end: float | None = None  # time of the copy's end, known once the copy has begun

    @property
    def is_over(self) -> bool:
        """Whether the copy has ended by now."""
        self._line.catch_up()
        return self.end is not None and self.end <= self._line.device.now

    def cancel(self) -> bool:
        """Cancel the copy before its begin."""
        self._line.catch_up()
        if self.end is not None:
            return False
        self._line.waiting.remove(self)
        return True

    def wait(self) -> None:
        """Wait for the copy, by advancing the clock to the copy's end."""
        device = self._line.device
        while self.end is None:
            self._line.begin_next()
        device.now = max(device.now, self.end)

    def wait_quietly(self) -> bool:
        """Wait for the copy; return True."""
        self.wait()
        return True


class _TimedCopyQueue:
    """A device's queue of background copies, in order."""

    def __init__(self, device: "WeightlessDevice") -> None:
        self.device = device
        self.waiting: deque[_TimedCopy] = deque()
        self.free_at = 0.0

    def start(self, seconds: float) -> _TimedCopy:
        """Append a copy."""
        copy = _TimedCopy(self, self.device.now, seconds)
        self.waiting.append(copy)
        return copy

    def begin_next(self) -> None:
        """Begin the first waiting copy, at the earliest possible time."""
        # Not from `now`, which may be later: a copy may begin at any time between two looks at the queue.
        copy = self.waiting.popleft()
        copy.end = self.free_at = max(self.free_at, copy.asked) + copy.seconds

    def catch_up(self) -> None:
        """Begin all copies that would have begun by now."""
        while self.waiting and max(self.free_at, self.waiting[0].asked) <= self.device.now:
            self.begin_next()


class WeightlessDevice:
    """A device with the name, budget and alignment of another device.

    Args:
        like: the other device, which neither computes nor copies.
        link: cost of copies; None where unknown.

    Attributes:
        moment: number of units that have ended on the device; incremented by the caller that runs units.
        now: virtual clock in seconds; advanced by the caller that runs units, by awaited copies, and by waits for background
            copies.
    """

    def __init__(self, like: Device, link: LinkCostModel | None = None) -> None:
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
        self._line = _TimedCopyQueue(self)

    @contextmanager
    def worker(self) -> Iterator[None]:
        """Return an empty context: the device has no thread of its own."""
        yield

    def empty(self, nbytes: int) -> Tensor:
        """As of `Device`."""
        return torch.empty(nbytes, dtype=torch.uint8)

    host_empty = empty

    def on_host(self, function: Callable[[], T]) -> T:
        """Run a function at once."""
        return function()

    def start_on_host(self, function: Callable[[], None]) -> Future[None]:
        """Run a function at once."""
        ended_future: Future[None] = Future()
        try:
            function()
        except Exception as error:  # noqa: BLE001 - raised in the thread that waits
            ended_future.set_exception(error)
        else:
            ended_future.set_result(None)
        return ended_future

    def load(self, pairs: Pairs) -> None:
        """Advance the clock by the copy's time; nothing is copied."""
        self._make(pairs)

    spill = load

    def start_load(self, pairs: Pairs) -> BackgroundCopy:
        """Queue a background copy of nothing."""
        return self._start(pairs)

    start_spill = start_load

    def reach(self, source: Device) -> DeviceCopyRoute:
        """Return the copy route between the two real devices."""
        return self.like.reach(source.like) if isinstance(source, WeightlessDevice) else DeviceCopyRoute.NONE

    def take_over(self, source: Device, pairs: Pairs) -> None:
        """Advance the clock by the copy's time; nothing is copied."""
        del source
        self._make(pairs)

    def stopwatch(self) -> WallStopwatch:
        """Return a stopwatch on the host's clock, which the virtual clock ignores."""
        return WallStopwatch()

    def unit_memory(self) -> None:
        """Return None: there is no memory to measure."""

    def start_take_over(self, source: Device, pairs: Pairs) -> BackgroundCopy:
        """Queue a background copy of nothing."""
        del source
        return self._start(pairs)

    def reclaim(self) -> int:
        """Return 0: there is no memory to give back."""
        return 0

    def synchronize(self) -> None:
        """Do nothing: no work is ever pending."""

    def close(self) -> None:
        """Do nothing: there are no threads to stop."""

    def _make(self, pairs: Pairs) -> None:
        if self._link is None:
            return
        line, seconds = self._line, self._seconds(self._link, pairs)
        # First, so that background copies due by now begin before the awaited copy.
        line.catch_up()
        if self._is_shared:
            # Copies share the link: an awaited copy waits for the running one, and delays those that have not begun.
            self.now = line.free_at = max(self.now, line.free_at) + seconds
        else:
            self.now += seconds

    def _start(self, pairs: Pairs) -> BackgroundCopy:
        return _UntimedCopy(self) if self._link is None else self._line.start(self._seconds(self._link, pairs))

    @staticmethod
    def _seconds(link: LinkCostModel, pairs: Pairs) -> float:
        return link.seconds(sum(target.nbytes for _, target in pairs), len(pairs))
