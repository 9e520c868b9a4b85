"""Reproducible data kept on a device for speed; released before the pager spills any block.

A unit's `Lease` (`lease.py`) takes the room while the unit runs, for example for a recorded CUDA graph. The `Pager`
(`pager.py`) has data freed when a unit needs room.
"""

import threading
from collections.abc import Callable

from hydra_tune.memory.ledger import MemoryLedger


class DeviceCacheReservation:
    """Room on a device for such data.

    Args:
        caches: all reservations of the device.
        nbytes: bytes taken on the ledger of the device.
        let_go: frees the kept data; called on the device's worker thread, between units or before a unit computes.
    """

    def __init__(self, caches: "DeviceCaches", nbytes: int, let_go: Callable[[], None]) -> None:
        self.nbytes = nbytes
        self.let_go = let_go
        self._caches = caches

    def release(self) -> None:
        """Give the room back after the data is gone; further calls do nothing."""
        self._caches.part_with(self)


class DeviceCaches:
    """The reservations of one device.

    Args:
        ledger: counts the bytes.
    """

    def __init__(self, ledger: MemoryLedger) -> None:
        self._ledger = ledger
        self._held: list[DeviceCacheReservation] = []
        self._lock = threading.Lock()

    def hold(self, nbytes: int, let_go: Callable[[], None]) -> DeviceCacheReservation | None:
        """Take room if nothing has to be spilled for the room; return None if there is no room.

        Args:
            nbytes: bytes to take.
            let_go: frees the data, as of `DeviceCacheReservation`.
        """
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
