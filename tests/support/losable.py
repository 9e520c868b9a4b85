"""A CPU device that is lost: from a chosen call on it raises at whatever it is asked, as a GPU does after a sticky error."""

import threading

from hydra_tune.devices.cpu import CpuDevice

MESSAGE = "CUDA error: an illegal memory access was encountered"


class LosableDevice(CpuDevice):
    """`lose_at(n)`: from its nth call of any kind on."""

    def __init__(self, index, budget_bytes, link_bandwidth=None):
        super().__init__(index, budget_bytes, link_bandwidth)
        self.num_calls, self.is_lost, self._left, self._lock = 0, False, None, threading.Lock()

    def lose_at(self, calls):
        with self._lock:
            self._left = calls

    def _call(self):
        with self._lock:
            self.num_calls += 1
            if self._left is not None:
                self._left -= 1
                self.is_lost = self.is_lost or self._left < 0
            if self.is_lost:
                raise RuntimeError(MESSAGE)

    def empty(self, nbytes):
        self._call()
        return super().empty(nbytes)

    def _send(self, pairs, *, is_waited_for):
        self._call()
        super()._send(pairs, is_waited_for=is_waited_for)

    def _take(self, source, pairs, *, is_waited_for):
        self._call()
        source._call()
        super()._take(source, pairs, is_waited_for=is_waited_for)

    def synchronize(self):
        self._call()
        super().synchronize()

    def reclaim(self):
        self._call()
        return super().reclaim()


def losable(monkeypatch):
    """Have pools open such devices; returns them by index, the last opened of each."""
    opened = {}

    def made(index, *arguments):
        opened[index] = LosableDevice(index, *arguments)
        return opened[index]

    monkeypatch.setattr("hydra_tune.devices.hardware.discovery.CpuDevice", made)
    return opened
