"""How long a planned step's graphs take where they run: on a CPU by the computing thread's time, on a GPU by its events.

Note: a GPU is behind the host. What the host asks for takes it next to no time, so that its clock says nothing; and to wait for
the GPU after each graph would have it idle meanwhile. So an event stands at either end of each graph on the stream that it
computes on, and they are read when somebody asks for the seconds, which is between two units, when the GPU has done all.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from hydra_tune.fusion.planner.copies import Copies


class Stopwatch(Protocol):
    """Adds up what it is running for."""

    def running(self) -> AbstractContextManager[None]:
        """Around one graph; one that fails does not count."""

    @property
    def seconds(self) -> float:
        """All in all."""


def stopwatch_for(device: torch.device, copies: Copies) -> Stopwatch:
    """That of a device.

    Args:
        device: of the computing.
        copies: of that device, for which the host may wait.
    """
    return CudaStopwatch(device) if device.type == "cuda" else HostStopwatch(copies)


class HostStopwatch:
    """CPU time of the calling thread, and what that waits for copies.

    Args:
        copies: that are made beside.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """As of `Stopwatch`."""
        began = time.thread_time() + self._copies.waited_seconds
        yield
        self._seconds += time.thread_time() + self._copies.waited_seconds - began

    @property
    def seconds(self) -> float:
        """As of `Stopwatch`."""
        return self._seconds


class CudaStopwatch:
    """Time on a GPU's stream, from a graph's first operator to its last, what it waits for the host and for copies included.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._unread: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """As of `Stopwatch`."""
        begin, end = _event(), _event()
        begin.record(torch.cuda.current_stream(self._device))
        yield
        end.record(torch.cuda.current_stream(self._device))
        self._unread.append((begin, end))

    @property
    def seconds(self) -> float:
        """As of `Stopwatch`; waits for what is still to be done."""
        unread, self._unread = self._unread, []
        for begin, end in unread:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1000
        return self._seconds


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
