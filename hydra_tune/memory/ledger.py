"""The ledger: counts the taken part of the budget of a device or of the host. A hard limit, unless a `HostLedger` is overdrawn.

`Pager` (`pager.py`) takes bytes before a block or a unit's workspace comes to the device, and `prefetch.py` before a block
comes ahead of its unit; the pager lowers or raises the limit (`limit_bytes`). `HostTier` (`memory/host/host_tier.py`) takes
bytes before each host copy, of a ledger that may be overdrawn (`HostLedger`), and `PoolCheckpointWriter`
(`pool/checkpointing/writer.py`) takes bytes of that ledger for a copy to write. `LedgerFitter`
(`pool/devices/library_memory.py`) sets `recent_peak_bytes` before a unit, and `Worker` reads `most_bytes`. `GroupCaptureCache`
(`fusion/compile/cuda_graph_steps.py`) has a `Lease` (`lease.py`) hold a `DeviceCacheReservation` for a recording. The module
must not choose a victim or copy a byte: the pager and the host tier do.

Note: locks. No other lock is taken, and no function of others is called, while a lock of this module is held.
"""

import threading
from collections.abc import Callable


class MemoryLedger:
    """Counts the bytes taken on a single device or on the host. Safe to call on any thread.

    Args:
        budget_bytes: most bytes for a single unit, and never exceeded unless a device has proved to have more, or a
            `HostLedger` is overdrawn.

    Attributes:
        limit_bytes: most bytes taken while other bytes can be freed: below the budget once the budget has proved too
            much, above the budget if a device has proved to have more.
        recent_peak_bytes: most bytes taken since a caller set the value to the bytes taken; overdrawn bytes do not count.
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
        """Bytes that `try_take` never exceeds."""
        return max(self.budget_bytes, self.limit_bytes)

    def try_take(self, nbytes: int, *, to_the_last: bool = False) -> bool:
        """Take bytes within the limit, or with `to_the_last` within `most_bytes`; return whether the bytes are taken."""
        with self._changed:
            if self.used_bytes + nbytes > (self.most_bytes if to_the_last else self.limit_bytes):
                return False
            self.used_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            self.recent_peak_bytes = max(self.recent_peak_bytes, self.used_bytes)
            return True

    def give_back(self, nbytes: int) -> None:
        """Free bytes taken before, and wake waiting threads."""
        with self._changed:
            self.used_bytes -= nbytes
            assert self.used_bytes >= 0, f"{self.name}: more given back than was taken"
            # All threads wake up: a small request may fit where the first waiting request does not.
            self._changed.notify_all()

    def wait_for_room(self, seconds: float) -> None:
        """Wait until another thread gives bytes back, for at most `seconds`."""
        with self._changed:
            self._changed.wait(seconds)


class DeviceCacheReservation:
    """Room on a device for reproducible data kept for speed, which is released before the pager spills any block.

    A unit's `Lease` (`lease.py`) takes the room while the unit runs, for example for a recorded CUDA graph. The `Pager`
    (`pager.py`) has the data freed when a unit needs room.

    Args:
        let_go: frees the kept data; called by the thread in need of the room: by the device's worker between units, before
            a unit computes or as a unit's lease grows, or by a borrower of the device.
    """

    def __init__(self, caches: "DeviceCaches", nbytes: int, let_go: Callable[[], None]) -> None:
        self.nbytes = nbytes
        self.let_go = let_go
        self._caches = caches

    def release(self) -> None:
        """Give the room back after the data is gone; further calls do nothing."""
        self._caches.part_with(self)


class DeviceCaches:
    """The reservations of one device."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self._ledger = ledger
        self._held: list[DeviceCacheReservation] = []
        self._lock = threading.Lock()

    def hold(self, nbytes: int, let_go: Callable[[], None]) -> DeviceCacheReservation | None:
        """Take room if nothing has to be spilled for the room; return None if there is no room."""
        if not self._ledger.try_take(nbytes):
            return None
        reservation = DeviceCacheReservation(self, nbytes, let_go)
        with self._lock:
            self._held.append(reservation)
        return reservation

    def part_with(self, held: DeviceCacheReservation) -> None:
        """Give the room of `held` back, unless the room was given back before."""
        with self._lock:
            if held not in self._held:
                return
            self._held.remove(held)
        self._ledger.give_back(held.nbytes)

    def let_go(self) -> bool:
        """Free the oldest of the held data; return False if there is none."""
        with self._lock:
            reservation = next(iter(self._held), None)
        if reservation is None:
            return False
        # Outside the lock: `let_go` may free device memory and call back into the pager.
        reservation.let_go()
        reservation.release()
        return True
