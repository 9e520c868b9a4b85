"""What each event changes, and when it is impossible.

Each function looks at everything it needs before it changes anything, so an event that is refused has changed nothing.
Choosing what runs next is not done here.
"""

import math

from hydra_tune.schedule.events import (
    DeviceAdded,
    Event,
    JobAdmitted,
    JobEvent,
    JobRejected,
    JobResumed,
    JobStopped,
    JobSubmitted,
    ShardMoved,
    UnitFailed,
    UnitFinished,
)
from hydra_tune.schedule.state import JobRecord, Phase, State
from hydra_tune.schedule.units import Unit


class ImpossibleEventError(Exception):
    """An event that cannot have happened in this state; the message says what was found and what was expected."""


def apply(state: State, event: Event) -> str | None:
    """Take one event into the state.

    Args:
        state: changed in place.
        event: what happened.

    Returns:
        The job that is over by this event and already forgotten, if any.

    Raises:
        ImpossibleEventError: the state is as it was.
    """
    if isinstance(event, (UnitFinished, UnitFailed)):
        return _unit_ended(state, event)
    if isinstance(event, (JobAdmitted, JobRejected)):
        return _preparation_ended(state, event)
    match event:
        case JobResumed():
            _resume(state, event)
        case JobStopped():
            return _stop(state, event)
        case ShardMoved():
            _move_shard(state, event)
        case JobSubmitted():
            _submit(state, event)
        case DeviceAdded():
            _add_device(state, event)
    return None


def _add_device(state: State, event: DeviceAdded) -> None:
    if event.device in state.devices:
        raise ImpossibleEventError(f"device {event.device!r} is there already, expected a new one")
    state.devices[event.device] = None


def _submit(state: State, event: JobSubmitted) -> None:
    if event.job in state.jobs:
        raise ImpossibleEventError(f"the job is {_describe(state.jobs[event.job])}, expected a new job")
    state.put(JobRecord(job=event.job, order=state.num_submitted))
    state.num_submitted += 1


def _preparation_ended(state: State, event: JobAdmitted | JobRejected) -> str | None:
    record = _expect(state, event, Phase.PREPARING)
    if isinstance(event, JobAdmitted):
        _check_estimates(event.remaining_seconds, event.step_seconds)
        if not record.stopped:
            _make_ready(state, record, event.unit, event.remaining_seconds, event.step_seconds)
            return None
    state.drop(event.job)
    return event.job


def _unit_ended(state: State, event: UnitFinished | UnitFailed) -> str | None:
    record = _expect(state, event, Phase.RUNNING)
    if record.device != event.device:
        raise ImpossibleEventError(f"the job is {_describe(record)}, expected it running on {event.device!r}")
    if isinstance(event, UnitFailed):
        state.devices[event.device] = None
        state.drop(event.job)
        return event.job
    step_seconds = record.step_seconds if event.step_seconds is None else event.step_seconds
    _check_estimates(event.remaining_seconds, step_seconds)
    state.devices[event.device] = None
    if record.stopped:
        state.drop(event.job)
        return event.job
    if event.unit is None:
        state.put(record._replace(phase=Phase.WAITING, unit=None, device=None, step_seconds=step_seconds))
    else:
        _make_ready(state, record, event.unit, event.remaining_seconds, step_seconds)
    return None


def _resume(state: State, event: JobResumed) -> None:
    record = _expect(state, event, Phase.WAITING)
    _check_estimates(event.remaining_seconds, record.step_seconds)
    _make_ready(state, record, event.unit, event.remaining_seconds, record.step_seconds)


def _stop(state: State, event: JobStopped) -> str | None:
    record = _expect(state, event, *Phase)
    if record.phase in (Phase.PREPARING, Phase.RUNNING):
        state.put(record._replace(stopped=True))
        return None
    state.drop(event.job)
    return event.job


def _move_shard(state: State, event: ShardMoved) -> None:
    record = _expect(state, event, Phase.PREPARING, Phase.READY, Phase.RUNNING, Phase.WAITING)
    if event.device is not None and event.device not in state.devices:
        known = ", ".join(state.devices) or "none"
        raise ImpossibleEventError(f"device {event.device!r} is unknown, expected one of: {known}")
    shard_devices = dict(record.shard_devices)
    if event.device is None:
        shard_devices.pop(event.shard, None)
    else:
        shard_devices[event.shard] = event.device
    state.put(record._replace(shard_devices=shard_devices))


def _make_ready(state: State, record: JobRecord, unit: Unit, remaining_seconds: float, step_seconds: float) -> None:
    state.put(
        record._replace(
            phase=Phase.READY,
            unit=unit,
            device=None,
            remaining_seconds=remaining_seconds,
            step_seconds=step_seconds,
        )
    )


def _expect(state: State, event: JobEvent, *phases: Phase) -> JobRecord:
    record = state.jobs.get(event.job)
    if record is None:
        raise ImpossibleEventError("the job is unknown or over, expected one that was submitted and not yet released")
    if record.phase not in phases:
        raise ImpossibleEventError(f"the job is {_describe(record)}, expected {' or '.join(phases)}")
    return record


def _check_estimates(remaining_seconds: float, step_seconds: float) -> None:
    # NaN compares false with everything and inf - inf is NaN: either would make the longest job a matter of chance.
    if math.isnan(remaining_seconds):
        raise ImpossibleEventError("remaining_seconds is NaN, expected a number of seconds")
    if not 0 <= step_seconds < math.inf:
        raise ImpossibleEventError(f"step_seconds is {step_seconds}, expected a finite number from 0")


def _describe(record: JobRecord) -> str:
    place = f" on {record.device!r}" if record.device is not None else ""
    return f"{record.phase}{place}{' and stopped' if record.stopped else ''}"
