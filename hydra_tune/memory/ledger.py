"""The ledger: how much of a device's budget is taken. Hard: what does not fit is not taken."""

import threading

from hydra_tune.errors import BudgetError
from hydra_tune.quantities import format_bytes


class Ledger:
    """Counts the bytes taken on one device.

    Args:
        name: the device's, for messages.
        budget_bytes: what one unit may need, and never exceeded, unless a device has proved to have more.

    Attributes:
        limit_bytes: what is taken as long as anything else can go: less than the budget once that has proved too much, and more
            where a device has proved to have it.
        used_bytes, peak_bytes: taken now, and at most so far.
        recent_peak_bytes: at most since somebody set it to what is taken.
    """

    def __init__(self, name: str, budget_bytes: int) -> None:
        self.name = name
        self.budget_bytes = budget_bytes
        self.limit_bytes = budget_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self.recent_peak_bytes = 0
        self._changed = threading.Condition()

    @property
    def most_bytes(self) -> int:
        """What is never exceeded."""
        return max(self.budget_bytes, self.limit_bytes)

    def try_take(self, nbytes: int, *, to_the_last: bool = False) -> bool:
        """Take bytes if they fit: the limit, or else the most there is."""
        with self._changed:
            if self.used_bytes + nbytes > (self.most_bytes if to_the_last else self.limit_bytes):
                return False
            self.used_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            self.recent_peak_bytes = max(self.recent_peak_bytes, self.used_bytes)
            return True

    def take(self, nbytes: int, what: str) -> None:
        """Take bytes that must fit.

        Raises:
            BudgetError: they do not.
        """
        if not self.try_take(nbytes, to_the_last=True):
            raise BudgetError(
                f"{what} needs {format_bytes(nbytes)} on device {self.name}, where {format_bytes(self.used_bytes)} of "
                f"{format_bytes(self.most_bytes)} are taken; raise device_memory or lower batch_size"
            )

    def give_back(self, nbytes: int) -> None:
        """Bytes taken before are free again."""
        with self._changed:
            self.used_bytes -= nbytes
            assert self.used_bytes >= 0, f"{self.name}: more given back than was taken"
            self._changed.notify_all()

    def wait_for_room(self, seconds: float) -> None:
        """Wait until something is given back, at most so long."""
        with self._changed:
            self._changed.wait(seconds)
