"""How fast a device's copies are taken to be, by whoever decides beforehand.

Not measured: what is decided by a measurement is decided differently each time, and on a machine that does other work besides
one copy is as fast as ten others (note in `shard/estimate.py`). A link that was given a bandwidth has that.
"""

from dataclasses import dataclass

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.devices.device import Device

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


def link_of(device: Device) -> Link | None:
    """A device's link; None for a GPU, whose copies cannot be compared with seconds of the host.

    Args:
        device: where copies would be made.
    """
    if not isinstance(device, CpuDevice):
        return None
    pace = _BYTES_PER_SECOND if device.bandwidth is None else min(_BYTES_PER_SECOND, device.bandwidth)
    return Link(bytes_per_second=pace, seconds_per_block=_SECONDS_PER_BLOCK)
