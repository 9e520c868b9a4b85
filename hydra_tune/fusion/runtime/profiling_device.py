"""`ProfilingDevice`: a device on which the planner profiles steps, representing all devices of its kind.

`DeviceReservations` (`pool/devices/device_reservation.py`) offers a `ProfilingDevice` of each kind; `StepPlanner`
(`step_planner.py`) borrows the device while a step is laid out or profiled.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ProfilingDevice:
    """A device to profile on.

    Attributes:
        place: the torch device of the profiled tensors.
        rounding: bytes to which the device's allocator rounds, for plans that must fit real memory; 1: plans need not.
        borrowed: context manager entered around profiling, because the device otherwise belongs to the pool.
    """

    place: torch.device
    rounding: int = 1
    borrowed: Callable[[], AbstractContextManager[object]] = nullcontext


HOST = ProfilingDevice(torch.device("cpu"))
