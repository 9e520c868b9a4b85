"""`LinkMeter`: how fast a device's copies have been."""

from collections.abc import Iterable

_LEAST_BYTES = 64 * 1024  # of a copy that says something of the link: a smaller one is mostly what is done around it
_ENOUGH_BYTES = 1 << 20
_UNKNOWN_BYTES_PER_SECOND = 2e9  # a careful guess until then


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
