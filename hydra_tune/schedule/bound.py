"""Lower bounds on the makespan, the yardstick for schedules.

`pool/views/eta.py` bounds a running sweep at each forecast, `simulate/engine/simulator.py` at the end a simulated run on
devices that stay equally fast, and `simulate/optimal.py` the best schedule before the search. `benchmarks/locality.py` and
`benchmarks/schedule.py` compare makespans with the bound, and `benchmarks/settings.py` bounds schedules on devices of unequal
speed. The bounds leave out transfers, so no schedule of such jobs can end earlier.
"""

import math
from collections.abc import Iterable

from hydra_tune.errors import ConfigError


def makespan_bound(job_seconds: Iterable[float], num_devices: int) -> float:
    """Lower bound on the makespan of jobs that each run on one device at a time, all devices equally fast.

    Args:
        job_seconds: each job's total time in seconds, without transfers.
        num_devices: number of devices, at least 1.

    Returns:
        Seconds: the larger of the longest job and the total work spread evenly. 0 without jobs.

    Raises:
        ConfigError: fewer than 1 device, or a time that is negative or not finite.

    Source:
        McNaughton, Scheduling with Deadlines and Loss Functions (1959): cutting jobs anywhere attains the bound.
    """
    if num_devices < 1:
        raise ConfigError(f"num_devices must be at least 1, not {num_devices}")
    seconds = _longest_first(job_seconds)
    return max(sum(seconds) / num_devices, max(seconds, default=0.0))


def uneven_makespan_bound(job_seconds: Iterable[float], device_speeds: Iterable[float]) -> float:
    """Lower bound on the makespan of jobs that each run on one device at a time, on devices of unequal speed.

    With every speed 1, the bound equals `makespan_bound` up to rounding.

    Args:
        job_seconds: each job's total time in seconds on a device of speed 1, without transfers.
        device_speeds: speed of each device relative to speed 1, at least one device.

    Returns:
        Seconds: the largest of total work / total speed and, for each k below the number of devices, work of the k
        longest jobs / speed of the k fastest devices. 0 without jobs.

    Raises:
        ConfigError: no device, a speed that is not a positive number, or a time that is negative or not finite.

    Source:
        Horvath, Lam and Sethi, A Level Algorithm for Preemptive Scheduling (1977): cutting jobs anywhere attains the
            bound.
    """
    speeds = sorted(device_speeds, reverse=True)
    if not speeds:
        raise ConfigError("device_speeds is empty, expected the speed of at least 1 device")
    for speed in speeds:
        if not 0 < speed < math.inf:
            raise ConfigError(
                f"a device's speed must be a positive number, not {speed}; leave out a device that is lost"
            )
    seconds = _longest_first(job_seconds)
    bound = sum(seconds) / sum(speeds)
    work = fast = 0.0
    for job, speed in zip(seconds, speeds, strict=False):  # beyond the shorter of the two, k adds nothing
        work += job
        fast += speed
        bound = max(bound, work / fast)
    return bound


def _longest_first(job_seconds: Iterable[float]) -> list[float]:
    seconds = sorted(job_seconds, reverse=True)
    for job in seconds:
        if not 0 <= job < math.inf:
            raise ConfigError(f"a job's time must be a finite number of seconds from 0, not {job}")
    return seconds
