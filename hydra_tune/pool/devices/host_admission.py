"""Admission of a job's state to host memory, and to the disk beyond.

`JobPreparer` (`pool/runtime/preparer.py`) waits for `has_room` once a job's model is built and cut, before the job's
first unit, and calls `has_room` under the pool's lock; `Pool.stats` (`pool/pool.py`) calls `disk_stats`. The module must not
choose units or advance a trial.
"""

from collections.abc import Iterable

from hydra_tune.errors import BudgetError
from hydra_tune.memory.host.host_tier import HostTier
from hydra_tune.pool.runtime.job_state import JobState, granted_bytes
from hydra_tune.pool.stats import DiskStats
from hydra_tune.quantities import format_bytes, format_bytes_up


def has_room(record: JobState, others: Iterable[JobState], host_bytes: int, host: HostTier | None) -> bool:
    """Grant a job its host memory if there is room beside the other jobs. Under the pool's lock.

    A granted job's record gets `host_bytes` and `shared`. False: there may be room once other jobs have given memory back.

    Raises:
        BudgetError: the job would not fit even alone, or host memory cannot hold the part that must not go to disk.
    """
    assert record.trial is not None
    capacity = host_bytes if host is None else host.capacity_bytes
    shared = record.trial.shared_files
    own_bytes, shared_bytes = record.trial.host_bytes, sum(shared.values())
    if own_bytes + shared_bytes > capacity:
        raise BudgetError(_refusal(record.job.name, own_bytes + shared_bytes, capacity, host_bytes, host))
    others = [other for other in others if other is not record]
    present = {file for other in others for file in other.shared}
    missing_bytes = sum(nbytes for file, nbytes in shared.items() if file not in present)
    if own_bytes + missing_bytes + granted_bytes(others) > capacity:
        return False
    if host is not None:
        # The disk takes the rest, but host memory has to hold what cannot go to disk, and the largest block on its way.
        fixed, largest = record.trial.fixed_host_bytes, record.trial.largest_host_bytes
        host.check(shared_bytes + fixed + largest)
        if not host.admit(record.tenant, fixed, largest, shared):
            return False
    record.host_bytes, record.shared = own_bytes, shared
    return True


def _refusal(name: str, need: int, capacity: int, host_bytes: int, host: HostTier | None) -> str:
    if host is None:
        return (
            f"the state of {name!r} needs {format_bytes(need)} of host memory, more than the {format_bytes(host_bytes)} the "
            f"pool may use; raise host_memory to at least {format_bytes_up(need)}, or give spill_dir, a folder on disk where "
            "the rest can go"
        )
    return (
        f"the state of {name!r} needs {format_bytes(need)}, more than the {format_bytes(host_bytes)} of host memory the pool "
        f"may use and the {format_bytes(capacity - host_bytes)} free in {str(host.disk.folder.path.parent)!r} together; make "
        f"room there for at least {format_bytes_up(need - host_bytes)}, or raise host_memory"
    )


def disk_stats(host: HostTier) -> DiskStats:
    """Return the statistics of the host tier, for its memory and its disk."""
    disk = host.disk
    return DiskStats(
        host_budget_bytes=host.ledger.budget_bytes,
        host_peak_bytes=host.ledger.peak_bytes,
        bytes_read=disk.bytes_read,
        bytes_written=disk.bytes_written,
        stored_bytes=disk.stored_bytes,
        busy_seconds=disk.seconds,
        is_direct=disk.is_direct,
    )
