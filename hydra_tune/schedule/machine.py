"""`Scheduler`: events in, commands out.

A pure state machine: no threads, no clock, no tensors, nothing waited for. Whoever drives it, a pool of real devices or
a simulated one, tells it what happened and does what it says; the same events give the same commands.

What it promises:
    * each unit runs once; one that was lost with its device runs again;
    * a job that runs nothing is given one device, for the first of its ready units; its others are *offered*: a device
      takes one only if there is no job that runs nothing and could be fed, so no job waits because another has several;
    * a device that could be fed is fed, in the very call that makes it possible, the fastest first;
    * a job is never fed or admitted before one of a higher priority that could be;
    * of one priority, jobs are admitted in submission order, while fewer than `max_concurrent` are preparing, ready or
      running;
    * a job that is stopped, or one of whose units fails, gets no further unit, and is released once nothing of it runs;
    * a job that is paused gets no further unit until it is unpaused, and takes no slot once nothing of it is under way;
    * of a job that is over nothing is kept.
"""

from collections import deque
from collections.abc import Mapping
from types import MappingProxyType

from hydra_tune.errors import ConfigError, ScheduleError
from hydra_tune.schedule.commands import Admit, Command, Release, Run
from hydra_tune.schedule.events import DeviceAdded, DeviceLost, DeviceSlowed, Event
from hydra_tune.schedule.invariants import violations
from hydra_tune.schedule.levels import Levels
from hydra_tune.schedule.policy import JobView, Policy, start_selection
from hydra_tune.schedule.record import JobRecord, Phase
from hydra_tune.schedule.state import Draft, State
from hydra_tune.schedule.transitions import ImpossibleEventError, apply
from hydra_tune.schedule.units import Unit

_STORY_LENGTH = 20
_DEVICE_EVENTS = (DeviceAdded, DeviceLost, DeviceSlowed)


class Scheduler:
    """Decides what each device does next, and when a job starts and ends.

    Not thread-safe: one thread hands in the events.

    Args:
        policy: chooses among eligible jobs.
        max_concurrent: how many jobs may be admitted at once. A job that waits at a report, or is paused, takes no slot;
            when it goes on it does so at once, even beyond this number, and the next job is admitted only below it again.

    Raises:
        ConfigError: `max_concurrent` below 1.
    """

    def __init__(self, *, policy: Policy, max_concurrent: int) -> None:
        if max_concurrent < 1:
            raise ConfigError(f"max_concurrent must be at least 1, not {max_concurrent}")
        self._policy = policy
        self._max_concurrent = max_concurrent
        self._state = State(levels=Levels(lambda: start_selection(policy)))
        self._stories: dict[str, deque[Event | Command]] = {}  # of each job that is not over; made text when asked for

    def handle(self, *events: Event) -> list[Command]:
        """Take what happened and say what to do.

        The events are taken in order; what to do is decided once, after the last. All are taken or none is.

        Args:
            *events: what happened since the last call.

        Returns:
            What to do, in this order: memory to give back, units to run, jobs to prepare.

        Raises:
            ScheduleError: an event that is impossible here, with the state found and the job's story. Nothing changed.
                Also a policy that returned something else than a candidate; this, like an exception from the policy,
                leaves the events taken and their commands lost: the scheduler is not to be used further.
        """
        # A single event that is refused has changed nothing; of several, the earlier ones must leave no trace either.
        draft = None if len(events) == 1 else Draft(self._state)
        released: list[Command] = []
        victims: dict[int, str] = {}
        for position, event in enumerate(events):
            tables = draft or self._state
            if isinstance(event, DeviceLost) and (lost := tables.find_device(event.device)) is not None and lost.job:
                victims[position] = lost.job
            try:
                over = apply(tables, event)
            except ImpossibleEventError as refusal:
                raise ScheduleError(self._refusal_text(event, events[:position], str(refusal))) from None
            if over is not None:
                released.append(Release(job=over))
        if draft is not None:
            draft.commit()
        commands = [*released, *self._feed(), *self._admit()]
        self._remember(events, victims, commands)
        return commands

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

    @property
    def idle_devices(self) -> tuple[str, ...]:
        """Devices that run nothing, in the order in which they would be fed: the fastest, then the first added."""
        return tuple(device for _, _, device in self._state.idle)

    @property
    def eligible_jobs(self) -> tuple[str, ...]:
        """Jobs with a unit ready to run."""
        return tuple(job for job, record in self._state.jobs.items() if record.view is not None)

    @property
    def offering_jobs(self) -> tuple[str, ...]:
        """Running jobs with further units that are ready."""
        return tuple(self._state.offering)

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

    def _feed(self) -> list[Command]:
        state, runs = self._state, list[Command]()
        while state.idle and (state.num_eligible or state.offering):
            if state.num_eligible:
                view = self._choose(state.idle[0][2])
                record = state.jobs[view.job]
                runs.append(self._start(record, record.ready[0], self._place(view)))
            else:
                runs.append(self._lend())
        return runs

    def _start(self, record: JobRecord, unit: Unit, place: str) -> Run:
        state, device = self._state, self._state.devices[place]
        state.num_runs += 1
        record.phase, record.turn, record.last_device = Phase.RUNNING, state.num_runs, place
        if len(record.ready) == 1 and not record.running:  # as nearly always
            record.ready, record.running = (), {place: unit}
        else:
            record.ready = tuple(other for other in record.ready if other is not unit)
            record.running = {**record.running, place: unit}
        state.put(record)
        device.job = record.job
        state.put_device(device)
        return Run(job=record.job, device=place, unit=unit)

    def _lend(self) -> Run:
        """Give a device that no job could have a further unit of a running job: the one with the longest time left."""
        state = self._state
        records = [state.jobs[job] for job in state.offering]
        record = max(records, key=lambda r: (r.priority, r.estimate.remaining_seconds, -r.order))
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
        if record is None or record.view is not view or view.priority != highest:
            views = [record.view for record in self._state.jobs.values() if record.view is not None]
            raise ScheduleError(
                f"{type(self._policy).__name__}.choose gave {view!r} for device {device!r}, expected one of "
                f"{[other.job for other in views if other.priority == highest]}; a policy must return one of its candidates"
            )
        return view

    def _place(self, view: JobView) -> str:
        """The idle device that runs the chosen unit: of the fastest, the one where least is to be moved."""
        state = self._state
        speed, _, asked = state.idle[0]
        for name in (view.shard_device, view.last_device):
            # That one is idle too, so the job is served at once either way, and the device that asked is asked again.
            place = state.devices[name].idle_place if name is not None else None
            if name is not None and place is not None and place[0] == speed:
                return name
        return asked

    def _admit(self) -> list[Command]:
        state, admitted = self._state, list[Command]()
        while state.num_slots_taken < self._max_concurrent and (record := state.next_queued()) is not None:
            record.phase = Phase.PREPARING
            state.put(record)
            admitted.append(Admit(job=record.job))
        return admitted

    def _remember(self, events: tuple[Event, ...], victims: dict[int, str], commands: list[Command]) -> None:
        for position, event in enumerate(events):
            if not isinstance(event, _DEVICE_EVENTS):
                self._remember_one(event.job, event)
            elif position in victims:
                self._remember_one(victims[position], event)
        for command in commands:
            self._remember_one(command.job, command)

    def _remember_one(self, job: str, entry: Event | Command) -> None:
        if job not in self._state.jobs:
            self._stories.pop(job, None)
            return
        story = self._stories.get(job)
        if story is None:
            story = self._stories[job] = deque(maxlen=_STORY_LENGTH)
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
