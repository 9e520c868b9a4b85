"""Speed of a device's copies: `LinkMeter` measures running pools, `CopyTimes` serves predictions.

`Pager` (`pager.py`) adds copies over the link, made while a thread waits, to a `LinkMeter`.
`pool/devices/idle_devices.py` reads the pace when a trial asks for further devices, and `train/loop/burst.py` to choose
the length of a trial's turn. `train/timing/step_timing.py` fills `CopyTimes` while steps are timed for a forecast.
`Pager` and `Lease` (`lease.py`) call the methods of a `CopyLog`.

Note: threads. A `LinkMeter` has no lock, although several threads read and add, because the pace is an estimate. The module
must not know models or steps.
"""

import statistics
from collections.abc import Iterable
from typing import Protocol

from hydra_tune.devices.hardware.link import LinkCostModel

_LEAST_BYTES = 64 * 1024  # smallest copy that reveals the pace of the link; overhead dominates smaller copies
_SMALL_BYTES = 4096  # largest copy that consists of overhead only
_ENOUGH_BYTES = 1 << 20
_UNKNOWN_BYTES_PER_SECOND = 2e9  # careful guess until enough bytes (`_ENOUGH_BYTES`) are copied


class CopyLog(Protocol):
    """Receiver of a pager's copies: `EventLog` (`observe/event_log/writer.py`), or `CopyTimes`."""

    def copied(
        self,
        device: str,
        what: str,
        owner: int | None,
        kind: str,
        shard: int | None,
        nbytes: int,
        how: str,
        start_ns: int,
        end_ns: int,
    ) -> None:
        """Note a finished copy; see `EventLog.copied`."""

    def waited(self, device: str, start_ns: int, end_ns: int) -> None:
        """Note that this thread has waited for a background copy."""

    def saved(self, device: str, bytes_in: int, bytes_out: int) -> None:
        """Note that a unit has had activations kept on the host."""

    def updated_on_host(self, device: str, owner: int, shard: int, start_ns: int, end_ns: int) -> None:
        """Note an update of a shard on the host beside a device."""


class CopyTimes:
    """Collects the times of copies that a unit waited for, and predicts the times of other copies."""

    def __init__(self) -> None:
        self._found: list[tuple[int, float]] = []

    def copied(
        self,
        device: str,
        what: str,
        owner: int | None,
        kind: str,
        shard: int | None,
        nbytes: int,
        how: str,
        start_ns: int,
        end_ns: int,
    ) -> None:
        """Note a finished copy; see `EventLog.copied`. Only copies that a unit waited for count."""
        del device, what, owner, kind, shard
        if how == "waited":
            self._found.append((nbytes, (end_ns - start_ns) / 1e9))

    def waited(self, device: str, start_ns: int, end_ns: int) -> None:
        """Ignore waits for background copies: the wait does not tell the time of the copy."""

    def saved(self, device: str, bytes_in: int, bytes_out: int) -> None:
        """Ignore activations kept on the host: their copies are part of the unit's time."""

    def updated_on_host(self, device: str, owner: int, shard: int, start_ns: int, end_ns: int) -> None:
        """Ignore updates on the host: an update is no copy."""

    def link(self, guess: LinkCostModel) -> LinkCostModel:
        """Return the measured link: the median time of small copies, and the median pace of large copies."""
        small = [seconds for nbytes, seconds in self._found if nbytes <= _SMALL_BYTES]
        per_block = statistics.median(small) if small else guess.seconds_per_block
        large = [(nbytes, seconds) for nbytes, seconds in self._found if nbytes >= _LEAST_BYTES]
        # At least a tenth of the time counts as transfer, so that noise in the overhead cannot make the pace infinite
        # or negative.
        paces = [nbytes / max(seconds - per_block, seconds / 10) for nbytes, seconds in large]
        pace = statistics.median(paces) if paces else guess.bytes_per_second
        return LinkCostModel(bytes_per_second=pace, seconds_per_block=per_block)


class LinkMeter:
    """Bytes and seconds of a device's copies, counting only copies large enough to reveal the pace of the link."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.seconds = 0.0

    def copied(self, nbytes: int, seconds: float) -> None:
        """Add a copy of `nbytes` bytes with its `seconds`."""
        if nbytes >= _LEAST_BYTES:
            self.nbytes += nbytes
            self.seconds += seconds


def bytes_per_second(meters: Iterable[LinkMeter]) -> float:
    """Mean pace of several devices' links in bytes per second; a guess before enough bytes are copied."""
    link_meters = list(meters)
    nbytes, seconds = sum(meter.nbytes for meter in link_meters), sum(meter.seconds for meter in link_meters)
    return nbytes / seconds if nbytes >= _ENOUGH_BYTES and seconds > 0 else _UNKNOWN_BYTES_PER_SECOND
