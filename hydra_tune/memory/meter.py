"""How fast a device's copies have been: `LinkMeter` for whoever runs, `CopyTimes` for whoever wants to know it beforehand."""

import statistics
from collections.abc import Iterable
from typing import Protocol

from hydra_tune.devices.link import Link

_LEAST_BYTES = 64 * 1024  # of a copy that says something of the link: a smaller one is mostly what is done around it
_SMALL_BYTES = 4096  # of a copy that is nothing but what is done around it
_ENOUGH_BYTES = 1 << 20
_UNKNOWN_BYTES_PER_SECOND = 2e9  # a careful guess until then


class CopyLog(Protocol):
    """What a pager tells of its copies; `EventLog` is one."""

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
        """A copy has been made; see `EventLog.copied`."""

    def waited(self, device: str, start_ns: int, end_ns: int) -> None:
        """This thread has waited for a copy in the background."""

    def saved(self, device: str, bytes_in: int, bytes_out: int) -> None:
        """A unit has had activations kept on the host."""

    def updated_on_host(self, device: str, owner: int, shard: int, start_ns: int, end_ns: int) -> None:
        """A shard has been updated on the host, beside a device."""


class CopyTimes:
    """Keeps what copies that were waited for have taken, and says what others will take."""

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
        """A copy has been made; see `EventLog.copied`."""
        del device, what, owner, kind, shard
        if how == "waited":
            self._found.append((nbytes, (end_ns - start_ns) / 1e9))

    def waited(self, device: str, start_ns: int, end_ns: int) -> None:
        """This thread has waited for a copy in the background, which tells nothing of the copy."""

    def saved(self, device: str, bytes_in: int, bytes_out: int) -> None:
        """A unit has had activations kept on the host, which is part of its time."""

    def updated_on_host(self, device: str, owner: int, shard: int, start_ns: int, end_ns: int) -> None:
        """An update has been made on the host, which is no copy."""

    def link(self, guess: Link) -> Link:
        """What copies take, as far as enough have been seen: the median of the small ones, and of the others' pace.

        Args:
            guess: taken for what has not been seen.
        """
        small = [seconds for nbytes, seconds in self._found if nbytes <= _SMALL_BYTES]
        per_block = statistics.median(small) if small else guess.seconds_per_block
        large = [(nbytes, seconds) for nbytes, seconds in self._found if nbytes >= _LEAST_BYTES]
        paces = [nbytes / max(seconds - per_block, seconds / 10) for nbytes, seconds in large]
        pace = statistics.median(paces) if paces else guess.bytes_per_second
        return Link(bytes_per_second=pace, seconds_per_block=per_block)


class LinkMeter:
    """Bytes and seconds of one device's copies, those of a size that says something of its link."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.seconds = 0.0

    def copied(self, nbytes: int, seconds: float) -> None:
        """A copy has taken so long."""
        if nbytes >= _LEAST_BYTES:
            self.nbytes += nbytes
            self.seconds += seconds


def bytes_per_second(meters: Iterable[LinkMeter]) -> float:
    """The mean pace of several devices' links; a guess before they have copied enough."""
    found = list(meters)
    nbytes, seconds = sum(meter.nbytes for meter in found), sum(meter.seconds for meter in found)
    return nbytes / seconds if nbytes >= _ENOUGH_BYTES and seconds > 0 else _UNKNOWN_BYTES_PER_SECOND
