"""`Lender`: which devices a job may count on beside its own, and host memory for batches side by side."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping

from hydra_tune.devices.device import Device
from hydra_tune.memory.meter import bytes_per_second
from hydra_tune.memory.pager import Pager
from hydra_tune.pool.record import Record
from hydra_tune.schedule import Scheduler
from hydra_tune.train.ways import ONE_DEVICE, Offer


class Lender:
    """Answers trials whose steps could be split.

    Args:
        devices, pagers: the pool's, by name.
        records: its jobs.
        scheduler: its scheduler.
        capacity_bytes: host memory for all jobs, and disk beyond it.
        only_way: the only way in which steps are split, for tests and measurements; None: the fastest.
        changed: the pool's lock, notified when host memory is given back.
    """

    def __init__(
        self,
        devices: Mapping[str, Device],
        pagers: Mapping[str, Pager],
        records: Mapping[str, Record],
        scheduler: Scheduler,
        *,
        capacity_bytes: Callable[[], int],
        only_way: str | None,
        changed: threading.Condition,
    ) -> None:
        self.steps_by_way: Counter[str] = Counter()
        self._devices = devices
        self._pagers = pagers
        self._records = records
        self._scheduler = scheduler
        self._capacity_bytes = capacity_bytes
        self._only_way = only_way
        self._changed = changed

    def offer(self, record: Record) -> Offer | None:
        """The devices that could work for a job that runs a unit; None if it is over, or no device has nothing to do."""
        with self._changed:
            # A device whose unit of the step before has just ended may not have said so yet, and is the job's own till then.
            own = [device for device, job in self._scheduler.running.items() if job == record.job.key]
            idle = self._scheduler.idle_devices
            names = [name for name in self._devices if name in own or name in idle]
            if record.outcome is not None or not own or not names[1:]:
                return None
        return Offer(
            devices=tuple(names),
            budget_bytes=min(self._devices[name].budget_bytes for name in names),
            bytes_per_second=bytes_per_second(self._pagers[name].link for name in names),
            most_devices=len(self._devices),
            only=self._only_way,
        )

    def lend(self, record: Record, way: str, nbytes: int, most: int) -> int:
        """How many batches of a job may run side by side, as far as the host has room for them."""
        with self._changed:
            free = self._capacity_bytes() - sum(other.host_bytes for other in self._records.values())
            count = max(0, min(most - 1, free // max(1, nbytes)))
            record.lent_bytes += count * nbytes
            record.host_bytes += count * nbytes
            self.steps_by_way[way if count else ONE_DEVICE] += 1
            return 1 + count

    def take_back(self, record: Record) -> None:
        """The job's batches do not run side by side any more."""
        with self._changed:
            record.host_bytes -= record.lent_bytes
            record.lent_bytes = 0
            self._changed.notify_all()

    def declined(self, way: str) -> None:
        """A step that was counted as run this way runs on one device."""
        with self._changed:
            self.steps_by_way[way] -= 1
            self.steps_by_way[ONE_DEVICE] += 1


class JobHelpers:
    """What one job may ask; see `train/helpers.py`."""

    def __init__(self, lender: Lender, record: Record) -> None:
        self._lender = lender
        self._record = record

    def offer(self) -> Offer | None:
        """The devices that could work on the step that begins."""
        return self._lender.offer(self._record)

    def ask(self, way: str, nbytes: int, most: int) -> int:
        """How many batches may be under way at once."""
        return self._lender.lend(self._record, way, nbytes, most)

    def leave(self) -> None:
        """The step's batches have run."""
        self._lender.take_back(self._record)

    def decline(self, way: str) -> None:
        """The step runs on one device all the same."""
        self._lender.declined(way)
