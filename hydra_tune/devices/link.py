"""How fast a device's copies are: measured, and as they are taken to be by whoever decides beforehand.

The latter is not measured: what is decided by a measurement is decided differently each time, and on a machine that does other
work besides one copy is as fast as ten others (note in `shard/estimate.py`). A link that was given a bandwidth has that.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.devices.device import Device

T = TypeVar("T")

_LARGE_BYTES, _SMALL_BYTES = 4 << 20, 64
_ROUNDS = 3
_MOST_BYTES = 64 << 20  # beyond what caches hold, and long against what a copy costs whatever its size
_PART = 4  # of a device's budget, for the two of its blocks that a measurement takes
_BYTES_PER_SECOND = 4e9  # of a core that copies memory which is in no cache
_SECONDS_PER_BLOCK = 2e-5  # of what is done for each copy around it


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What copies between a device and the host take.

    Attributes:
        bytes_per_second: of a large copy.
        seconds_per_block: of each copy, whatever its size.
    """

    bytes_per_second: float
    seconds_per_block: float = 0.0

    def seconds(self, nbytes: int, blocks: int) -> float:
        """Of copying so many blocks one way."""
        return nbytes / self.bytes_per_second + blocks * self.seconds_per_block


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """Bytes a second between a device and the host, of large copies.

    Attributes:
        to_device: copies that nothing goes against.
        to_host: likewise.
        both_ways: one of each at the same time, both counted.
    """

    to_device: float
    to_host: float
    both_ways: float


def link_of(device: Device) -> Link | None:
    """A device's link; None for a GPU, whose copies cannot be compared with seconds of the host.

    Args:
        device: where copies would be made.
    """
    if not isinstance(device, CpuDevice):
        return None
    pace = _BYTES_PER_SECOND if device.bandwidth is None else min(_BYTES_PER_SECOND, device.bandwidth)
    return Link(bytes_per_second=pace, seconds_per_block=_SECONDS_PER_BLOCK)


def measured_link(device: Device) -> Link:
    """A device's link, whatever it is.

    Args:
        device: of whose memory nothing is kept.
    """
    per_block = _seconds(device, _SMALL_BYTES)
    large = max(_seconds(device, _LARGE_BYTES) - per_block, 1e-9)
    return Link(bytes_per_second=_LARGE_BYTES / large, seconds_per_block=per_block)


def link_rates(device: Device) -> LinkRates:
    """Measure a device's link; takes a part of its memory meanwhile, 64 MiB twice at most.

    Args:
        device: no pool may be using it.
    """
    return _on_worker(device, lambda: _rates(device))


def crossing_rate(source: Device, target: Device) -> float:
    """Measure bytes a second from one device's memory to another's.

    Args:
        source: the device that has them.
        target: the device that takes them over; the source is in its reach.
    """
    nbytes = min(_size(source), _size(target))
    data = _on_worker(source, lambda: _zeros(source, nbytes))

    def measured() -> float:
        here = _zeros(target, nbytes)
        return nbytes / _fastest(lambda: target.take_over(source, [(data, here)]))

    return _on_worker(target, measured)


def _rates(device: Device) -> LinkRates:
    nbytes = _size(device)
    hosts = device.on_host(lambda: [device.host_empty(nbytes).zero_() for _ in range(2)])
    blocks = [_zeros(device, nbytes) for _ in range(2)]
    inward, outward = [(hosts[0], blocks[0])], [(blocks[1], hosts[1])]

    def both() -> None:
        copies = [device.start_load(inward), device.start_spill(outward)]
        for copy in copies:
            copy.wait()

    return LinkRates(
        to_device=nbytes / _fastest(lambda: device.load(inward)),
        to_host=nbytes / _fastest(lambda: device.spill(outward)),
        both_ways=2 * nbytes / _fastest(both),
    )


def _on_worker(device: Device, function: Callable[[], T]) -> T:
    """Run a function on a thread that is the device's worker for so long."""

    def run() -> T:
        with device.worker():
            return function()

    with ThreadPoolExecutor(1, f"hydra-measure-{device.name}") as thread:
        return thread.submit(run).result()


def _size(device: Device) -> int:
    return max(1, min(_MOST_BYTES, device.budget_bytes // _PART))


def _zeros(device: Device, nbytes: int) -> Tensor:
    """Device memory whose pages are there before they are copied to."""
    data = device.empty(nbytes).zero_()
    device.synchronize()
    return data


def _seconds(device: Device, nbytes: int) -> float:
    """The fastest of a few copies to the device."""
    host, data = device.on_host(lambda: device.host_empty(nbytes).zero_()), _zeros(device, nbytes)
    return _fastest(lambda: device.load([(host, data)]))


def _fastest(copy: Callable[[], None]) -> float:
    found = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        copy()
        found.append(time.perf_counter() - start)
    return max(min(found), 1e-9)
