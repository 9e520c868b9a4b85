"""`Scheduler`: events in, commands out.

A pure state machine: no threads, no clock, no tensors, nothing waited for. Whoever drives it, a pool of real devices or
a simulated one, tells it what happened and does what it says; the same events give the same commands.

What it promises:
    * each unit runs once; one that was lost with its device runs again;
    * a job that runs nothing is given one device, for the first of its ready units; its others are *offered*: a device
      takes one only if there is no job that runs nothing and could be fed, so no job waits because another has several;
    * a device that could be fed is fed, in the very call that makes it possible, the fastest first; but of the units that a
      device could be given, one that is meant for an idle device (`near`) goes there. No unit waits for the device that it
      is meant for while another could have it;
    * a job is never fed or admitted before one of a higher priority that could be;
    * of one priority, jobs are admitted in submission order, while fewer than `max_concurrent` are preparing, ready or
      running;
    * where admission is staggered, no job beyond the front is fed before one of the front, of its priority, that could be;
    * where a job begins to wait and every device is busy, one burst of steps, of a job of no higher priority, is asked to end
      after its present step, if any is there: the one whose job has the least left;
    * a job that is stopped, or one of whose units fails, gets no further unit, and is released once nothing of it runs;
    * a job that is paused gets no further unit until it is unpaused, and takes no slot once nothing of it is under way;
    * of a job that is over nothing is kept.
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
from hydra_tune.schedule.front import ADMISSIONS, Front, check_admission
from hydra_tune.schedule.invariants import violations
from hydra_tune.schedule.levels import Levels
from hydra_tune.schedule.policy import JobView, Policy, start_selection
from hydra_tune.schedule.record import JobRecord, Phase
from hydra_tune.schedule.state import Draft, State, Tables
from hydra_tune.schedule.transitions import ImpossibleEventError, apply
from hydra_tune.schedule.units import Unit

_STORY_LENGTH = 20
_RUNNING = Phase.RUNNING  # looked up for every unit, and an enum's members are slow to look up
_DEVICE_EVENTS = (DeviceAdded, DeviceLost, DeviceSlowed)
_CALLS = (JobAdmitted, JobResumed, JobUnpaused, PriorityChanged)  # after which a job may wait that did not wait before


class Scheduler:
    """Decides what each device does next, and when a job starts and ends.

    Not thread-safe: one thread hands in the events.

    Args:
        policy: chooses among eligible jobs.
        max_concurrent: how many jobs may be admitted at once. A job that waits at a report, or is paused, takes no slot;
            when it goes on it does so at once, even beyond this number, and the next job is admitted only below it again.
        admission: "eager" leaves the choice among all admitted jobs to the policy; "staggered" has the oldest go first, as
            many as there are devices (note in `schedule/front.py`).

    Raises:
        ConfigError: `max_concurrent` below 1, or an unknown admission.
    """

    def __init__(self, *, policy: Policy, max_concurrent: int, admission: str = ADMISSIONS[0]) -> None:
        if max_concurrent < 1:
            raise ConfigError(f"max_concurrent must be at least 1, not {max_concurrent}")
        check_admission(admission)
        self._policy = policy
        self._max_concurrent = max_concurrent
        front = Front() if admission == "staggered" else None
        self._state = State(levels=Levels(lambda: start_selection(policy)), front=front)
        self._stories: dict[str, deque[Event | Command]] = {}  # of each job that is not over; made text when asked for

    def handle(self, *events: Event) -> list[Command]:
        """Take what happened and say what to do.

        The events are taken in order; what to do is decided once, after the last. All are taken or none is.

        Args:
            *events: what happened since the last call.

        Returns:
            What to do, in this order: memory to give back, units to run, bursts to end, jobs to prepare.

        Raises:
            ScheduleError: an event that is impossible here, with the state found and the job's story. Nothing changed.
                Also a policy that returned something else than a candidate; this, like an exception from the policy,
                leaves the events taken and their commands lost: the scheduler is not to be used further.
        """
        if len(events) == 1:  # one that is refused has changed nothing
            released, victims = self._take(self._state, events[0], 0, events)
        else:  # the earlier ones of several must leave no trace either
            draft, released, victims = Draft(self._state), [], {}
            for position, event in enumerate(events):
                over, lost = self._take(draft, event, position, events)
                released += over
                victims |= lost
            draft.commit()
        commands = self._feed(released)
        self._end_bursts([event.job for event in events if isinstance(event, _CALLS)] + [*victims.values()], commands)
        self._admit(commands)
        self._remember(events, victims, commands)
        return commands

    def _take(
        self, tables: Tables, event: Event, position: int, events: tuple[Event, ...]
    ) -> tuple[list[Command], dict[int, str]]:
        """Apply one event; what it releases, and the job whose unit was lost with a device, by the event's position."""
        victims: dict[int, str] = {}
        if type(event) is DeviceLost and (lost := tables.find_device(event.device)) is not None and lost.job:
            victims[position] = lost.job
        try:
            over = apply(tables, event)
        except ImpossibleEventError as refusal:
            raise ScheduleError(self._refusal_text(event, events[:position], str(refusal))) from None
        return [] if over is None else [Release(job=over)], victims

    def check(self) -> None:
        """Verify every invariant; meant for tests and for whoever suspects the scheduler.

        Raises:
            ScheduleError: names each invariant that does not hold.
        """
        wrong = list(violations(self._state, max_concurrent=self._max_concurrent))
        if wrong:
            raise ScheduleError(f"the scheduler's state is inconsistent: {'; '.join(wrong)}; please report this")

    def story(self, job: str) -> list[str]:
        """The last events and commands of a job, oldest first; empty if it is unknown or over."""
        return [repr(entry) for entry in self._stories.get(job, ())]

    def view(self, job: str) -> JobView | None:
        """What the policy has been told of a job; None if that is nothing, because the job is not eligible."""
        record = self._state.jobs.get(job)
        return None if record is None else record.view

    def view_after(
        self, job: str, *, unit: Unit, seconds: float, remaining_seconds: float, shard_device: str | None
    ) -> JobView:
        """What the policy will be told of a job that runs now, if its unit goes as expected.

        Args:
            job: the job; one of its units runs.
            unit: the one that follows.
            seconds: how long the one that runs takes, on a device of speed 1.
            remaining_seconds: predicted time of what is left then, `unit` included.
            shard_device: where the shard of `unit` will be.
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
        )

    def step_seconds(self, alike: str) -> float | None:
        """What policies are shown as the time of a step of all jobs that are alike; None where there is no such job."""
        job = next(iter(self._state.kinds.get(alike, ())), None)
        return None if job is None else self._state.jobs[job].step_seconds

    def jobs_alike(self, alike: str) -> tuple[str, ...]:
        """The jobs that have this in common."""
        return tuple(self._state.kinds.get(alike, ()))

    def bound_to(self, device: str) -> str | None:
        """The job that a policy which binds early (`EarlyBinding`) has chosen for the device already; None if none."""
        return self._state.levels.bound_to(device)

    @property
    def idle_devices(self) -> tuple[str, ...]:
        """Devices that run nothing, in the order in which they would be fed: the fastest, then the first added."""
        return tuple(device for _, _, device in self._state.idle)

    @property
    def has_devices(self) -> bool:
        """Whether there is any device."""
        return bool(self._state.devices)

    @property
    def eligible_jobs(self) -> tuple[str, ...]:
        """Jobs with a unit ready to run."""
        return tuple(job for job, record in self._state.jobs.items() if record.view is not None)

    @property
    def offering_jobs(self) -> tuple[str, ...]:
        """Running jobs with further units that are ready."""
        return tuple(self._state.offering)

    @property
    def front(self) -> tuple[str, ...]:
        """Under staggered admission the jobs that go first, the oldest first; else none."""
        front = self._state.front
        return () if front is None else tuple(front.jobs)

    @property
    def running(self) -> dict[str, str]:
        """The job whose unit runs, for each device that runs one."""
        return {name: device.job for name, device in self._state.devices.items() if device.job is not None}

    @property
    def phases(self) -> Mapping[str, Phase]:
        """Where each job that is not over stands, in submission order."""
        return MappingProxyType({job: record.phase for job, record in self._state.jobs.items()})

    @property
    def num_slots_taken(self) -> int:
        """Jobs that are preparing, ready or running."""
        return self._state.num_slots_taken

    def _feed(self, commands: list[Command]) -> list[Command]:
        state = self._state
        while state.idle and (state.num_eligible or state.offering):
            if state.num_eligible:
                view = self._choose(state.idle[0][2])
                record = state.jobs[view.job]
                commands.append(self._start(record, record.ready[0], self._place(view)))
            else:
                commands.append(self._lend())
        return commands

    def _start(self, record: JobRecord, unit: Unit, place: str) -> Run:
        state, device = self._state, self._state.devices[place]
        state.num_runs += 1
        record.phase, record.turn, record.last_device = _RUNNING, state.num_runs, place
        if len(record.ready) == 1 and not record.running:  # as nearly always
            record.ready, record.running = (), {place: unit}
        else:
            record.ready = tuple(other for other in record.ready if other is not unit)
            record.running = {**record.running, place: unit}
        state.put(record)
        device.job, device.is_asked = record.job, False
        state.put_device(device)
        return Run(job=record.job, device=place, unit=unit)

    def _lend(self) -> Run:
        """Give a device that no job could have a further unit of a running job: the one with the longest time left."""
        state = self._state
        records = [state.jobs[job] for job in state.offering]
        record = max(records, key=lambda r: (r.priority, r.remaining_seconds, -r.order))
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
        if record is None or record.view is not view or (view.priority, record.is_front) != highest:
            others = [other for other in self._state.jobs.values() if other.view is not None]
            raise ScheduleError(
                f"{type(self._policy).__name__}.choose gave {view!r} for device {device!r}, expected one of "
                f"{[other.job for other in others if (other.priority, other.is_front) == highest]}; a policy must return "
                "one of its candidates"
            )
        return view

    def _place(self, view: JobView) -> str:
        """The idle device that runs the chosen unit: the one it is meant for, or of the fastest that where least is moved.

        A job that begins goes to the one where the fewest others have run last.
        """
        state = self._state
        speed, _, asked = state.idle[0]
        near = state.devices.get(view.unit.near) if view.unit.near is not None else None
        if near is not None and near.idle_place is not None:
            return near.device
        for name in (view.shard_device, view.last_device):
            # That one is idle too, so the job is served at once either way, and the device that asked is asked again.
            place = state.devices[name].idle_place if name is not None else None
            if name is not None and place is not None and place[0] == speed:
                return name
        if view.shard_device is None and view.last_device is None and len(state.idle) > 1:
            # What a job loads when it begins is likely to stay where that is.
            equals = takewhile(lambda place: place[0] == speed, state.idle)
            return min((name for _, _, name in equals), key=lambda name: state.homes[name])
        return asked

    def _end_bursts(self, beginning: list[str], commands: list[Command]) -> None:
        """For each of these jobs that waits now, and has not before, ask one burst to end."""
        state = self._state
        if state.idle:
            return
        for job in beginning:
            waiting = state.jobs.get(job)
            if waiting is None or waiting.view is None:
                continue
            found = [
                (state.jobs[device.job], device)
                for name, device in state.devices.items()
                if device.job is not None
                and not device.is_asked
                and state.jobs[device.job].priority <= waiting.priority
                and state.jobs[device.job].running[name].may_end_early
            ]
            if found:
                least, device = min(found, key=lambda one: (one[0].priority, one[0].remaining_seconds, -one[0].order))
                device.is_asked = True
                commands.append(EndBurst(job=least.job, device=device.device))

    def _admit(self, commands: list[Command]) -> None:
        state = self._state
        while state.num_slots_taken < self._max_concurrent and (record := state.next_queued()) is not None:
            record.phase = Phase.PREPARING
            state.put(record)
            commands.append(Admit(job=record.job))

    def _remember(self, events: tuple[Event, ...], victims: dict[int, str], commands: list[Command]) -> None:
        for position, event in enumerate(events):
            if not isinstance(event, _DEVICE_EVENTS):
                self._remember_one(event.job, event)
            elif position in victims:
                self._remember_one(victims[position], event)
        for command in commands:
            self._remember_one(command.job, command)

    def _remember_one(self, job: str, entry: Event | Command) -> None:
        story = self._stories.get(job)
        if job not in self._state.jobs:
            self._stories.pop(job, None)
        elif story is None:
            self._stories[job] = deque((entry,), maxlen=_STORY_LENGTH)
        else:
            story.append(entry)

    def _refusal_text(self, event: Event, before: tuple[Event, ...], found: str) -> str:
        if isinstance(event, _DEVICE_EVENTS):
            return (
                f"impossible event {event!r}: {found}. Whoever drives the scheduler adds a device before anything else is "
                "told of it, and loses it once"
            )
        story = self.story(event.job)
        story += [repr(other) for other in before if not isinstance(other, _DEVICE_EVENTS) and other.job == event.job]
        told = "; ".join(story) or "nothing is known of it"
        return (
            f"impossible event {event!r}: {found}. The job's story, oldest first: {told}. "
            "Whoever drives the scheduler reported something that did not happen; please report this with the story"
        )
