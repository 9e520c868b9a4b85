"""Time of a planned step's graphs: on a CPU, the computing thread's CPU time and waits for copies; on a GPU, events.

`MergedGraphRunner` (`runner.py`) times each graph with the stopwatch of its device. `fusion/runtime/planned_unit.py` and
`fusion/runtime/paired_unit.py` read the seconds after each unit, through `DeviceStepRunner`
(`fusion/runtime/planned_executor.py`), for `StepPlanAutotuner` (`fusion/runtime/plan_autotuner.py`) to compare plans. A
stopwatch has no lock: the thread that runs the graphs starts and stops the stopwatch.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hydra_tune.devices.stopwatch import CudaStopwatch
from hydra_tune.planner.run.copy_engine import CopyEngine


class HostStopwatch:
    """CPU time of the calling thread, with the time that the thread waits for copies.

    Attributes:
        seconds: seconds in all.
    """

    def __init__(self, copies: CopyEngine) -> None:
        self._copies = copies
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Return a context around a graph; a graph that fails does not count."""
        # CPU time leaves out other work on the machine. A wait for a copy takes no CPU time, and delays the step all
        # the same.
        began = time.thread_time() + self._copies.waited_seconds
        yield
        # Not in a `finally`: a graph that fails must not count.
        self.seconds += time.thread_time() + self._copies.waited_seconds - began


def stopwatch_for(device: torch.device, copies: CopyEngine) -> HostStopwatch | CudaStopwatch:
    """Return the stopwatch of a device."""
    return CudaStopwatch(device) if device.type == "cuda" else HostStopwatch(copies)
