"""The makespan no schedule can beat: what schedules are measured against."""

from collections.abc import Iterable

from hydra_tune.errors import ConfigError


def makespan_bound(job_seconds: Iterable[float], num_devices: int) -> float:
    """Lower bound on the makespan of jobs that each run on one device at a time, all devices equally fast.

    Args:
        job_seconds: each job's total time in seconds, without transfers.
        num_devices: devices, at least 1.

    Returns:
        Seconds: the larger of the longest job and the total work spread evenly. 0 without jobs.

    Raises:
        ConfigError: fewer than 1 device.

    Source:
        McNaughton, Scheduling with Deadlines and Loss Functions (1959), which meets it by cutting jobs anywhere.
    """
    if num_devices < 1:
        raise ConfigError(f"num_devices must be at least 1, not {num_devices}")
    seconds = list(job_seconds)
    return max(sum(seconds) / num_devices, max(seconds, default=0.0))
