"""What happens to the scheduler: everything it ever learns arrives as one of these.

Events are facts, already true when they are handed in. Jobs and devices are named by strings; a job's name is never
used a second time. Remaining times are estimates: they order the jobs and nothing else depends on them.
"""

from dataclasses import dataclass
from typing import NamedTuple

from hydra_tune.schedule.units import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAdded:
    """A device is there, and idle.

    Args:
        device: the device; one that was lost may come back under its name.
        speed: how fast it computes: 1 is nominal, 0.5 takes twice as long.
    """

    device: str
    speed: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLost:
    """A device is gone, with everything on it.

    The unit that ran there is lost: it is the job's next unit again, as if it had never begun, and nothing more must be
    reported of it. Shards that were there are on no device. Where the job cannot go on, because what it needs was on
    that device alone, the driver says `JobStopped` in the same call.
    """

    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSlowed:
    """A device computes at another speed from now on, slower or faster.

    Args:
        device: the device.
        speed: as for `DeviceAdded`.
    """

    device: str
    speed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmitted:
    """A job wants to run; the order of these events is the submission order.

    Args:
        job: the job.
        priority: jobs of a higher priority are admitted, and run, before all of a lower one.
    """

    job: str
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAdmitted:
    """A job's preparation is done and its first unit is ready.

    Args:
        job: the job.
        unit: its first unit.
        remaining_seconds: predicted time of all its units, `unit` included, on one device.
        step_seconds: predicted time of one training step, the slack of Sharded-LRTF; 0 allows none.
        alike: what jobs have in common whose steps take equally long, by whatever name; None if it measures alone. Of jobs
            that are alike the steps that are left are compared, not what a step was thought to take when each was last told.
    """

    job: str
    unit: Unit
    remaining_seconds: float
    step_seconds: float = 0.0
    alike: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRejected:
    """A job's preparation failed or ended early: none of its units ever runs."""

    job: str


class UnitFinished(NamedTuple):
    """A unit that a job had on a device is done.

    A tuple, because one is made for every unit.

    Args:
        job: the job.
        device: where the unit ran.
        seconds: how long it took.
        unit: the job's next unit, or None where this one has none that is ready now. Where nothing else of the job is
            ready or runs, it waits for a report's answer or for its data, or it is complete and `JobStopped` follows.
        remaining_seconds: predicted time of what is left, `unit` included. None: the scheduler corrects the last
            prediction it was told itself (`schedule/estimates.py`).
        step_seconds: predicted time of one training step from now on; None leaves it as it was, and `alike` too.
        others: further units of the job that have become ready and may run beside each other.
        alike: as for `JobAdmitted`.
    """

    job: str
    device: str
    seconds: float
    unit: Unit | None
    remaining_seconds: float | None
    step_seconds: float | None = None
    others: tuple[Unit, ...] = ()
    alike: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFailed:
    """A unit a job had on a device failed; the job is over once no other unit of it runs."""

    job: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResumed:
    """A waiting job goes on: its report was answered, or its data has come, and its next unit is ready.

    Args:
        job: the job.
        unit: its next unit.
        remaining_seconds: predicted time of what is left, `unit` included; None leaves it as it was.
        others: further units that are ready and may run beside each other.
    """

    job: str
    unit: Unit
    remaining_seconds: float | None
    others: tuple[Unit, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPaused:
    """The user pauses a job, whatever it does: until `JobUnpaused` it is not admitted and gets no further unit.

    A unit of it that runs now is let finish, a preparation too. While nothing of it is under way it takes no slot.
    Pausing twice is pausing once.
    """

    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobUnpaused:
    """The user lets a paused job go on. One that is not paused stays as it is."""

    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityChanged:
    """The user gives a job another priority; a unit of it that runs now is let finish."""

    job: str
    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStopped:
    """A job gets no further unit: pruned, cancelled or complete. Units of it that run now are let finish."""

    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMoved:
    """A shard's parameters are somewhere else now.

    Args:
        job: the job.
        shard: the shard, from 0.
        device: where they are; None if on no device.
    """

    job: str
    shard: int
    device: str | None


JobEvent = (
    JobSubmitted
    | JobAdmitted
    | JobRejected
    | UnitFinished
    | UnitFailed
    | JobResumed
    | JobStopped
    | JobPaused
    | JobUnpaused
    | PriorityChanged
    | ShardMoved
)
"""Every event that is about one job."""

DeviceEvent = DeviceAdded | DeviceLost | DeviceSlowed
"""Every event that is about one device."""

Event = DeviceEvent | JobEvent
"""Everything `Scheduler.handle` accepts."""
