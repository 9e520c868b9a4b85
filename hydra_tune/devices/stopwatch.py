"""Stopwatches for device work: the host's clock on CPU devices, events on the compute stream on GPUs.

`Device.stopwatch` makes a device's stopwatch (`cpu.py`, `cuda.py`, `weightless.py`). `run_unit`
(`train/loop/batch_units.py`) runs a stopwatch around each unit, and `BatchUnits` there another around spills. `Worker`
(`pool/runtime/worker.py`) reads the end of a unit, and `planner/run/step_timer.py` makes a `CudaStopwatch` for planned graphs
on a GPU. The module must not know blocks, models or trials. A stopwatch belongs to one thread, and has no lock.

Note: a GPU runs behind the host, and a wait inside `running` would make the GPU idle between two pieces of work. So
`running` only records an event at either end of the work on the compute stream; `seconds` and `ended_ns` wait for the events
and read the events. Also, a thread that has waited for the GPU may get the interpreter lock milliseconds late; the events
exclude this delay.
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
        # Without `finally`: failed work raises here and is not counted.
        yield
        self.ended_ns = time.perf_counter_ns()
        self._running_ns += self.ended_ns - began_ns

    @property
    def seconds(self) -> float:
        """As of `DeviceStopwatch`."""
        return self._running_ns / 1e9


class CudaStopwatch:
    """Time on a GPU's stream from the first operator to the last, including waits for the host and for copies."""

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
        """As of `DeviceStopwatch`; waits for unfinished work."""
        self._read()
        return self._seconds

    @property
    def ended_ns(self) -> int:
        """As of `DeviceStopwatch`, exact if the stream was idle at the begin of the work; waits for unfinished work."""
        self._read()
        return self._ended_ns

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        for began_ns, begin, end in unread:
            end.synchronize()
            seconds = begin.elapsed_time(end) / 1000
            self._seconds += seconds
            # Events have no absolute time, so the end is computed from the host's time at the begin.
            self._ended_ns = began_ns + round(seconds * 1e9)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
