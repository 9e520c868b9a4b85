"""How fast a device's copies are: measured once, where that tells something."""

import time
from dataclasses import dataclass

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.devices.device import Device

_LARGE_BYTES, _SMALL_BYTES = 4 << 20, 64
_ROUNDS = 3


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


def link_of(device: Device) -> Link | None:
    """A device's link; None for a GPU, whose copies cannot be compared with seconds measured on the host.

    Args:
        device: where copies are made; of a CPU device's memory nothing is kept.
    """
    return measured_link(device) if isinstance(device, CpuDevice) else None


def measured_link(device: Device) -> Link:
    """A device's link, whatever it is.

    Args:
        device: as of `link_of`.
    """
    per_block = _seconds(device, _SMALL_BYTES)
    large = max(_seconds(device, _LARGE_BYTES) - per_block, 1e-9)
    return Link(bytes_per_second=_LARGE_BYTES / large, seconds_per_block=per_block)


def _seconds(device: Device, nbytes: int) -> float:
    """The fastest of a few copies to the device."""
    host, data = device.on_host(lambda: device.host_empty(nbytes).zero_()), device.empty(nbytes)
    data.zero_()  # its pages are there before they are copied to
    found = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        device.load([(host, data)])
        found.append(time.perf_counter() - start)
    return min(found)
