"""`SchedulerState`: the scheduler's memory; `SchedulerStateDraft`: uncommitted changes.

`Scheduler` (`machine.py`) applies events through `transitions.py`; several events at once go to a draft, which takes effect
when all events are accepted. `Scheduler` reads the tables, and puts the records that it changes itself. The module must not
judge whether an event is allowed, nor choose a unit, and takes no lock, because the scheduler's caller holds one or is the
only thread.

`put`, `drop`, `put_device` and `drop_device` of `SchedulerState` also update everything derived from the records, such as
the queue, the idle devices and the policy's views. `tests/support/schedule_invariants.py` recomputes each derived table.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain

from hydra_tune.schedule.front import AdmissionFront, Age
from hydra_tune.schedule.levels import PriorityLevels
from hydra_tune.schedule.policies.policy import JobView
from hydra_tune.schedule.record import DeviceRecord, JobPhase, JobRecord, copied

# Bound here, because these names are used for every unit, and enum members are slow to look up.
_QUEUED, _PREPARING, _READY, _RUNNING = JobPhase.QUEUED, JobPhase.PREPARING, JobPhase.READY, JobPhase.RUNNING


@dataclass(slots=True, kw_only=True)
class SchedulerState:
    """All live jobs and all devices.

    Args:
        levels: the policy's side: the view of each ready job.
        jobs: every job by name, in submission order.
        devices: every device by name, in the order of adding.
        idle: places of the idle devices in rising order: the first gets a unit first.
        num_eligible: number of ready jobs.
        offering: running jobs with further ready units.
        num_slots_taken: number of jobs that count against `max_concurrent`.
        num_submitted: number of jobs ever submitted, and so the order of the next job.
        num_devices_added: number of devices ever added, and so the index of the next device.
        num_runs: number of units ever started.
        front: the staggered jobs in flight by age; None under eager admission.
        homes: by device, the number of live jobs whose last unit began or ended there.
        kinds: the jobs that are alike, by their shared name.
    """

    levels: PriorityLevels = field(repr=False)
    front: AdmissionFront | None = field(default=None, repr=False)
    jobs: dict[str, JobRecord] = field(default_factory=dict)
    devices: dict[str, DeviceRecord] = field(default_factory=dict)
    idle: list[tuple[float, int, str]] = field(default_factory=list)
    num_eligible: int = 0
    # An ordered set: the order of a set of strings differs between processes, and equal events give equal commands.
    offering: dict[str, None] = field(default_factory=dict)
    num_slots_taken: int = 0
    num_submitted: int = 0
    num_devices_added: int = 0
    num_runs: int = 0
    homes: Counter[str] = field(default_factory=Counter)
    # The inner dictionaries are ordered sets, too.
    kinds: dict[str, dict[str, None]] = field(default_factory=dict)
    _queue: list[tuple[int, int, str]] = field(default_factory=list)  # a heap with lazy removal, at the top

    def find(self, job: str) -> JobRecord | None:
        """Return a job's record."""
        return self.jobs.get(job)

    def find_device(self, device: str) -> DeviceRecord | None:
        """Return a device's record."""
        return self.devices.get(device)

    def all_jobs(self) -> list[JobRecord]:
        """Return the records of all jobs."""
        return list(self.jobs.values())

    def others_alike(self, record: JobRecord) -> Iterator[JobRecord]:
        """Return the records of all other jobs that are like the given job."""
        return (self.jobs[job] for job in self.kinds.get(record.alike or "", ()) if job != record.job)

    def put(self, record: JobRecord) -> None:
        """Add a job, or accept changes to a job's record, which may be a new object."""
        old = self.jobs.get(record.job)
        if old is not record:
            self._replace(record, old)
        if self.front is not None:
            # Before the view is read: a change of age moves the job to another level, and withdraws the view from the
            # old level.
            self._place_by_age(self.front, record)
        phase, old_view = record.phase, record.view
        if phase is _READY:
            view = record.make_view()
            if view != old_view:  # an equal view is kept, because selections compare by identity
                if old_view is not None:
                    self._withdraw(record)
                self._offer(record, view)
        elif old_view is not None:
            self._withdraw(record)
        # By comparisons alone, because this runs for every unit.
        takes_slot = phase is _READY or phase is _RUNNING or phase is _PREPARING
        if takes_slot is not record.is_counted:
            record.is_counted = takes_slot
            self.num_slots_taken += 1 if takes_slot else -1
        self._note(record)
        if phase is _QUEUED and not record.paused:
            # Possibly for the second time, which does no harm: `next_queued` compares each entry with the job's record.
            heappush(self._queue, (-record.priority, record.order, record.job))

    def _replace(self, record: JobRecord, old: JobRecord | None) -> None:
        """Enter a record for a new job, or in place of the job's previous record."""
        if old is not None and old.order != record.order:
            self.drop(old.job)  # over and resubmitted within one call: goes to the end of the order
            old = None
        if old is not None:
            # Derived fields come from the old record: `record` may be a draft's copy, made before another `put` of the
            # same commit changed them.
            record.view, record.is_counted = old.view, old.is_counted
            record.age, record.is_front, record.home, record.kind = old.age, old.is_front, old.home, old.kind
        elif self.front is not None:
            record.is_front = not self._is_staggered(record, self.front)
        self.jobs[record.job] = record

    def drop(self, job: str) -> None:
        """Forget a job that is over."""
        old = self.jobs.pop(job)
        if old.view is not None:
            # Before the job leaves the front, because the level of the view depends on `is_front`.
            self._withdraw(old)
        self.offering.pop(job, None)
        self.num_slots_taken -= old.is_counted
        self._count_at(old, None)
        self._list_under(old, None)
        if self.front is not None and old.age is not None:
            self._cross(self.front.leave(old.age))

    def put_device(self, record: DeviceRecord) -> None:
        """Add a device, or accept changes to a device's record, which may be a new object."""
        old = self.devices.get(record.device)
        if old is not record:
            if old is not None and old.index != record.index:
                self.drop_device(old.device)  # lost and added again within one call
                old = None
            self.devices[record.device] = record
        if old is not None and old.idle_place is not None:
            self._take_from_idle(old.idle_place)
        if old is None or old.told_speed != record.speed:
            self.levels.set_speed(record.device, record.speed)
            record.told_speed = record.speed
        if old is None and self.front is not None:
            self._cross(self.front.resize(1))
        record.idle_place = None
        if record.job is None:
            record.idle_place = (-record.speed, record.index, record.device)
            insort(self.idle, record.idle_place)

    def drop_device(self, device: str) -> None:
        """Forget a lost device."""
        old = self.devices.pop(device)
        if old.idle_place is not None:
            self._take_from_idle(old.idle_place)
        self.levels.set_speed(device, 0.0)
        if self.front is not None:
            self._cross(self.front.resize(-1))

    def number_job(self) -> int:
        """Return the order for a job submitted now."""
        self.num_submitted += 1
        return self.num_submitted - 1

    def number_device(self) -> int:
        """Return the index for a device added now."""
        self.num_devices_added += 1
        return self.num_devices_added - 1

    def next_queued(self) -> JobRecord | None:
        """Return the job to admit next; None if no job is queued."""
        queue = self._queue
        # Each `put` of an unpaused queued job pushes an entry. Entries of jobs admitted, paused or reprioritized since are
        # stale, and dropped here.
        while queue:
            negative, order, job = queue[0]
            record = self.jobs.get(job)
            if record is not None and _is_queued(record) and (-record.priority, record.order) == (negative, order):
                return record
            heappop(queue)
        return None

    def _note(self, record: JobRecord) -> None:
        """Update offers, homes and kinds for a record being put."""
        if record.home != record.last_device:
            self._count_at(record, record.last_device)
        if record.kind != record.alike:
            self._list_under(record, record.alike)
        if record.ready and record.offers:
            self.offering[record.job] = None
        elif self.offering:
            self.offering.pop(record.job, None)

    def _offer(self, record: JobRecord, view: JobView) -> None:
        self.levels.add(view, (view.priority, record.is_front))
        record.view = view
        self.num_eligible += 1

    def _withdraw(self, record: JobRecord) -> None:
        """Remove the job's view from the policy.

        The record still holds the old view and level, which the selection needs for the removal.
        """
        assert record.view is not None
        self.levels.remove(record.view, (record.view.priority, record.is_front))
        record.view = None
        self.num_eligible -= 1

    def _place_by_age(self, front: AdmissionFront, record: JobRecord) -> None:
        """Update the front for a record being put."""
        before = record.age
        is_aged = record.is_in_flight and self._is_staggered(record, front)
        age: Age | None = (-record.priority, record.order, record.job) if is_aged else None
        if age == before:
            return
        if record.view is not None:
            self._withdraw(record)  # `put` adds the view again, at the new level
        if before is not None:
            self._cross(front.leave(before))
        if age is not None:
            self._cross(front.join(age))
        record.age, record.is_front = age, age is not None and front.holds(age)

    @staticmethod
    def _is_staggered(record: JobRecord, front: AdmissionFront) -> bool:
        return front.takes_all or record.staggered

    def _cross(self, job: str | None) -> None:
        """Move a job into or out of the front because of a change elsewhere."""
        if job is None:
            return
        record = self.jobs[job]
        view = record.view
        if view is not None:
            # Withdrawn before `is_front` changes, because the level of the old view depends on `is_front`.
            self._withdraw(record)
        record.is_front = not record.is_front
        if view is not None:
            self._offer(record, view)

    def _count_at(self, record: JobRecord, device: str | None) -> None:
        """Change the device at which a job counts in `homes`; None: no device."""
        if record.home is not None:
            self.homes[record.home] -= 1
        if device is not None:
            self.homes[device] += 1
        record.home = device

    def _list_under(self, record: JobRecord, kind: str | None) -> None:
        """Change the kind under which a job is listed; None: no kind."""
        if record.kind is not None:
            del self.kinds[record.kind][record.job]
            if not self.kinds[record.kind]:
                del self.kinds[record.kind]
        if kind is not None:
            self.kinds.setdefault(kind, {})[record.job] = None
        record.kind = kind

    def _take_from_idle(self, place: tuple[float, int, str]) -> None:
        del self.idle[bisect_left(self.idle, place)]


class SchedulerStateDraft:
    """Copy-on-write view of a `SchedulerState`, for refusing a call of several events as a whole.

    Behaves to `transitions.py` like the state, which stays unchanged until `commit`. Records are copied on first access, so a
    draft costs O(records touched), not O(jobs); only the loss of a device touches every job.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._jobs: dict[str, JobRecord | None] = {}  # copies of the records touched; None: the job is over
        self._devices: dict[str, DeviceRecord | None] = {}
        self._num_submitted = state.num_submitted
        self._num_devices_added = state.num_devices_added

    def find(self, job: str) -> JobRecord | None:
        """As `SchedulerState.find`."""
        if job not in self._jobs:
            record = self._state.jobs.get(job)
            if record is None:
                return None
            self._jobs[job] = record.copy()
        return self._jobs[job]

    def find_device(self, device: str) -> DeviceRecord | None:
        """As `SchedulerState.find_device`."""
        if device not in self._devices:
            record = self._state.devices.get(device)
            if record is None:
                return None
            self._devices[device] = copied(record)
        return self._devices[device]

    @property
    def devices(self) -> list[str]:
        """Names of all devices."""
        names = dict.fromkeys([*self._state.devices, *self._devices])
        return [name for name in names if self._devices.get(name, self._state.devices.get(name)) is not None]

    def all_jobs(self) -> list[JobRecord]:
        """As `SchedulerState.all_jobs`."""
        names = dict.fromkeys([*self._state.jobs, *self._jobs])
        return [record for record in map(self.find, names) if record is not None]

    def others_alike(self, record: JobRecord) -> Iterator[JobRecord]:
        """As `SchedulerState.others_alike`."""
        # All touched jobs are searched, because events of this call may have changed what a job is alike to. The names
        # are copied, because `find` adds to `_jobs` while the caller iterates.
        touched_jobs = list(self._jobs)
        untouched_jobs = (job for job in self._state.kinds.get(record.alike or "", ()) if job not in touched_jobs)
        records = map(self.find, chain(touched_jobs, untouched_jobs))
        return (
            other for other in records if other is not None and other.alike == record.alike and other.job != record.job
        )

    def put(self, record: JobRecord) -> None:
        """As `SchedulerState.put`."""
        if self._jobs.get(record.job) is None:
            self._jobs.pop(record.job, None)  # over and resubmitted: goes to the end of the order
        self._jobs[record.job] = record

    def drop(self, job: str) -> None:
        """As `SchedulerState.drop`."""
        self._jobs[job] = None

    def put_device(self, record: DeviceRecord) -> None:
        """As `SchedulerState.put_device`."""
        if self._devices.get(record.device) is None:
            # Lost and added again: goes to the end of the order.
            self._devices.pop(record.device, None)
        self._devices[record.device] = record

    def drop_device(self, device: str) -> None:
        """As `SchedulerState.drop_device`."""
        self._devices[device] = None

    def number_job(self) -> int:
        """As `SchedulerState.number_job`."""
        self._num_submitted += 1
        return self._num_submitted - 1

    def number_device(self) -> int:
        """As `SchedulerState.number_device`."""
        self._num_devices_added += 1
        return self._num_devices_added - 1

    def commit(self) -> None:
        """Apply all changes to the state."""
        state = self._state
        state.num_submitted, state.num_devices_added = self._num_submitted, self._num_devices_added
        for device, device_record in self._devices.items():
            if device_record is not None:
                state.put_device(device_record)
            # A device that was added and lost within this call is unknown to the state.
            elif device in state.devices:
                state.drop_device(device)
        for job, record in self._jobs.items():
            if record is not None:
                state.put(record)
            # Likewise a job that was submitted and stopped within this call.
            elif job in state.jobs:
                state.drop(job)


Tables = SchedulerState | SchedulerStateDraft
"""The tables that events change."""


def _is_queued(record: JobRecord) -> bool:
    return record.phase is JobPhase.QUEUED and not record.paused
