"""The scheduler's records of a job, with the estimate of its remaining time, and of a device.

`transitions.py` changes the records at each event, and `Scheduler` (`machine.py`) when a unit starts, a burst is asked
to end, or a job is admitted; `SchedulerState` (`state.py`) holds the records until the job is over or the device is
lost. Code that changes a record then calls `put` or `put_device` of the tables, which keep the derived fields: no other
code may write those. Mappings and tuples of a record are replaced, never changed, because a draft's copy shares them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from hydra_tune.schedule.front import Age
from hydra_tune.schedule.policies.policy import JobView
from hydra_tune.schedule.units import Unit

RecordT = TypeVar("RecordT")


def copied(record: RecordT) -> RecordT:
    """Return a copy of a record with slots; `dataclasses.replace` takes five times as long."""
    other = object.__new__(type(record))
    for name in type(record).__slots__:  # type: ignore[attr-defined]
        setattr(other, name, getattr(record, name))
    return other


@dataclass(slots=True, kw_only=True)
class JobTimeEstimate:
    """Times of a job in seconds on a device of speed 1.

    Each finished unit either brings a new prediction of the remaining time, or the estimate corrects the last
    prediction: subtract the predicted times of the units finished since, and multiply by the ratio of measured to
    predicted time of these units.

    Args:
        remaining_seconds: predicted remaining time, corrected.
        done_seconds: measured time of all finished units.
    """

    remaining_seconds: float = 0.0
    done_seconds: float = 0.0
    _uncorrected_seconds: float = 0.0  # remaining time by the last prediction, uncorrected
    _predicted_seconds: float = 0.0  # predicted time of the units finished since
    _measured_seconds: float = 0.0  # measured time of the same units

    def tell(self, remaining_seconds: float) -> None:
        """Take a new prediction of the remaining time, and drop all corrections."""
        self.remaining_seconds = self._uncorrected_seconds = remaining_seconds
        self._predicted_seconds = self._measured_seconds = 0.0

    def finish(self, predicted_seconds: float, measured_seconds: float, remaining_seconds: float | None) -> None:
        """Account for a finished unit."""
        self.done_seconds += measured_seconds
        if remaining_seconds is not None:
            self.tell(remaining_seconds)
            return
        # The ratio is taken over all units since the last prediction, because the times of single units scatter.
        self._predicted_seconds += predicted_seconds
        self._measured_seconds += measured_seconds
        uncorrected_seconds = self._uncorrected_seconds = max(0.0, self._uncorrected_seconds - predicted_seconds)
        has_ratio = self._predicted_seconds > 0 and self._measured_seconds > 0  # units of zero time give no ratio
        self.remaining_seconds = (
            uncorrected_seconds * (self._measured_seconds / self._predicted_seconds)
            if has_ratio
            else uncorrected_seconds
        )


class JobPhase(StrEnum):
    """Phase of a job's life. A job that is over has no phase."""

    QUEUED = "queued"
    """Submitted, perhaps paused; holds nothing."""
    PREPARING = "preparing"
    """Admitted; no unit can run yet. Takes a slot."""
    READY = "ready"
    """Eligible: the next unit waits for a device. Takes a slot."""
    RUNNING = "running"
    """A unit of the job is on a device, or several units, each on a device of its own. Takes a slot."""
    WAITING = "waiting"
    """Has no next unit: waits for an answer or data, or is complete. Takes no slot: an answer may need other jobs."""
    PAUSED = "paused"
    """The user holds back the next unit. Takes no slot, as in WAITING, and continues at once when unpaused."""


@dataclass(slots=True, kw_only=True)
class JobRecord:
    """The scheduler's facts about a job. Derived fields are kept as noted.

    Args:
        order: place in the order of submission.
        priority: higher goes first.
        staggered: whether the job was submitted as staggered.
        stopped: whether the job ends with its present work; only while preparing or running.
        paused: whether the user holds the job back.
        ready: units that are ready or held back, in the order of execution; while other units of the job run, ready
            units are offered to otherwise idle devices.
        estimate: predicted remaining time, and time done.
        step_seconds: predicted time of a training step; the same for all jobs that are alike.
        told_step_seconds: step time of this job's last event; the job's remaining time is based on this step time.
        alike: name shared by jobs whose steps take equally long; None if unknown.
        shard_devices: device by shard, for each shard on a device.
        turn: number of the job's last `Run` among all; 0 before the first.
        last_device: the device where a unit of the job last began or ended; None before the first unit, and after the
            loss of that device.
        last_on_base: the last begun unit with a `base`; None if there was none.
        view: the view given to the policy; None if the policy does not know the job. Kept by `SchedulerState`.
        is_counted: whether the job counts in `num_slots_taken`. Kept by `SchedulerState`.
        age: a staggered job's place among the jobs in flight; None if not in flight or not staggered. Kept by
            `SchedulerState`.
        is_front: whether the job is in the front or, beside a front, not staggered. Kept by `SchedulerState`.
        home: the device at which the job counts in `homes`. Kept by `SchedulerState`.
        kind: the job's entry in `kinds`. Kept by `SchedulerState`.
    """

    job: str
    order: int
    priority: int = 0
    staggered: bool = False
    phase: JobPhase = JobPhase.QUEUED
    stopped: bool = False
    paused: bool = False
    ready: tuple[Unit, ...] = ()
    running: Mapping[str, Unit] = field(default_factory=dict)
    estimate: JobTimeEstimate = field(default_factory=JobTimeEstimate)
    step_seconds: float = 0.0
    told_step_seconds: float = 0.0
    alike: str | None = None
    shard_devices: Mapping[int, str] = field(default_factory=dict)
    turn: int = 0
    last_device: str | None = None
    last_on_base: Unit | None = None
    view: JobView | None = None
    is_counted: bool = False
    age: Age | None = None
    is_front: bool = False
    home: str | None = None
    kind: str | None = None

    @property
    def is_in_flight(self) -> bool:
        """Whether the job is neither queued nor paused."""
        return self.phase is not JobPhase.QUEUED and not self.paused

    @property
    def remaining_seconds(self) -> float:
        """Predicted remaining time, with the common step time of all jobs that are alike."""
        return self.rescaled(self.estimate.remaining_seconds)

    def rescaled(self, seconds: float) -> float:
        """Convert a time based on the job's own step time to the common step time of all jobs that are alike."""
        # Also leaves here with a told step time of 0, which no division could rescale: such a job is alike to no other
        # job (`_take_pace`), so both its step times are 0.
        if self.step_seconds == self.told_step_seconds:
            return seconds
        return seconds / self.told_step_seconds * self.step_seconds  # division first: inf * 0 would give NaN

    def make_view(self) -> JobView:
        """Make the policy's view of a ready job."""
        unit, estimate = self.ready[0], self.estimate
        return JobView(
            self.job,
            self.order,
            unit,
            self.remaining_seconds,
            self.step_seconds,
            self.shard_devices.get(unit.shard),
            self.priority,
            estimate.done_seconds,
            self.turn,
            self.last_device,
            self.last_on_base,
        )

    @property
    def offers(self) -> bool:
        """Whether the job has units to offer to otherwise idle devices."""
        return bool(self.ready) and self.phase is JobPhase.RUNNING and not (self.paused or self.stopped)

    def copy(self) -> "JobRecord":
        """Return an independent copy."""
        other = copied(self)
        # The only field with mutable contents: mappings and tuples are replaced by new objects, never changed.
        other.estimate = copied(self.estimate)
        return other


@dataclass(slots=True, kw_only=True)
class DeviceRecord:
    """The scheduler's facts about a device.

    Args:
        index: place in the order of adding.
        speed: 1 is nominal.
        job: the job of the running unit; None if the device is idle.
        is_asked: whether the running burst was asked to end early; meaningless on an idle device.
        idle_place: entry among the idle devices, which get units in this order, the fastest first; None on a busy
            device. Kept by `SchedulerState.put_device`.
        told_speed: speed last given to the policy. Kept by `SchedulerState.put_device`.
    """

    device: str
    index: int
    speed: float = 1.0
    job: str | None = None
    is_asked: bool = False
    idle_place: tuple[float, int, str] | None = None
    told_speed: float = 0.0
