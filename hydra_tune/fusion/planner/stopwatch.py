"""How long a planned step's graphs take where they run: on a CPU by the computing thread's time, on a GPU by its events."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from hydra_tune.devices.stopwatch import CudaStopwatch
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
