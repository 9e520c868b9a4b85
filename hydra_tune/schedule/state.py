"""`State`: everything the scheduler remembers, and the one place where it changes.

Records are frozen, so a copy of the state is a copy of its tables. `put` and `drop` keep the tables that only repeat
what the records say (the queue, the eligible jobs, the slots taken) in step with them; `verify` in `invariants.py`
recomputes each.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from hydra_tune.schedule.policy import JobView
from hydra_tune.schedule.units import Unit


class Phase(StrEnum):
    """Where a job stands. A job that is over has no phase: it is forgotten."""

    QUEUED = "queued"
    """Submitted; holds nothing."""
    PREPARING = "preparing"
    """Admitted; nothing of it can run yet. Takes a slot."""
    READY = "ready"
    """Eligible: its next unit waits for a device. Takes a slot."""
    RUNNING = "running"
    """One unit of it is on a device. Takes a slot."""
    WAITING = "waiting"
    """No next unit until its report is answered. Takes no slot: whoever answers may be waiting for other jobs first."""

    @property
    def takes_slot(self) -> bool:
        """Whether a job in this phase counts against `max_concurrent`."""
        return self is not Phase.QUEUED and self is not Phase.WAITING


class JobRecord(NamedTuple):
    """What is known of one job; a tuple, because one is made at every event.

    Args:
        job: its name.
        order: its place in the order of submission.
        phase: where it stands.
        stopped: it is to end with what it does now; only while preparing or running.
        unit: the unit that is ready or running; None in every other phase.
        device: where the unit runs; None unless running.
        remaining_seconds: predicted time of what is left.
        step_seconds: predicted time of one training step.
        shard_devices: for each shard that is on a device, that device.
    """

    job: str
    order: int
    phase: Phase = Phase.QUEUED
    stopped: bool = False
    unit: Unit | None = None
    device: str | None = None
    remaining_seconds: float = 0.0
    step_seconds: float = 0.0
    shard_devices: Mapping[int, str] = MappingProxyType({})

    def view(self) -> JobView:
        """What a policy sees of this job; it must be ready."""
        assert self.unit is not None
        return JobView(
            job=self.job,
            order=self.order,
            unit=self.unit,
            remaining_seconds=self.remaining_seconds,
            step_seconds=self.step_seconds,
            shard_device=self.shard_devices.get(self.unit.shard),
        )


@dataclass(slots=True, kw_only=True)
class State:
    """All jobs that are not over, and all devices.

    Args:
        jobs: every job by name, in submission order.
        devices: every device, in the order added, and the job whose unit it runs; None if it is idle.
        queue: the queued jobs, in submission order.
        eligible: what a policy sees of each ready job.
        num_slots_taken: jobs that count against `max_concurrent`.
        num_submitted: jobs ever submitted: the next one's order.
    """

    jobs: dict[str, JobRecord] = field(default_factory=dict)
    devices: dict[str, str | None] = field(default_factory=dict)
    queue: OrderedDict[str, None] = field(default_factory=OrderedDict)  # a plain dict is slow to lose its first key
    eligible: dict[str, JobView] = field(default_factory=dict)
    num_slots_taken: int = 0
    num_submitted: int = 0

    def put(self, record: JobRecord) -> None:
        """Add a job, or replace what is known of it."""
        self._unlist(record.job)
        self.jobs[record.job] = record
        self.num_slots_taken += record.phase.takes_slot
        if record.phase is Phase.READY:
            self.eligible[record.job] = record.view()
        elif record.phase is Phase.QUEUED:
            self.queue[record.job] = None

    def drop(self, job: str) -> None:
        """Forget a job that is over."""
        self._unlist(job)
        del self.jobs[job]

    def idle_devices(self) -> list[str]:
        """Devices that run nothing, in the order they were added."""
        return [device for device, job in self.devices.items() if job is None]

    def copy(self) -> "State":
        """Another state that says the same and changes on its own."""
        return State(
            jobs=self.jobs.copy(),
            devices=self.devices.copy(),
            queue=self.queue.copy(),
            eligible=self.eligible.copy(),
            num_slots_taken=self.num_slots_taken,
            num_submitted=self.num_submitted,
        )

    def _unlist(self, job: str) -> None:
        old = self.jobs.get(job)
        if old is not None:
            self.num_slots_taken -= old.phase.takes_slot
            self.eligible.pop(job, None)
            self.queue.pop(job, None)
