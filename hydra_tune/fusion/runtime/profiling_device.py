"""`ProfilingDevice`: a device on which the planner profiles steps, representing all devices of its kind.

`DeviceReservations.stands` (`pool/devices/device_reservation.py`) offers a `ProfilingDevice` for each kind of GPU, or the
host where a pool has no GPU. `StepPlanner` (`step_planner.py`) enters `borrowed` while a step is laid out or profiled, on
whichever thread makes the plan. `host_of` stands for the CPU devices of a pool or a dry run;
`pool/dry_run/fusion_report.py` plans steps there, and `pool/dry_run/step_profiles.py` takes only the bandwidth.

Note: lock order. A thread must enter `borrowed` before the capture gate, as `pool/devices/device_reservation.py` explains, and
without the pool's lock.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.devices.device import Device


@dataclass(frozen=True, slots=True)
class ProfilingDevice:
    """A device to profile on.

    Attributes:
        rounding: bytes to which the device's allocator rounds, for plans that must fit real memory; 1: plans need not.
        borrowed: context manager entered around profiling, because the device otherwise belongs to the pool.
        bandwidth: bytes per second of a simulated link, over which swapped tensors are copied; None: no such link.
    """

    place: torch.device
    rounding: int = 1
    borrowed: Callable[[], AbstractContextManager[object]] = nullcontext
    bandwidth: float | None = None

    @property
    def is_host(self) -> bool:
        """Whether a profile takes the host's memory, and borrows no device."""
        return self.borrowed is nullcontext


HOST = ProfilingDevice(torch.device("cpu"))


def host_of(devices: Iterable[Device]) -> ProfilingDevice:
    """Return the host as the place for profiles of CPU devices, with the slowest of the devices' simulated links."""
    bandwidths = [
        device.bandwidth for device in devices if isinstance(device, CpuDevice) and device.bandwidth is not None
    ]
    return replace(HOST, bandwidth=min(bandwidths, default=None))
