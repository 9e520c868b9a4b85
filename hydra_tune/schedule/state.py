"""`State`: everything the scheduler remembers, and the one place where it changes; `Draft`: changes not yet taken.

`put` and `drop` keep what only repeats the records (the queue, the idle devices, the slots taken, what the policy was
told) in step with them; `invariants.py` recomputes each.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain

from hydra_tune.schedule.front import Age, Front
from hydra_tune.schedule.levels import Levels
from hydra_tune.schedule.policy import JobView
from hydra_tune.schedule.record import DeviceRecord, JobRecord, Phase, copied

# Looked up for every unit, and an enum's members are slow to look up.
_QUEUED, _PREPARING, _READY, _RUNNING = Phase.QUEUED, Phase.PREPARING, Phase.READY, Phase.RUNNING


@dataclass(slots=True, kw_only=True)
class State:
    """All jobs that are not over, and all devices.

    Args:
        levels: the policy's side: what it was told of each ready job.
        jobs: every job by name, in submission order.
        devices: every device, in the order added.
        idle: the places of the idle devices, rising: the first is fed first.
        num_eligible: ready jobs.
        offering: running jobs that have further units ready.
        num_slots_taken: jobs that count against `max_concurrent`.
        num_submitted: jobs ever submitted: the next one's order.
        num_devices_added: devices ever added: the next one's index.
        num_runs: units ever started.
        front: the jobs in flight by age; None where admission is not staggered.
        homes: by device, the jobs of which a unit last ran there.
        kinds: the jobs that are alike, by what they have in common.
    """

    levels: Levels = field(repr=False)
    front: Front | None = field(default=None, repr=False)
    jobs: dict[str, JobRecord] = field(default_factory=dict)
    devices: dict[str, DeviceRecord] = field(default_factory=dict)
    idle: list[tuple[float, int, str]] = field(default_factory=list)
    num_eligible: int = 0
    offering: dict[str, None] = field(default_factory=dict)
    num_slots_taken: int = 0
    num_submitted: int = 0
    num_devices_added: int = 0
    num_runs: int = 0
    homes: Counter[str] = field(default_factory=Counter)
    kinds: dict[str, dict[str, None]] = field(default_factory=dict)
    _queue: list[tuple[int, int, str]] = field(default_factory=list)  # a heap; jobs that left are dropped when on top

    def find(self, job: str) -> JobRecord | None:
        """What is known of a job. To change it, change the record and `put` it."""
        return self.jobs.get(job)

    def find_device(self, device: str) -> DeviceRecord | None:
        """What is known of a device. To change it, change the record and `put_device` it."""
        return self.devices.get(device)

    def all_jobs(self) -> list[JobRecord]:
        """What is known of every job."""
        return list(self.jobs.values())

    def others_alike(self, record: JobRecord) -> Iterator[JobRecord]:
        """What is known of each other job that is like this one."""
        return (self.jobs[job] for job in self.kinds.get(record.alike or "", ()) if job != record.job)

    def put(self, record: JobRecord) -> None:
        """Add a job, or take the changes to its record, which may be another object than before."""
        old = self.jobs.get(record.job)
        if old is not record:
            self._replace(record, old)
        if self.front is not None:
            self._place_by_age(self.front, record)
        phase, told = record.phase, record.view
        if phase is _READY:
            view = record.make_view()
            if view != told:  # if it is equal, the policy keeps the very object that it has
                if told is not None:
                    self._withdraw(record)
                self._offer(record, view)
        elif told is not None:
            self._withdraw(record)
        counted = phase is _READY or phase is _RUNNING or phase is _PREPARING
        if counted is not record.is_counted:
            record.is_counted = counted
            self.num_slots_taken += 1 if counted else -1
        self._note(record)
        if phase is _QUEUED and not record.paused:
            heappush(self._queue, (-record.priority, record.order, record.job))

    def _replace(self, record: JobRecord, old: JobRecord | None) -> None:
        """Take a record in, for a new job or in place of another record of the same one."""
        if old is not None and old.order != record.order:
            self.drop(old.job)  # over and submitted again within one call: its place is behind the others
            old = None
        if old is not None:
            record.view, record.is_counted = old.view, old.is_counted
            record.age, record.is_front, record.home, record.kind = old.age, old.is_front, old.home, old.kind
        self.jobs[record.job] = record

    def drop(self, job: str) -> None:
        """Forget a job that is over."""
        old = self.jobs.pop(job)
        if old.view is not None:
            self._withdraw(old)
        self.offering.pop(job, None)
        self.num_slots_taken -= old.is_counted
        self._count_at(old, None)
        self._list_under(old, None)
        if self.front is not None and old.age is not None:
            self._cross(self.front.leave(old.age))

    def put_device(self, record: DeviceRecord) -> None:
        """Add a device, or take the changes to its record, which may be another object than before."""
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
        """Forget a device that is lost."""
        old = self.devices.pop(device)
        if old.idle_place is not None:
            self._take_from_idle(old.idle_place)
        self.levels.set_speed(device, 0.0)
        if self.front is not None:
            self._cross(self.front.resize(-1))

    def number_job(self) -> int:
        """The order of a job that is submitted now."""
        self.num_submitted += 1
        return self.num_submitted - 1

    def number_device(self) -> int:
        """The index of a device that is added now."""
        self.num_devices_added += 1
        return self.num_devices_added - 1

    def next_queued(self) -> JobRecord | None:
        """The job to be admitted next; None if none is queued."""
        queue = self._queue
        while queue:
            negative, order, job = queue[0]
            record = self.jobs.get(job)
            if record is not None and _is_queued(record) and (-record.priority, record.order) == (negative, order):
                return record
            heappop(queue)
        return None

    def _note(self, record: JobRecord) -> None:
        """Keep what is offered, where jobs ran last, and who is alike in step with a record that is being put."""
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
        """The policy forgets the job; what it was told, and at which level, is in the record still."""
        assert record.view is not None
        self.levels.remove(record.view, (record.view.priority, record.is_front))
        record.view = None
        self.num_eligible -= 1

    def _place_by_age(self, front: Front, record: JobRecord) -> None:
        """Keep the front in step with a record that is being put."""
        before = record.age
        age: Age | None = (-record.priority, record.order, record.job) if record.is_in_flight else None
        if age == before:
            return
        if record.view is not None:
            self._withdraw(record)  # it is told of anew, at another level
        if before is not None:
            self._cross(front.leave(before))
        if age is not None:
            self._cross(front.join(age))
        record.age, record.is_front = age, age is not None and front.holds(age)

    def _cross(self, job: str | None) -> None:
        """A job comes into the front, or leaves it, by what happened elsewhere."""
        if job is None:
            return
        record = self.jobs[job]
        view = record.view
        if view is not None:
            self._withdraw(record)
        record.is_front = not record.is_front
        if view is not None:
            self._offer(record, view)

    def _count_at(self, record: JobRecord, device: str | None) -> None:
        """A job has another home now, or none."""
        if record.home is not None:
            self.homes[record.home] -= 1
        if device is not None:
            self.homes[device] += 1
        record.home = device

    def _list_under(self, record: JobRecord, kind: str | None) -> None:
        """A job is like others now, or like none."""
        if record.kind is not None:
            del self.kinds[record.kind][record.job]
            if not self.kinds[record.kind]:
                del self.kinds[record.kind]
        if kind is not None:
            self.kinds.setdefault(kind, {})[record.job] = None
        record.kind = kind

    def _take_from_idle(self, place: tuple[float, int, str]) -> None:
        del self.idle[bisect_left(self.idle, place)]


class Draft:
    """Changes to a state that are not taken yet: a call of several events is refused as a whole.

    Looks like the state it is made from, which is as it was until `commit`. Costs what was looked at, not what there is.

    Args:
        state: the state.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._jobs: dict[str, JobRecord | None] = {}  # own copies of what was looked at; None is over
        self._devices: dict[str, DeviceRecord | None] = {}
        self._num_submitted = state.num_submitted
        self._num_devices_added = state.num_devices_added

    def find(self, job: str) -> JobRecord | None:
        """As `State.find`."""
        if job not in self._jobs:
            record = self._state.jobs.get(job)
            if record is None:
                return None
            self._jobs[job] = record.copy()
        return self._jobs[job]

    def find_device(self, device: str) -> DeviceRecord | None:
        """As `State.find_device`."""
        if device not in self._devices:
            record = self._state.devices.get(device)
            if record is None:
                return None
            self._devices[device] = copied(record)
        return self._devices[device]

    @property
    def devices(self) -> list[str]:
        """The names of all devices."""
        names = dict.fromkeys([*self._state.devices, *self._devices])
        return [name for name in names if self._devices.get(name, self._state.devices.get(name)) is not None]

    def all_jobs(self) -> list[JobRecord]:
        """As `State.all_jobs`."""
        names = dict.fromkeys([*self._state.jobs, *self._jobs])
        return [record for record in map(self.find, names) if record is not None]

    def others_alike(self, record: JobRecord) -> Iterator[JobRecord]:
        """As `State.others_alike`."""
        own = list(self._jobs)
        others = (job for job in self._state.kinds.get(record.alike or "", ()) if job not in own)
        found = map(self.find, chain(own, others))
        return (
            other for other in found if other is not None and other.alike == record.alike and other.job != record.job
        )

    def put(self, record: JobRecord) -> None:
        """As `State.put`."""
        if self._jobs.get(record.job) is None:
            self._jobs.pop(record.job, None)  # over and submitted again: behind the others
        self._jobs[record.job] = record

    def drop(self, job: str) -> None:
        """As `State.drop`."""
        self._jobs[job] = None

    def put_device(self, record: DeviceRecord) -> None:
        """As `State.put_device`."""
        if self._devices.get(record.device) is None:
            self._devices.pop(record.device, None)
        self._devices[record.device] = record

    def drop_device(self, device: str) -> None:
        """As `State.drop_device`."""
        self._devices[device] = None

    def number_job(self) -> int:
        """As `State.number_job`."""
        self._num_submitted += 1
        return self._num_submitted - 1

    def number_device(self) -> int:
        """As `State.number_device`."""
        self._num_devices_added += 1
        return self._num_devices_added - 1

    def commit(self) -> None:
        """Take all changes into the state."""
        state = self._state
        state.num_submitted, state.num_devices_added = self._num_submitted, self._num_devices_added
        for device, device_record in self._devices.items():
            if device_record is not None:
                state.put_device(device_record)
            elif device in state.devices:
                state.drop_device(device)
        for job, record in self._jobs.items():
            if record is not None:
                state.put(record)
            elif job in state.jobs:
                state.drop(job)


Tables = State | Draft
"""What events change."""


def _is_queued(record: JobRecord) -> bool:
    return record.phase is Phase.QUEUED and not record.paused
