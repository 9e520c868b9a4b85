"""Invariants of the scheduler's state between any two events.

Every table that `SchedulerState` updates step by step is recomputed here from the records and compared.
"""

import math
from collections import Counter
from collections.abc import Iterator

from hydra_tune.schedule import Scheduler
from hydra_tune.schedule.record import JobPhase, JobRecord
from hydra_tune.schedule.state import SchedulerState

_TAKE_SLOTS = (JobPhase.RUNNING, JobPhase.READY, JobPhase.PREPARING)


def check(scheduler: Scheduler) -> None:
    """Fail with a sentence for each violated invariant."""
    wrong = list(violations(scheduler._state, max_concurrent=scheduler._max_concurrent))
    assert not wrong, "; ".join(wrong)


def eligible_jobs(scheduler: Scheduler) -> list[str]:
    """Jobs without a running unit, and with a unit ready to run."""
    return [job for job, record in scheduler._state.jobs.items() if record.view is not None]


def violations(state: SchedulerState, *, max_concurrent: int) -> Iterator[str]:
    """Check a state at rest against all invariants.

    Args:
        state: the state, after the commands of the last event were made.
        max_concurrent: number of slots.

    Yields:
        A sentence for each violated invariant; nothing if all invariants hold.
    """
    for record in state.jobs.values():
        yield from _job_violations(record)
        yield from _place_violations(state, record)
    yield from _device_violations(state)
    yield from _table_violations(state)
    ready = [record.job for record in state.jobs.values() if record.phase is JobPhase.READY]
    offering = [record.job for record in state.jobs.values() if record.offers]
    # At rest no device is idle while a unit could run: an eligible job's, or an offered one.
    if state.idle and offering:
        yield f"{[device for _, _, device in state.idle]} have nothing to do and are not lent to {offering}"
    if set(state.offering) != set(offering):
        yield f"{list(state.offering)} are offering units, expected {offering}"
    if state.idle and ready:
        yield f"{[device for _, _, device in state.idle]} could be fed and are idle while {ready} are eligible"
    queued = _queued(state)
    if queued and state.num_slots_taken < max_concurrent:
        yield f"{queued} are queued and {state.num_slots_taken} of {max_concurrent} slots are taken"


_HAVE_UNITS = (JobPhase.READY, JobPhase.PAUSED)


def _job_violations(record: JobRecord) -> Iterator[str]:
    name, phase = f"job {record.job!r}", record.phase
    if (not record.ready and phase in _HAVE_UNITS) or (record.ready and phase not in (*_HAVE_UNITS, JobPhase.RUNNING)):
        yield f"{name} is {phase} with ready units {record.ready}"
    if record.stopped and record.ready:
        yield f"{name} is stopped with ready units {record.ready}"
    if record.stopped and phase not in (JobPhase.PREPARING, JobPhase.RUNNING):
        yield f"{name} is stopped, {phase}, and not released"
    if (phase is JobPhase.READY and record.paused) or (phase is JobPhase.PAUSED and not record.paused):
        yield f"{name} is {phase}, and the user's pause is {record.paused}"
    if record.view != (record.make_view() if phase is JobPhase.READY and record.ready else None):
        yield f"{name} is {phase}, and the policy was told {record.view}"
    if record.is_counted != (phase in _TAKE_SLOTS):
        yield f"{name} is {phase}, and whether it is counted is {record.is_counted}"
    estimate = record.estimate
    if estimate.done_seconds < 0 or math.isnan(estimate.remaining_seconds):
        yield f"{name} has done {estimate.done_seconds} s and has {estimate.remaining_seconds} s left"


def _place_violations(state: SchedulerState, record: JobRecord) -> Iterator[str]:
    name, phase = f"job {record.job!r}", record.phase
    if bool(record.running) != (phase is JobPhase.RUNNING):
        yield f"{name} is {phase} on devices {list(record.running)}"
    for place in record.running:
        device = state.devices.get(place)
        if device is None or device.job != record.job:
            yield f"{name} runs on {place!r}, which runs {device and device.job!r}"
    if record.last_device is not None and record.last_device not in state.devices:
        yield f"{name} ran last on {record.last_device!r}, which is unknown"
    for shard, place in record.shard_devices.items():
        if place not in state.devices:
            yield f"{name} has shard {shard} on {place!r}, which is unknown"
        if phase is JobPhase.QUEUED:
            yield f"{name} is queued and has shard {shard} on {place!r}"


def _device_violations(state: SchedulerState) -> Iterator[str]:
    for name, device in state.devices.items():
        if device.job is not None and (device.job not in state.jobs or name not in state.jobs[device.job].running):
            yield f"device {name!r} runs {device.job!r}, which does not run there"
        if not device.speed > 0:
            yield f"device {name!r} has speed {device.speed}"
    idle = sorted((-device.speed, device.index, name) for name, device in state.devices.items() if device.job is None)
    if state.idle != idle or idle != sorted(
        device.idle_place for device in state.devices.values() if device.idle_place
    ):
        yield f"the idle devices are {state.idle}, expected {idle}"
    indices = [device.index for device in state.devices.values()]
    if indices != sorted(set(indices)) or (indices and indices[-1] >= state.num_devices_added):
        yield f"the devices' indices are {indices}, expected them rising and below {state.num_devices_added}"


def _table_violations(state: SchedulerState) -> Iterator[str]:
    records = state.jobs.values()
    views = Counter((record.view.priority, record.is_front) for record in records if record.view is not None)
    counts = {level: state.levels._levels[level].num_jobs for level in state.levels._rising}
    if state.num_eligible != views.total() or counts != views:
        yield f"{state.num_eligible} jobs are eligible, by level {counts}, expected {dict(views)}"
    yield from _front_violations(state)
    homes = Counter(record.last_device for record in records if record.last_device is not None)
    if state.homes != homes:
        yield f"by device {dict(state.homes)} jobs have run last, expected {dict(homes)}"
    yield from _kind_violations(state)
    slots = sum(record.phase in _TAKE_SLOTS for record in records)
    if state.num_slots_taken != slots:
        yield f"{state.num_slots_taken} slots are counted, expected {slots}"
    orders = [record.order for record in records]
    if orders != sorted(set(orders)) or (orders and orders[-1] >= state.num_submitted):
        yield f"the jobs' orders are {orders}, expected them rising and below {state.num_submitted}"
    following, queued = state.next_queued(), _queued(state)
    if (following and following.job) != (queued[0] if queued else None):
        yield f"{following and following.job!r} would be admitted next, expected the first of {queued}"


def _kind_violations(state: SchedulerState) -> Iterator[str]:
    alike: dict[str, list[JobRecord]] = {}
    for record in state.jobs.values():
        if record.alike is not None:
            alike.setdefault(record.alike, []).append(record)
    jobs_by_kind = {kind: sorted(jobs) for kind, jobs in state.kinds.items()}
    expected = {kind: sorted(record.job for record in records) for kind, records in alike.items()}
    if jobs_by_kind != expected:
        yield f"by what they have in common jobs are {jobs_by_kind}, expected {expected}"
    for kind, records in alike.items():
        if len({record.step_seconds for record in records}) != 1:
            yield f"steps of {kind!r} take { ({record.job: record.step_seconds for record in records}) }, expected one number"


def _front_violations(state: SchedulerState) -> Iterator[str]:
    if state.front is None:
        return
    staggered = {record.job for record in state.jobs.values() if state.front.takes_all or record.staggered}
    aged = [record for record in state.jobs.values() if record.is_in_flight and record.job in staggered]
    aged.sort(key=lambda record: (-record.priority, record.order))
    front = [record.job for record in aged[: len(state.devices)]]
    first = {record.job for record in state.jobs.values() if record.is_front}
    if state.front.jobs != front or first != {*front, *(state.jobs.keys() - staggered)}:
        yield f"the front is {state.front.jobs}, and first go {first}, expected {front} and all but {staggered}"


def _queued(state: SchedulerState) -> list[str]:
    queued = [record for record in state.jobs.values() if record.phase is JobPhase.QUEUED and not record.paused]
    return [record.job for record in sorted(queued, key=lambda record: (-record.priority, record.order))]
