"""A CPU device that is lost: from a chosen call on it raises at whatever it is asked, as a GPU does after a sticky error."""

import threading
from unittest import mock

from hydra_tune.devices.cpu import CpuDevice

MESSAGE = "CUDA error: an illegal memory access was encountered"
OPENED = "hydra_tune.devices.hardware.discovery.CpuDevice"
_opened = {}


class LosableDevice(CpuDevice):
    """`lose_at(n)`: from its nth call of any kind on."""

    def __init__(self, index, budget_bytes, link_bandwidth=None):
        super().__init__(index, budget_bytes, link_bandwidth)
        self.num_calls, self._left, self._lock = 0, None, threading.Lock()
        # No plain value: a trial that begins again puts those back that its functions can reach.
        self._lost = threading.Event()

    @property
    def is_lost(self):
        return self._lost.is_set()

    def lose_at(self, calls):
        with self._lock:
            self._left = calls

    def _call(self):
        with self._lock:
            self.num_calls += 1
            if self._left is not None:
                self._left -= 1
                if self._left < 0:
                    self._lost.set()
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


def _made(index, *arguments):
    _opened[index] = LosableDevice(index, *arguments)
    return _opened[index]


def losable(monkeypatch):
    """Have pools open such devices; returns them by index, the last opened of each."""
    _opened.clear()
    monkeypatch.setattr(OPENED, _made)
    return _opened


def always_losable():
    """Have all pools of this process open such devices from now on."""
    mock.patch(OPENED, _made).start()


def lose_all():
    """Lose the devices of this process at once, as an illegal access by one trial does with all GPUs; seen at a later call."""
    for device in _opened.values():
        device.lose_at(0)


def fail_with_own():
    """Lose the device of this thread, and the others somewhat later."""
    for device in _opened.values():
        device.lose_at(0 if threading.current_thread().name == f"hydra-{device.name}" else 8)
    raise RuntimeError(MESSAGE)


def fail_with_all():
    """Lose the devices of this process, seen at once."""
    lose_all()
    raise RuntimeError(MESSAGE)


def fail_otherwise_with_all():
    """The same, in code that has an error of its own for it."""
    lose_all()
    raise ValueError("no such step")
