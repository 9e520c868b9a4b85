"""`PoolDeviceLender`: offers a job other idle devices and host memory, for running batches side by side.

`JobPreparer` (`pool/runtime/preparer.py`) gives each trial a `JobDeviceLender`. A `SingleTrial` (`train/single_trial.py`)
asks for devices before an optimizer step of several batches, once the random draws of the step's plan are known
(`arrange` in `train/parallel/step_strategy.py`). With `parallel="none"`, or where no batch may run on another device, the
trial asks for host memory alone. An offer reserves no device: the scheduler alone gives devices to units. `Pool`
(`pool/pool.py`) reads `steps_by_way` for the statistics. Each change is made under the pool's lock. The module must not
choose units or advance a trial.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping

from hydra_tune.devices.device import Device
from hydra_tune.memory.link_meter import bytes_per_second
from hydra_tune.memory.pager import Pager
from hydra_tune.pool.runtime.job_state import JobState, granted_bytes
from hydra_tune.schedule import Scheduler
from hydra_tune.train.parallel.cost_model import ONE_DEVICE, DeviceOffer


class PoolDeviceLender:
    """Answers trials whose steps can be split over devices.

    Args:
        capacity_bytes: returns host memory for all jobs in bytes, the disk included.
        changed: lock of the pool, notified when host memory is given back.
    """

    def __init__(
        self,
        devices: Mapping[str, Device],
        pagers: Mapping[str, Pager],
        records: Mapping[str, JobState],
        scheduler: Scheduler,
        *,
        capacity_bytes: Callable[[], int],
        changed: threading.Condition,
    ) -> None:
        self.steps_by_way: Counter[str] = Counter()
        self._devices = devices
        self._pagers = pagers
        self._records = records
        self._scheduler = scheduler
        self._capacity_bytes = capacity_bytes
        self._changed = changed

    def offer(self, record: JobState) -> DeviceOffer | None:
        """Return the devices available to a job; None if the job is over, runs no unit now, or would have a single device."""
        with self._changed:
            # A device whose unit of the previous step has just ended may not have reported the end yet; such a device
            # still counts as the job's own.
            own_devices = [device for device, job in self._scheduler.running.items() if job == record.job.key]
            idle = self._scheduler.idle_devices
            names = [name for name in self._devices if name in own_devices or name in idle]
            if record.outcome is not None or not own_devices or not names[1:]:
                return None
        return DeviceOffer(
            devices=tuple(names),
            budget_bytes=min(self._devices[name].budget_bytes for name in names),
            bytes_per_second=bytes_per_second(self._pagers[name].link for name in names),
            most_devices=len(self._devices),
        )

    def lend(self, record: JobState, way: str, nbytes: int, most: int) -> int:
        """Grant host memory for batches side by side, and return how many batches may run at the same time."""
        with self._changed:
            free = self._capacity_bytes() - granted_bytes(self._records.values())
            # The first batch needs no loan: the job's own host memory covers a single batch.
            count = max(0, min(most - 1, free // max(1, nbytes)))
            # Also part of `host_bytes`, by which the preparer and other loans see what is taken.
            record.lent_bytes += count * nbytes
            record.host_bytes += count * nbytes
            self.steps_by_way[way if count else ONE_DEVICE] += 1
            return 1 + count

    def take_back(self, record: JobState) -> None:
        """Take back the host memory lent to a job, after its batches have run."""
        with self._changed:
            record.host_bytes -= record.lent_bytes
            record.lent_bytes = 0
            # The preparer may be waiting for host memory for the next job.
            self._changed.notify_all()

    def declined(self, way: str) -> None:
        """Correct the statistics: a step counted under `way` runs on a single device after all."""
        with self._changed:
            self.steps_by_way[way] -= 1
            self.steps_by_way[ONE_DEVICE] += 1


class JobDeviceLender:
    """The lender as seen by a single job; see `train/parallel/pool_offers.py`."""

    def __init__(self, lender: PoolDeviceLender, record: JobState) -> None:
        self._lender = lender
        self._record = record

    def offer(self) -> DeviceOffer | None:
        """Return the devices available for the step that begins."""
        return self._lender.offer(self._record)

    def ask(self, way: str, nbytes: int, most: int) -> int:
        """Return how many batches may run at the same time."""
        return self._lender.lend(self._record, way, nbytes, most)

    def leave(self) -> None:
        """End the loan, after the step's batches have run."""
        self._lender.take_back(self._record)

    def decline(self, way: str) -> None:
        """Report that the step runs on a single device after all."""
        self._lender.declined(way)
