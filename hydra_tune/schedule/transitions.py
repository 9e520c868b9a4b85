"""State transitions: the changes of each event, and the conditions under which an event is impossible.

`Scheduler` (`machine.py`) calls `apply` for each event, on a `SchedulerState` or, for several events at once, on a draft
(`state.py`). Each function of `_TRANSITIONS` checks all conditions before the first change, so a refused event changes
nothing, and puts each record that it has changed. No function here chooses a unit or a device: `Scheduler` does, after the
last event of a call.
"""

import math
from collections.abc import Callable
from typing import Any

from hydra_tune.schedule.events import (
    DeviceAdded,
    DeviceLost,
    DeviceSlowed,
    Event,
    JobAdmitted,
    JobEvent,
    JobPaused,
    JobRejected,
    JobResumed,
    JobStopped,
    JobSubmitted,
    JobUnpaused,
    PriorityChanged,
    ShardMoved,
    UnitFailed,
    UnitFinished,
)
from hydra_tune.schedule.record import DeviceRecord, JobPhase, JobRecord
from hydra_tune.schedule.state import Tables
from hydra_tune.schedule.units import Unit


class ImpossibleEventError(Exception):
    """An event that cannot have happened in the present state; the message has the finding and the expectation."""


def apply(tables: Tables, event: Event) -> str | None:
    """Apply an event to the state.

    Returns:
        The job that ends with this event, already forgotten, if any.

    Raises:
        ImpossibleEventError: the event is impossible; the state is unchanged.
    """
    return _TRANSITIONS[type(event)](tables, event)


# Devices.


def _add_device(tables: Tables, event: DeviceAdded) -> None:
    if tables.find_device(event.device) is not None:
        raise ImpossibleEventError(f"device {event.device!r} is there already, expected a new one")
    _check_speed(event.speed)
    tables.put_device(DeviceRecord(device=event.device, index=tables.number_device(), speed=event.speed))


def _slow_device(tables: Tables, event: DeviceSlowed) -> None:
    device = _expect_device(tables, event.device)
    _check_speed(event.speed)
    device.speed = event.speed
    tables.put_device(device)


def _lose_device(tables: Tables, event: DeviceLost) -> str | None:
    device = _expect_device(tables, event.device)
    tables.drop_device(event.device)
    released_job = None
    # O(jobs), which is acceptable because devices are rarely lost.
    for record in tables.all_jobs():
        if record.job == device.job and record.stopped and len(record.running) == 1:
            tables.drop(record.job)
            released_job = record.job
        elif (
            record.job == device.job
            or record.last_device == event.device
            or event.device in record.shard_devices.values()
        ):
            _leave_device(record, event.device)
            tables.put(record)
    return released_job


def _leave_device(record: JobRecord, device: str) -> None:
    # The lost unit becomes ready again, unless the job is stopped and so gets no further unit.
    lost_unit = record.running.get(device)
    if lost_unit is not None:
        _take_off(record, device, () if record.stopped else (lost_unit,))
    if record.last_device == device:
        record.last_device = None
    record.shard_devices = {shard: place for shard, place in record.shard_devices.items() if place != device}


# Jobs.


def _submit(tables: Tables, event: JobSubmitted) -> None:
    existing_record = tables.find(event.job)
    if existing_record is not None:
        raise ImpossibleEventError(f"the job is {_describe(existing_record)}, expected a new job")
    _check_priority(event.priority)
    tables.put(JobRecord(job=event.job, order=tables.number_job(), priority=event.priority, staggered=event.staggered))


def _admitted(tables: Tables, event: JobAdmitted) -> str | None:
    record = _expect(tables, event, JobPhase.PREPARING)
    _check_estimates(event.remaining_seconds, event.step_seconds)
    if record.stopped:
        tables.drop(event.job)
        return event.job
    record.estimate.tell(event.remaining_seconds)
    _take_pace(tables, record, event.step_seconds, event.alike)
    _make_ready(tables, record, event.unit)
    return None


def _rejected(tables: Tables, event: JobRejected) -> str:
    _expect(tables, event, JobPhase.PREPARING)
    tables.drop(event.job)
    return event.job


def _unit_failed(tables: Tables, event: UnitFailed) -> str | None:
    record, device, _ = _expect_unit(tables, event)
    device.job = None
    tables.put_device(device)
    return _end_with_unit(tables, record, event.device)


def _unit_finished(tables: Tables, event: UnitFinished) -> str | None:
    record, device, expected = _expect_unit(tables, event)
    _, place, seconds, unit, remaining_seconds, step_seconds, others, alike = event
    if step_seconds is None:
        step_seconds, alike = record.told_step_seconds, record.alike
    _check_estimates(remaining_seconds, step_seconds)
    if not 0 <= seconds < math.inf:
        raise ImpossibleEventError(f"the unit took {seconds} s, expected a finite number from 0")
    device.job = None
    tables.put_device(device)
    if record.stopped:
        return _end_with_unit(tables, record, place)
    # Estimates are in seconds of a device of speed 1.
    record.estimate.finish(expected.seconds, seconds * device.speed, remaining_seconds)
    if step_seconds != record.told_step_seconds or alike != record.alike:
        _take_pace(tables, record, step_seconds, alike)
    record.last_device = place
    _take_off(record, place, others if unit is None else (unit, *others))
    tables.put(record)
    return None


def _resume(tables: Tables, event: JobResumed) -> None:
    record = _expect(tables, event, JobPhase.WAITING)
    _check_estimates(event.remaining_seconds, record.step_seconds)
    if event.remaining_seconds is not None:
        record.estimate.tell(event.remaining_seconds)
    _make_ready(tables, record, event.unit, *event.others)


def _stop(tables: Tables, event: JobStopped) -> str | None:
    record = _expect(tables, event)
    # The driver still owes the end of the preparation or of the units, so the record stays until then.
    if record.phase in (JobPhase.PREPARING, JobPhase.RUNNING):
        record.stopped, record.ready = True, ()
        tables.put(record)
        return None
    tables.drop(event.job)
    return event.job


def _pause(tables: Tables, event: JobPaused) -> None:
    record = _expect(tables, event)
    record.paused = True
    if record.phase is JobPhase.READY:
        record.phase = JobPhase.PAUSED
    tables.put(record)


def _unpause(tables: Tables, event: JobUnpaused) -> None:
    record = _expect(tables, event)
    record.paused = False
    if record.phase is JobPhase.PAUSED:
        record.phase = JobPhase.READY
    tables.put(record)


def _change_priority(tables: Tables, event: PriorityChanged) -> None:
    record = _expect(tables, event)
    _check_priority(event.priority)
    record.priority = event.priority
    tables.put(record)


def _move_shard(tables: Tables, event: ShardMoved) -> None:
    record = _expect(tables, event, *_WITH_SHARDS)
    if event.device is None:
        record.shard_devices = {shard: place for shard, place in record.shard_devices.items() if shard != event.shard}
    else:
        _expect_device(tables, event.device)
        # A new mapping, because a draft's record shares the mapping with the original (`JobRecord.copy`).
        record.shard_devices = {**record.shard_devices, event.shard: event.device}
    tables.put(record)


# A queued job holds nothing, so none of its shards can move.
_WITH_SHARDS = tuple(phase for phase in JobPhase if phase is not JobPhase.QUEUED)

_TRANSITIONS: dict[type[Event], Callable[[Tables, Any], str | None]] = {
    DeviceAdded: _add_device,
    DeviceLost: _lose_device,
    DeviceSlowed: _slow_device,
    JobSubmitted: _submit,
    JobAdmitted: _admitted,
    JobRejected: _rejected,
    UnitFinished: _unit_finished,
    UnitFailed: _unit_failed,
    JobResumed: _resume,
    JobStopped: _stop,
    JobPaused: _pause,
    JobUnpaused: _unpause,
    PriorityChanged: _change_priority,
    ShardMoved: _move_shard,
}

# Shared by several transitions.


_SAME_PACE = 1.2  # a smaller change of the step time is ignored

# Bound here, because these names are used for every unit, and enum members are slow to look up.
_PAUSED, _READY, _RUNNING = JobPhase.PAUSED, JobPhase.READY, JobPhase.RUNNING


def _phase_between_units(record: JobRecord) -> JobPhase:
    return _PAUSED if record.paused else _READY


def _make_ready(tables: Tables, record: JobRecord, *units: Unit) -> None:
    record.phase, record.ready = _phase_between_units(record), tuple(sorted(units, key=_rank))
    tables.put(record)


def _take_pace(tables: Tables, record: JobRecord, step_seconds: float, alike: str | None) -> None:
    """Take a job's new step time, which applies to all jobs that are alike.

    Jobs report at different times, and a predicted step time fluctuates. A small change is ignored, for all jobs; a
    large change applies to all jobs at once.
    """
    record.told_step_seconds = record.step_seconds = step_seconds
    # A step time of 0 allows no ratio of step times.
    record.alike = alike = alike if step_seconds else None
    # Any other job will do, because all jobs of a kind have the same step time.
    other = None if alike is None else next(tables.others_alike(record), None)
    if other is None:
        return
    if 1 / _SAME_PACE <= step_seconds / other.step_seconds <= _SAME_PACE:
        record.step_seconds = other.step_seconds
        return
    for other in list(tables.others_alike(record)):
        other.step_seconds = step_seconds
        tables.put(other)


def _take_off(record: JobRecord, device: str, fresh: tuple[Unit, ...]) -> None:
    """Remove the job's unit from a device, and add units that became ready."""
    if len(record.running) == 1:  # the common case, without a loop
        record.running = {}
    else:
        record.running = {place: unit for place, unit in record.running.items() if place != device}
    record.ready = tuple(sorted((*record.ready, *fresh), key=_rank)) if record.ready or len(fresh) > 1 else fresh
    if not record.running:
        record.phase = _phase_between_units(record) if record.ready else JobPhase.WAITING


def _rank(unit: Unit) -> int:
    return unit.rank


def _end_with_unit(tables: Tables, record: JobRecord, device: str) -> str | None:
    """Handle the end of the unit of a stopped job, or of a failed unit; return the job if no other unit of the job runs."""
    if len(record.running) == 1:
        tables.drop(record.job)
        return record.job
    record.stopped, record.ready = True, ()
    _take_off(record, device, ())
    tables.put(record)
    return None


def _expect(tables: Tables, event: JobEvent, *phases: JobPhase) -> JobRecord:
    record = tables.find(event.job)
    if record is None:
        raise ImpossibleEventError(
            "the job is unknown or over, expected a job that was submitted and is not yet released"
        )
    if phases and record.phase not in phases:
        raise ImpossibleEventError(f"the job is {_describe(record)}, expected {' or '.join(phases)}")
    return record


def _expect_unit(tables: Tables, event: UnitFinished | UnitFailed) -> tuple[JobRecord, DeviceRecord, Unit]:
    record = _expect(tables, event, _RUNNING)
    unit = record.running.get(event.device)
    if unit is None:
        raise ImpossibleEventError(f"the job is {_describe(record)}, expected it running on {event.device!r}")
    return record, _expect_device(tables, event.device), unit


def _expect_device(tables: Tables, device: str) -> DeviceRecord:
    record = tables.find_device(device)
    if record is None:
        device_names = ", ".join(tables.devices) or "none"
        raise ImpossibleEventError(f"device {device!r} is unknown, expected one of: {device_names}")
    return record


def _check_estimates(remaining_seconds: float | None, step_seconds: float) -> None:
    # NaN compares false with everything and inf - inf is NaN: either would make the longest job a matter of chance.
    if remaining_seconds is not None and math.isnan(remaining_seconds):
        raise ImpossibleEventError("remaining_seconds is NaN, expected a number of seconds")
    if not 0 <= step_seconds < math.inf:
        raise ImpossibleEventError(f"step_seconds is {step_seconds}, expected a finite number from 0")


def _check_speed(speed: float) -> None:
    if not 0 < speed < math.inf:
        raise ImpossibleEventError(
            f"the speed is {speed}, expected a finite number above 0; a device that is gone is lost"
        )


def _check_priority(priority: int) -> None:
    if not isinstance(priority, int):
        raise ImpossibleEventError(f"the priority is {priority!r}, expected an int")


def _describe(record: JobRecord) -> str:
    place = f" on {' and '.join(map(repr, record.running))}" if record.running else ""
    return f"{record.phase}{place}{' and stopped' if record.stopped else ''}"
