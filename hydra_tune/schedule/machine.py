"""`Scheduler`: events in, commands out.

A pure state machine: no threads, no clock, no tensors, and no lock. A driver calls `handle` as events happen and carries out
the commands: a pool (`pool/runtime/dispatcher.py`), a forecast (`pool/dry_run/executor.py`), a simulation
(`simulate/engine/simulator.py`) or a replay (`simulate/recorded/replay.py`). `NextJobPredictor` (`ahead.py`) and
`NextUnitPredictor` (`pool/devices/next_units.py`) read views, and `pool/devices/idle_devices.py` the idle devices. Equal
events give equal commands, if the policy chooses alike.

Guarantees:

* No unit runs twice, except a unit lost with its device.
* A job without a running unit gets a device for the first of its ready units. The job's other ready units are
  *offered*: a device takes an offer only if no job without a running unit could use the device.
* An idle device with a possible unit gets a unit in the very call that makes the unit possible, the fastest device
  first. A unit meant for an idle device (`near`) goes there. No unit waits for its preferred device while another
  device is free.
* No job gets a device before an eligible job of higher priority, and no job is admitted before a queued and unpaused job of
  higher priority.
* Within a priority, unpaused jobs are admitted in submission order, while fewer than `max_concurrent` jobs are preparing,
  ready or running.
* Under staggered admission, within a priority, no job beyond the front gets a device before an eligible job of the front.
  Offers heed priorities, but no front.
* When a job is admitted, resumed or unpaused, changes its priority, or loses its unit with a device, and then waits
  because every device is busy, the scheduler asks one burst not asked yet, of a job of no higher priority, to end after its
  present step, if there is such a burst: the burst whose job has the least time left, among the jobs of the lowest priority.
* A job that is stopped, or has a failed unit, gets no further unit, and is released once its preparation and units are over.
* A paused job gets no further unit until unpaused, and takes no slot once nothing of the job is under way.
* The scheduler keeps no record and no story of a job that is over.
"""

from collections import deque
from collections.abc import Mapping
from itertools import takewhile
from types import MappingProxyType

from hydra_tune.errors import ConfigError, ScheduleError
from hydra_tune.schedule.commands import Admit, Command, EndBurst, Release, Run
from hydra_tune.schedule.events import (
    DeviceAdded,
    DeviceLost,
    DeviceSlowed,
    Event,
    JobAdmitted,
    JobResumed,
    JobUnpaused,
    PriorityChanged,
)
from hydra_tune.schedule.front import AdmissionFront, check_admission
from hydra_tune.schedule.levels import PriorityLevels
from hydra_tune.schedule.policies.policy import JobView, Policy, start_selection
from hydra_tune.schedule.record import JobPhase, JobRecord
from hydra_tune.schedule.state import SchedulerState, SchedulerStateDraft, Tables
from hydra_tune.schedule.transitions import ImpossibleEventError, apply
from hydra_tune.schedule.units import Unit

_STORY_LENGTH = 20
_RUNNING = JobPhase.RUNNING  # used for every unit, and enum members are slow to look up
_DEVICE_EVENTS = (DeviceAdded, DeviceLost, DeviceSlowed)
_CALLS = (
    JobAdmitted,
    JobResumed,
    JobUnpaused,
    PriorityChanged,
)  # events after which a burst may be asked to end for a job that waits; the loss of a device is another


class Scheduler:
    """Decides what each device does next, and when a job starts and ends.

    Not thread-safe: the driver hands in events from a single thread, or under a lock.

    Args:
        policy: chooses among eligible jobs.
        max_concurrent: how many jobs may be admitted at the same time. A job that waits for an answer or data, or
            is paused with nothing under way, takes no slot. Such a job resumes at once, even beyond `max_concurrent`; the next
            job is admitted only when a slot is free again.
        admission: "eager" leaves the choice among all admitted jobs to the policy; "staggered" lets the oldest jobs go
            first, as many as there are devices (note in `schedule/front.py`); "auto" lets the oldest of the jobs go
            first that were submitted as staggered.

    Raises:
        ConfigError: `max_concurrent` below 1, or an unknown admission.
    """

    def __init__(self, *, policy: Policy, max_concurrent: int, admission: str = "eager") -> None:
        if max_concurrent < 1:
            raise ConfigError(f"max_concurrent must be at least 1, not {max_concurrent}")
        check_admission(admission)
        self._policy = policy
        self._max_concurrent = max_concurrent
        front = None if admission == "eager" else AdmissionFront(takes_all=admission == "staggered")
        self._state = SchedulerState(levels=PriorityLevels(lambda: start_selection(policy)), front=front)
        self._stories: dict[str, deque[Event | Command]] = {}  # by live job; formatted only on request

    def handle(self, *events: Event) -> list[Command]:
        """Take events and return the resulting commands.

        Events are taken in order; the scheduler decides once, after the last event. Either all events are taken or
        none.

        Returns:
            Commands in this order: memory to give back, units to run, bursts to end, jobs to prepare.

        Raises:
            ScheduleError: an event is impossible here; the message has the state found and the job's story, and nothing
                has changed. Also raised if the policy returned something other than a candidate. In that case, as after
                an exception of the policy, the events are taken and their commands lost: the scheduler must not be used
                any more.
        """
        if len(events) == 1:  # no draft: a refused event changes nothing (`transitions.py`)
            released, victims = self._take(self._state, events[0], 0, events)
        else:  # a refused event must also undo the events before it
            draft, released, victims = SchedulerStateDraft(self._state), [], {}
            for position, event in enumerate(events):
                releases, lost_jobs = self._take(draft, event, position, events)
                released += releases
                victims |= lost_jobs
            draft.commit()
        commands = self._feed(released)
        # After feeding, so a job that has just got a device does not count as waiting.
        self._end_bursts([event.job for event in events if isinstance(event, _CALLS)] + [*victims.values()], commands)
        self._admit(commands)
        self._remember(events, victims, commands)
        return commands

    def _take(
        self, tables: Tables, event: Event, position: int, events: tuple[Event, ...]
    ) -> tuple[list[Command], dict[int, str]]:
        """Apply an event; return the releases, and by event position the job whose unit was lost with a device."""
        # Looked up before `apply`, which forgets a lost device. Needed afterwards to tell who lost a unit and may wait
        # again.
        victims: dict[int, str] = {}
        if (
            type(event) is DeviceLost
            and (lost_device := tables.find_device(event.device)) is not None
            and lost_device.job
        ):
            victims[position] = lost_device.job
        try:
            released_job = apply(tables, event)
        except ImpossibleEventError as refusal:
            raise ScheduleError(self._refusal_text(event, events[:position], str(refusal))) from None
        return [] if released_job is None else [Release(job=released_job)], victims

    def story(self, job: str) -> list[str]:
        """The last events and commands of a job, the oldest first; empty if the job is unknown or over."""
        return [repr(entry) for entry in self._stories.get(job, ())]

    def view(self, job: str) -> JobView | None:
        """Return the view given to the policy for a job; None if the job is not eligible."""
        record = self._state.jobs.get(job)
        return None if record is None else record.view

    def view_after(
        self, job: str, *, unit: Unit, seconds: float, remaining_seconds: float, shard_device: str | None
    ) -> JobView:
        """Return the view of a running job as of the end of its unit, if the unit goes as expected.

        Args:
            job: the job, with a running unit.
            unit: the unit that follows.
            seconds: time of the running unit, on a device of speed 1.
            remaining_seconds: predicted remaining time after the running unit, `unit` included.
            shard_device: the place of the shard of `unit` at that time.
        """
        record = self._state.jobs[job]
        return JobView(
            job,
            record.order,
            unit,
            record.rescaled(remaining_seconds),
            record.step_seconds,
            shard_device,
            record.priority,
            record.estimate.done_seconds + seconds,
            record.turn,
            record.last_device,
            record.last_on_base,
        )

    def step_seconds(self, alike: str) -> float | None:
        """Return the step time shown to policies for all jobs of a kind; None if there is no such job."""
        job = next(iter(self._state.kinds.get(alike, ())), None)
        return None if job is None else self._state.jobs[job].step_seconds

    def jobs_alike(self, alike: str) -> tuple[str, ...]:
        """Return the jobs of a kind."""
        return tuple(self._state.kinds.get(alike, ()))

    def bound_to(self, device: str) -> str | None:
        """Return the job that an early-binding policy (`EarlyBinding`) has bound to the device, or None."""
        return self._state.levels.bound_to(device)

    @property
    def idle_devices(self) -> tuple[str, ...]:
        """Idle devices in the order of assignment: the fastest first, then the first added."""
        return tuple(device for _, _, device in self._state.idle)

    @property
    def has_devices(self) -> bool:
        """Whether there is any device."""
        return bool(self._state.devices)

    @property
    def front(self) -> tuple[str, ...]:
        """The jobs of the front, the oldest first, then the jobs that are not staggered; empty while the front is empty."""
        front = self._state.front
        if front is None or not front.jobs:
            return ()
        return (*front.jobs, *(job for job, record in self._state.jobs.items() if record.is_front and not record.age))

    @property
    def running(self) -> dict[str, str]:
        """The job of the running unit, by busy device."""
        return {name: device.job for name, device in self._state.devices.items() if device.job is not None}

    @property
    def phases(self) -> Mapping[str, JobPhase]:
        """Phase of each live job, in submission order."""
        return MappingProxyType({job: record.phase for job, record in self._state.jobs.items()})

    @property
    def num_slots_taken(self) -> int:
        """Number of jobs that are preparing, ready or running."""
        return self._state.num_slots_taken

    def _feed(self, commands: list[Command]) -> list[Command]:
        state = self._state
        while state.idle and (state.num_eligible or state.offering):
            if state.num_eligible:
                view = self._choose(state.idle[0][2])
                record = state.jobs[view.job]
                commands.append(self._start(record, record.ready[0], self._place(view)))
            else:
                # Only now that no eligible job is left: an offer must not take a device from a job without a running
                # unit.
                commands.append(self._lend())
        return commands

    def _start(self, record: JobRecord, unit: Unit, place: str) -> Run:
        state, device = self._state, self._state.devices[place]
        state.num_runs += 1
        record.phase, record.turn, record.last_device = _RUNNING, state.num_runs, place
        if unit.base is not None:
            record.last_on_base = unit
        if len(record.ready) == 1 and not record.running:  # the common case, without a loop
            record.ready, record.running = (), {place: unit}
        else:
            record.ready = tuple(other for other in record.ready if other is not unit)
            record.running = {**record.running, place: unit}
        state.put(record)
        # A request to end early was meant for the previous unit of the device.
        device.job, device.is_asked = record.job, False
        state.put_device(device)
        return Run(job=record.job, device=place, unit=unit)

    def _lend(self) -> Run:
        """Lend an otherwise idle device to a running job: the highest priority first, then the longest time left."""
        state = self._state
        records = [state.jobs[job] for job in state.offering]
        record = max(records, key=lambda r: (r.priority, r.remaining_seconds, -r.order))
        # A unit whose inputs are on an idle device goes there, even before a unit of lower rank, because it moves the
        # least.
        for unit in record.ready:
            near = state.devices.get(unit.near) if unit.near is not None else None
            if near is not None and near.idle_place is not None:
                return self._start(record, unit, near.device)
        return self._start(record, record.ready[0], state.idle[0][2])

    def _choose(self, device: str) -> JobView:
        levels = self._state.levels
        highest = levels.highest
        view = levels.choose(device)
        record = self._state.jobs.get(view.job) if isinstance(view, JobView) else None
        # Identity, because a policy may return an outdated view of a job that is still eligible.
        if record is None or record.view is not view or (view.priority, record.is_front) != highest:
            eligible = [other for other in self._state.jobs.values() if other.view is not None]
            raise ScheduleError(
                f"{type(self._policy).__name__}.choose gave {view!r} for device {device!r}, expected one of "
                f"{[other.job for other in eligible if (other.priority, other.is_front) == highest]}; a policy must return "
                "one of its candidates"
            )
        return view

    def _place(self, view: JobView) -> str:
        """Choose the idle device for the chosen unit.

        First choice is the unit's preferred device. Otherwise, among the fastest idle devices: the device with the
        unit's shard, then the job's last device. A job with neither goes to the device that the fewest other jobs ran on last.
        """
        state = self._state
        speed, _, asking_device = state.idle[0]
        near = state.devices.get(view.unit.near) if view.unit.near is not None else None
        if near is not None and near.idle_place is not None:
            return near.device
        for name in (view.shard_device, view.last_device):
            # The other device is idle, too, so the job runs at once either way, and the asking device is asked about
            # again.
            place = state.devices[name].idle_place if name is not None else None
            if name is not None and place is not None and place[0] == speed:
                return name
        if view.shard_device is None and view.last_device is None and len(state.idle) > 1:
            # A new job's shards are likely to stay where they are first loaded, so new jobs are spread evenly.
            equals = takewhile(lambda place: place[0] == speed, state.idle)
            return min((name for _, _, name in equals), key=lambda name: state.homes[name])
        return asking_device

    def _end_bursts(self, beginning: list[str], commands: list[Command]) -> None:
        """Ask a burst to end for each of the given jobs that waits for a device now."""
        state = self._state
        # A device that is still idle after feeding means that no job waits.
        if state.idle:
            return
        for job in beginning:
            waiting_job = state.jobs.get(job)
            if waiting_job is None or waiting_job.view is None:
                continue
            bursts = [
                (state.jobs[device.job], device)
                for name, device in state.devices.items()
                if device.job is not None
                and not device.is_asked
                and state.jobs[device.job].priority <= waiting_job.priority
                and state.jobs[device.job].running[name].may_end_early
            ]
            if bursts:
                # The job that longest-remaining-time-first would choose last gives way.
                shortest, device = min(
                    bursts, key=lambda burst: (burst[0].priority, burst[0].remaining_seconds, -burst[0].order)
                )
                device.is_asked = True
                commands.append(EndBurst(job=shortest.job, device=device.device))

    def _admit(self, commands: list[Command]) -> None:
        state = self._state
        while state.num_slots_taken < self._max_concurrent and (record := state.next_queued()) is not None:
            record.phase = JobPhase.PREPARING
            state.put(record)
            commands.append(Admit(job=record.job))

    def _remember(self, events: tuple[Event, ...], victims: dict[int, str], commands: list[Command]) -> None:
        for position, event in enumerate(events):
            if not isinstance(event, _DEVICE_EVENTS):
                self._remember_one(event.job, event)
            # The loss of a device belongs to the story of the job whose unit was lost.
            elif position in victims:
                self._remember_one(victims[position], event)
        for command in commands:
            self._remember_one(command.job, command)

    def _remember_one(self, job: str, entry: Event | Command) -> None:
        story = self._stories.get(job)
        # The job is over, and its story is dropped.
        if job not in self._state.jobs:
            self._stories.pop(job, None)
        elif story is None:
            self._stories[job] = deque((entry,), maxlen=_STORY_LENGTH)
        else:
            story.append(entry)

    def _refusal_text(self, event: Event, before: tuple[Event, ...], found: str) -> str:
        if isinstance(event, _DEVICE_EVENTS):
            return (
                f"impossible event {event!r}: {found}. The driver must report a device's addition before any other event of "
                "the device, and its loss at most once"
            )
        story = self.story(event.job)
        story += [repr(other) for other in before if not isinstance(other, _DEVICE_EVENTS) and other.job == event.job]
        story_text = "; ".join(story) or "empty"
        return (
            f"impossible event {event!r}: {found}. The job's story, oldest first: {story_text}. "
            "The driver reported an event that cannot have happened; please report this with the story"
        )
