"""What is true of the scheduler's state between any two events."""

from collections.abc import Iterator

from hydra_tune.schedule.state import JobRecord, Phase, State


def violations(state: State, *, max_concurrent: int) -> Iterator[str]:
    """Name everything that is wrong with a state that should be at rest.

    Args:
        state: the state, after the commands of the last event were made.
        max_concurrent: slots.

    Yields:
        One sentence for each rule that is broken; nothing if all hold.
    """
    for record in state.jobs.values():
        yield from _job_violations(state, record)
    for device, job in state.devices.items():
        if job is not None and (job not in state.jobs or state.jobs[job].device != device):
            yield f"device {device!r} runs {job!r}, which does not run there"
    yield from _table_violations(state)
    idle = state.idle_devices()
    if idle and state.eligible:
        yield f"{idle} could be fed and are idle while {list(state.eligible)} are eligible"
    if state.queue and state.num_slots_taken < max_concurrent:
        yield f"{list(state.queue)} are queued and {state.num_slots_taken} of {max_concurrent} slots are taken"


def _job_violations(state: State, record: JobRecord) -> Iterator[str]:
    name, phase = f"job {record.job!r}", record.phase
    if (record.unit is not None) != (phase in (Phase.READY, Phase.RUNNING)):
        yield f"{name} is {phase} with unit {record.unit}"
    if (record.device is not None) != (phase is Phase.RUNNING):
        yield f"{name} is {phase} on device {record.device!r}"
    if record.device is not None and state.devices.get(record.device) != record.job:
        yield f"{name} runs on {record.device!r}, which runs {state.devices.get(record.device)!r}"
    if record.stopped and phase not in (Phase.PREPARING, Phase.RUNNING):
        yield f"{name} is stopped, {phase}, and not released"
    for shard, device in record.shard_devices.items():
        if device not in state.devices:
            yield f"{name} has shard {shard} on {device!r}, which is unknown"
        if phase is Phase.QUEUED:
            yield f"{name} is queued and has shard {shard} on {device!r}"


def _table_violations(state: State) -> Iterator[str]:
    records = state.jobs.values()
    ready = {record.job: record.view() for record in records if record.phase is Phase.READY and record.unit is not None}
    if state.eligible != ready:
        yield f"the eligible jobs are {state.eligible}, expected {ready}"
    queued = [record.job for record in records if record.phase is Phase.QUEUED]
    if list(state.queue) != queued:
        yield f"the queue is {list(state.queue)}, expected {queued}"
    slots = sum(record.phase.takes_slot for record in records)
    if state.num_slots_taken != slots:
        yield f"{state.num_slots_taken} slots are counted, expected {slots}"
    orders = [record.order for record in records]
    if orders != sorted(set(orders)) or (orders and orders[-1] >= state.num_submitted):
        yield f"the jobs' orders are {orders}, expected them rising and below {state.num_submitted}"
