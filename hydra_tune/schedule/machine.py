"""`Scheduler`: events in, commands out.

A pure state machine: no threads, no clock, no tensors, nothing waited for. Whoever drives it, a pool of real devices or
a simulated one, tells it what happened and does what it says; the same events give the same commands.

What it promises:
    * each unit runs once, in order, and no two units of a job at once;
    * a device that could be fed is fed, in the very call that makes it possible;
    * jobs are admitted in submission order, while fewer than `max_concurrent` are preparing, ready or running;
    * a job that is stopped gets no further unit, and is released as soon as nothing of it runs;
    * of a job that is over nothing is kept.
"""

from collections import deque
from collections.abc import Mapping
from types import MappingProxyType

from hydra_tune.errors import ConfigError, ScheduleError
from hydra_tune.schedule.commands import Admit, Command, Release, Run
from hydra_tune.schedule.events import DeviceAdded, Event
from hydra_tune.schedule.invariants import violations
from hydra_tune.schedule.policy import JobView, Policy
from hydra_tune.schedule.state import Phase, State
from hydra_tune.schedule.transitions import ImpossibleEventError, apply

_STORY_LENGTH = 20


class Scheduler:
    """Decides what each device does next, and when a job starts and ends.

    Not thread-safe: one thread hands in the events.

    Args:
        policy: chooses among eligible jobs.
        max_concurrent: how many jobs may be admitted at once. A job that waits at a report takes no slot; when it is
            resumed it goes on at once, even beyond this number, and the next job is admitted only below it again.

    Raises:
        ConfigError: `max_concurrent` below 1.
    """

    def __init__(self, *, policy: Policy, max_concurrent: int) -> None:
        if max_concurrent < 1:
            raise ConfigError(f"max_concurrent must be at least 1, not {max_concurrent}")
        self._policy = policy
        self._max_concurrent = max_concurrent
        self._state = State()
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
        state = self._state if len(events) == 1 else self._state.copy()
        released: list[Command] = []
        for position, event in enumerate(events):
            try:
                over = apply(state, event)
            except ImpossibleEventError as refusal:
                raise ScheduleError(self._refusal_text(event, events[:position], str(refusal))) from None
            if over is not None:
                released.append(Release(job=over))
        self._state = state
        commands = [*released, *self._feed(), *self._admit()]
        self._remember(events, commands)
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
        """Devices that run nothing, in the order they were added."""
        return tuple(self._state.idle_devices())

    @property
    def eligible_jobs(self) -> tuple[str, ...]:
        """Jobs with a unit ready to run."""
        return tuple(self._state.eligible)

    @property
    def running(self) -> dict[str, str]:
        """The job whose unit runs, for each device that runs one."""
        return {device: job for device, job in self._state.devices.items() if job is not None}

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
        idle = state.idle_devices()
        while idle and state.eligible:
            view = self._choose(idle[0])
            # Both are idle, so the chosen job is served at once either way, and here nothing is loaded.
            device = view.shard_device if view.shard_device in idle else idle[0]
            idle.remove(device)
            state.put(state.jobs[view.job]._replace(phase=Phase.RUNNING, device=device))
            state.devices[device] = view.job
            runs.append(Run(job=view.job, device=device, unit=view.unit))
        return runs

    def _choose(self, device: str) -> JobView:
        candidates = tuple(self._state.eligible.values())
        view = self._policy.choose(device, candidates)
        if not isinstance(view, JobView) or self._state.eligible.get(view.job) is not view:
            raise ScheduleError(
                f"{type(self._policy).__name__}.choose gave {view!r} for device {device!r}, expected one of "
                f"{[candidate.job for candidate in candidates]}; a policy must return one of its candidates"
            )
        return view

    def _admit(self) -> list[Command]:
        state, admitted = self._state, list[Command]()
        while state.queue and state.num_slots_taken < self._max_concurrent:
            job = next(iter(state.queue))
            state.put(state.jobs[job]._replace(phase=Phase.PREPARING))
            admitted.append(Admit(job=job))
        return admitted

    def _remember(self, events: tuple[Event, ...], commands: list[Command]) -> None:
        for entry in (*events, *commands):
            if isinstance(entry, DeviceAdded):
                continue
            if isinstance(entry, Release) or entry.job not in self._state.jobs:
                self._stories.pop(entry.job, None)
            else:
                self._stories.setdefault(entry.job, deque(maxlen=_STORY_LENGTH)).append(entry)

    def _refusal_text(self, event: Event, before: tuple[Event, ...], found: str) -> str:
        if isinstance(event, DeviceAdded):
            return f"impossible event {event!r}: {found}; report it to the scheduler once"
        story = self.story(event.job)
        story += [repr(other) for other in before if not isinstance(other, DeviceAdded) and other.job == event.job]
        told = "; ".join(story) or "nothing is known of it"
        return (
            f"impossible event {event!r}: {found}. The job's story, oldest first: {told}. "
            "Whoever drives the scheduler reported something that did not happen; please report this with the story"
        )
