"""What the scheduler knows of one job and of one device."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from hydra_tune.schedule.estimates import Estimate
from hydra_tune.schedule.front import Age
from hydra_tune.schedule.policy import JobView
from hydra_tune.schedule.units import Unit

RecordT = TypeVar("RecordT")


def copied(record: RecordT) -> RecordT:
    """Another record with the same fields, for classes with slots; `dataclasses.replace` takes five times as long."""
    other = object.__new__(type(record))
    for name in type(record).__slots__:  # type: ignore[attr-defined]
        setattr(other, name, getattr(record, name))
    return other


class Phase(StrEnum):
    """Where a job stands. A job that is over has no phase: it is forgotten."""

    QUEUED = "queued"
    """Submitted; holds nothing."""
    PREPARING = "preparing"
    """Admitted; nothing of it can run yet. Takes a slot."""
    READY = "ready"
    """Eligible: its next unit waits for a device. Takes a slot."""
    RUNNING = "running"
    """A unit of it is on a device, or several are, each on its own. Takes a slot."""
    WAITING = "waiting"
    """No next unit until its report is answered. Takes no slot: whoever answers may be waiting for other jobs first."""
    PAUSED = "paused"
    """Its next unit is held back by the user. Takes no slot, like a waiting job, and like it goes on at once."""

    @property
    def takes_slot(self) -> bool:
        """Whether a job in this phase counts against `max_concurrent`."""
        return self in _TAKE_SLOT


_TAKE_SLOT = (Phase.RUNNING, Phase.READY, Phase.PREPARING)


@dataclass(slots=True, kw_only=True)
class JobRecord:
    """What is known of one job. Changed by `transitions.py` and the scheduler, then given to `put` of the state.

    Args:
        job: its name.
        order: its place in the order of submission.
        priority: higher goes first.
        phase: where it stands.
        stopped: it is to end with what it does now; only while preparing or running.
        paused: the user holds it back; takes effect once nothing of it is under way.
        ready: units that are ready or held back, in the order in which they go; beside running ones they are offered to
            devices that would have nothing else to do.
        running: the unit on each device that runs one of its.
        estimate: predicted time of what is left, and of what was done.
        step_seconds: predicted time of one training step; the same for all jobs that are alike.
        told_step_seconds: the same as it was told of this job last, by which its remaining time goes.
        alike: what it has in common with jobs whose steps take equally long; None if nothing is known of that.
        shard_devices: for each shard that is on a device, that device.
        turn: the number of its last `Run` among all; 0 before the first.
        last_device: where a unit of it last began or ended; None before the first, and once that device is lost.
        view: what the policy was told of it; None if it was told nothing. Kept by `State.put`.
        is_counted: whether it is in `num_slots_taken`. Kept by `State.put`.
        age: under staggered admission, its place among the jobs in flight; None while it is not. Kept by `State.put`.
        is_front: whether it is in the front, which only staggered admission has. Kept by `State`.
        home: the device at which it is counted in `homes`. Kept by `State.put`.
        kind: what it is listed under in `kinds`. Kept by `State.put`.
    """

    job: str
    order: int
    priority: int = 0
    phase: Phase = Phase.QUEUED
    stopped: bool = False
    paused: bool = False
    ready: tuple[Unit, ...] = ()
    running: Mapping[str, Unit] = field(default_factory=dict)
    estimate: Estimate = field(default_factory=Estimate)
    step_seconds: float = 0.0
    told_step_seconds: float = 0.0
    alike: str | None = None
    shard_devices: Mapping[int, str] = field(default_factory=dict)
    turn: int = 0
    last_device: str | None = None
    view: JobView | None = None
    is_counted: bool = False
    age: Age | None = None
    is_front: bool = False
    home: str | None = None
    kind: str | None = None

    @property
    def is_in_flight(self) -> bool:
        """Whether it holds more than a place in the queue, and nobody holds it back."""
        return self.phase is not Phase.QUEUED and not self.paused

    @property
    def remaining_seconds(self) -> float:
        """Predicted time of what is left, with steps as long as those of all jobs that are alike."""
        return self.rescaled(self.estimate.remaining_seconds)

    def rescaled(self, seconds: float) -> float:
        """A time that goes by the steps it was told of, with steps as long as those of all jobs that are alike."""
        if self.step_seconds == self.told_step_seconds:
            return seconds
        return seconds / self.told_step_seconds * self.step_seconds  # in this order infinity never meets 0

    def make_view(self) -> JobView:
        """What a policy sees of this job; it must be ready."""
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
        )

    @property
    def offers(self) -> bool:
        """Whether it has units for devices that would have nothing else to do."""
        return bool(self.ready) and self.phase is Phase.RUNNING and not (self.paused or self.stopped)

    def copy(self) -> "JobRecord":
        """Another record that says the same and changes on its own."""
        other = copied(self)
        other.estimate = copied(self.estimate)
        return other


@dataclass(slots=True, kw_only=True)
class DeviceRecord:
    """What is known of one device.

    Args:
        device: its name.
        index: its place in the order of adding.
        speed: 1 is nominal.
        job: the job whose unit it runs; None if it is idle.
        is_asked: whether that unit, a burst, was asked to end early; without meaning while it is idle.
        idle_place: its entry among the idle devices, which are fed in this order, the fastest first; None if it is not
            idle. Kept by `State.put_device`.
        told_speed: what the policy was told. Kept by `State.put_device`.
    """

    device: str
    index: int
    speed: float = 1.0
    job: str | None = None
    is_asked: bool = False
    idle_place: tuple[float, int, str] | None = None
    told_speed: float = 0.0
