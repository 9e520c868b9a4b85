"""Events of the scheduler, the only way in which the scheduler learns anything.

Events are facts, and already true when the driver (`pool/runtime/dispatcher.py`, `pool/dry_run/executor.py`,
`simulate/engine/simulator.py` or `simulate/recorded/replay.py`) hands the events to `Scheduler.handle`. Strings name
jobs and devices; a driver must not use a job's name twice. `journal.py` writes and reads events, and an event is a plain
value, which a driver must not change. Remaining times are estimates: they order the jobs, and nothing else depends on them.
"""

from dataclasses import dataclass
from typing import NamedTuple

from hydra_tune.schedule.units import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAdded:
    """A device has been added, and is idle.

    Args:
        device: the device; a lost device may come back under its old name.
        speed: compute speed: 1 is nominal, 0.5 takes twice as long.
    """

    device: str
    speed: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLost:
    """A device is lost, with everything on the device.

    The unit that ran there is lost. Unless its job is stopped, the unit becomes ready again, and the driver must not report
    anything more about the lost attempt. Shards that were there are on no device. If the job cannot go on, because only that
    device held some of its state, the driver adds `JobStopped` in the same call.
    """

    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSlowed:
    """A device computes at another speed from now on, slower or faster.

    Only a simulation hands in this event: a pool measures no speeds, and takes every device for nominal.
    """

    device: str
    speed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmitted:
    """A job wants to run; the order of these events is the submission order.

    Args:
        priority: slots and devices go to jobs of a higher priority first.
        staggered: under the admission "auto", whether the job runs before younger staggered jobs.
    """

    job: str
    priority: int = 0
    staggered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAdmitted:
    """A job's preparation is done and its first unit is ready.

    Args:
        unit: the first unit.
        remaining_seconds: predicted time of all the job's units, `unit` included, on a single device.
        step_seconds: predicted time of a training step, the slack of Sharded-LRTF; 0 allows none.
        alike: name shared by jobs whose steps take equally long; None if the job measures its own steps. Jobs with the
            same name are compared by their remaining steps, not by outdated step times from each job's last event.
    """

    job: str
    unit: Unit
    remaining_seconds: float
    step_seconds: float = 0.0
    alike: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRejected:
    """A job's preparation failed or ended early: no unit of the job ever runs."""

    job: str


class UnitFinished(NamedTuple):
    """A job's unit on a device is done.

    Args:
        device: the device that ran the unit.
        seconds: measured time of the unit.
        unit: the job's next unit, or None if no unit becomes ready now. Then, unless other units of the job are ready
            or running, the job waits for a report's answer or for data, or is complete and `JobStopped` follows.
        remaining_seconds: predicted remaining time, `unit` included. None: the scheduler itself corrects the last
            prediction (`JobTimeEstimate`).
        step_seconds: predicted time of a training step from now on; None leaves both the old value and `alike`.
        others: further units of the job that became ready and may run beside each other.
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
    """A job's unit on a device failed; the job is over once no other unit of the job runs."""

    job: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResumed:
    """A waiting job goes on: its report was answered, or its data arrived, and its next unit is ready.

    Args:
        unit: the next unit.
        remaining_seconds: predicted remaining time, `unit` included; None leaves the old value.
        others: further ready units that may run beside each other.
    """

    job: str
    unit: Unit
    remaining_seconds: float | None
    others: tuple[Unit, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPaused:
    """The user pauses a job: until `JobUnpaused`, the job is not admitted and gets no further unit.

    A running unit, or a preparation, is allowed to finish. A paused job takes no slot once nothing of the job is under
    way. Pausing a paused job has no effect.
    """

    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobUnpaused:
    """The user lets a paused job go on; no effect on a job that is not paused."""

    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityChanged:
    """The user changes a job's priority; a running unit of the job is allowed to finish."""

    job: str
    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStopped:
    """A job gets no further unit: pruned, cancelled or complete. Running units of the job are allowed to finish."""

    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMoved:
    """A shard's parameters have moved.

    Args:
        shard: the shard, from 0.
        device: the new place; None if on no device.
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
"""Every event about one job."""

DeviceEvent = DeviceAdded | DeviceLost | DeviceSlowed
"""Every event about one device."""

Event = DeviceEvent | JobEvent
"""Everything that `Scheduler.handle` accepts."""
