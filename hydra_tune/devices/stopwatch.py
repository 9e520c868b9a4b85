"""How long work takes where it runs: on the host by its clock, on a GPU by events on the stream that computes.

Note: a GPU is behind the host. What the host asks for takes it next to no time, so that its clock says nothing; and to wait for
the GPU after each piece of work would have it idle meanwhile. So an event stands at either end of the work on the stream that
computes it, and they are read when somebody asks for the seconds, which is at the end of a unit, when the GPU has done all. And
a thread that has waited for the GPU may get its turn with the interpreter milliseconds late, which the events do not count.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class WallStopwatch:
    """Time by the host's clock, as of `device.DeviceStopwatch`."""

    def __init__(self) -> None:
        self.ended_ns = 0
        self._running_ns = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """As of `DeviceStopwatch`."""
        began_ns = time.perf_counter_ns()
        yield
        self.ended_ns = time.perf_counter_ns()
        self._running_ns += self.ended_ns - began_ns

    @property
    def seconds(self) -> float:
        """As of `DeviceStopwatch`."""
        return self._running_ns / 1e9


class CudaStopwatch:
    """Time on a GPU's stream, from the first operator to the last, what it waits for the host and for copies included.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._ended_ns = 0
        self._unread: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """As of `DeviceStopwatch`."""
        began_ns, begin, end = time.perf_counter_ns(), _event(), _event()
        begin.record(torch.cuda.current_stream(self._device))
        yield
        end.record(torch.cuda.current_stream(self._device))
        self._unread.append((began_ns, begin, end))

    @property
    def seconds(self) -> float:
        """As of `DeviceStopwatch`; waits for what is still to be done."""
        self._read()
        return self._seconds

    @property
    def ended_ns(self) -> int:
        """As of `DeviceStopwatch`, if the stream had nothing to do when the work was begun; waits as well."""
        self._read()
        return self._ended_ns

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        for began_ns, begin, end in unread:
            end.synchronize()
            seconds = begin.elapsed_time(end) / 1000
            self._seconds += seconds
            self._ended_ns = began_ns + round(seconds * 1e9)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
