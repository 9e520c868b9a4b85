"""Replays a recorded run: measured times on a virtual clock, with a new schedule.

A new scheduler receives the pool's events as the virtual clock reaches them. Each job's own behaviour comes from its
script (`script.py`); memory effects and copy times follow from the blocks (`pager_model.py`). With the run's policy,
the replay must reproduce the run's commands in order; with another policy, the replay shows what the policy would have
done. `hydra-tune simulate --replay` (`cli/commands/simulate.py`) calls `replay` once the recording has been read, and so does
`benchmarks/replay.py`. `print_replay` (`simulate/table.py`) prints the `ReplayComparison`. The module must read no clock, and
changes no recording: a recording may be played again.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hydra_tune.errors import ConfigError, ScheduleError
from hydra_tune.schedule import (
    Admit,
    Command,
    Event,
    JobAdmitted,
    JobRejected,
    JobStopped,
    JobSubmitted,
    Policy,
    Release,
    Run,
    Scheduler,
    ShardMoved,
    UnitFailed,
    UnitFinished,
    make_policy,
)
from hydra_tune.schedule.journal import SchedulerDecision
from hydra_tune.simulate.recorded.pager_model import BACKGROUND, ReplayPager
from hydra_tune.simulate.recorded.recording import DAMAGE, Recording
from hydra_tune.simulate.recorded.script import STOP, JobScript, ScriptedTurn, scripts_of

_SECOND = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayComparison:
    """A recorded run beside its simulation.

    Args:
        policy, recorded_policy: policy of the simulation, and of the run.
        recorded, simulated: all calls of the scheduler.
        bytes_in, bytes_out: bytes loaded and spilled in the simulation.
        bytes_across: bytes taken over from another device in the simulation.
        leaves_out_ahead: whether the run prefetched and the simulation did not. Another policy's prefetches are not
            known, so units wait for all of their loads, as without double buffering.
    """

    policy: str
    recorded_policy: str
    recorded: tuple[SchedulerDecision, ...] = field(repr=False)
    simulated: tuple[SchedulerDecision, ...] = field(repr=False)
    bytes_in: int
    bytes_out: int
    bytes_across: int = 0
    leaves_out_ahead: bool = False

    @property
    def recorded_seconds(self) -> float:
        """Seconds from the first command to run a unit to the end of the last unit, in the run."""
        return _span(self.recorded)

    @property
    def simulated_seconds(self) -> float:
        """Seconds from the first command to run a unit to the end of the last unit, in the simulation."""
        return _span(self.simulated)

    @property
    def recorded_orders(self) -> list[tuple[str, ...]]:
        """The run's commands in order, each as name and job, with device, kind of unit and shard where present."""
        return _orders(self.recorded)

    @property
    def simulated_orders(self) -> list[tuple[str, ...]]:
        """The simulation's commands in order, likewise."""
        return _orders(self.simulated)

    @property
    def num_agreeing(self) -> int:
        """Number of equal commands before the first difference."""
        pairs = zip(self.recorded_orders, self.simulated_orders, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    @property
    def is_same_order(self) -> bool:
        """Whether all commands are the same, in the same order."""
        return self.recorded_orders == self.simulated_orders

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dump`."""
        return {
            "policy": self.policy,
            "recorded_policy": self.recorded_policy,
            "recorded_seconds": self.recorded_seconds,
            "simulated_seconds": self.simulated_seconds,
            "commands": len(self.recorded_orders),
            "agreeing": self.num_agreeing,
            "same_order": self.is_same_order,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "bytes_across": self.bytes_across,
            "leaves_out_ahead": self.leaves_out_ahead,
        }


def replay(recording: Recording, policy: str | Policy | None = None) -> ReplayComparison:
    """Replay a recorded run.

    Args:
        recording: of a run that has ended.
        policy: the deciding policy; None: the policy of the run.

    Raises:
        ConfigError: an unknown policy, a recording of a run that had not ended, or an inconsistent recording.
    """
    try:
        return _RecordingReplayer(recording, recording.policy if policy is None else policy).play()
    except ConfigError:
        raise
    # A damaged recording may contradict itself in any event or action.
    except (*DAMAGE, ScheduleError, AssertionError) as error:
        raise ConfigError(f"the recording is damaged: {type(error).__name__}: {error}") from error


@dataclass(slots=True)
class _ReplayJob:
    script: JobScript
    places: dict[int, str | None] = field(default_factory=dict)
    told: dict[int, str | None] = field(default_factory=dict)
    pending: int | None = None  # shard of the next unit; None while a unit runs


class _RecordingReplayer:
    def __init__(self, recording: Recording, policy: str | Policy) -> None:
        self._recording = recording
        # The run's prefetches follow the next choices of the run's own policy, and fit no other.
        self._sends_ahead = policy == recording.policy
        self._policy_name = policy if isinstance(policy, str) else type(policy).__name__
        self._scheduler = Scheduler(
            policy=make_policy(policy), max_concurrent=recording.max_concurrent, admission=recording.admission
        )
        self._now = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._num_entries = 0
        play = scripts_of(recording)
        for at, events in play.outside:
            self._at(at, partial(self._from_outside, events))
        self._scripts = play.scripts
        self._jobs: dict[str, _ReplayJob] = {}
        self._moves: deque[tuple[str, int, str | None]] = deque()
        self._blocks = ReplayPager(recording, lambda: self._now, lambda *move: self._moves.append(move))
        self._preparer_free = 0
        self._decisions: list[SchedulerDecision] = []

    def play(self) -> ReplayComparison:
        """Play the whole recording."""
        while self._heap:
            self._now, _, act = heapq.heappop(self._heap)
            act()
        return ReplayComparison(
            policy=self._policy_name,
            recorded_policy=self._recording.policy,
            recorded=self._recording.decisions,
            simulated=tuple(self._decisions),
            bytes_in=self._blocks.bytes_in,
            bytes_out=self._blocks.bytes_out,
            bytes_across=self._blocks.bytes_across,
            leaves_out_ahead=not self._sends_ahead and any(turn.sent for turn in self._recording.turns),
        )

    def _at(self, at_ns: int, act: Callable[[], None]) -> None:
        self._num_entries += 1
        # The running number keeps events of one moment in order; callables cannot be compared.
        heapq.heappush(self._heap, (at_ns, self._num_entries, act))

    def _go_on(self, process: Iterator[int]) -> None:
        """Advance a process until its next wait."""
        for wait in process:
            if wait > 0:
                self._at(self._now + wait, partial(self._go_on, process))
                return

    # Events.

    def _from_outside(self, events: tuple[Event, ...]) -> None:
        """Tell recorded outside events, but none of a job that is already over, such as a cancel or a pause."""
        for event in events:
            if isinstance(event, JobSubmitted):
                self._jobs[event.job] = _ReplayJob(self._scripts.setdefault(event.job, JobScript()))
        # Events of devices have no job, and are always possible.
        possible = [event for event in events if not hasattr(event, "job") or event.job in self._jobs]
        if possible:
            self._tell(*possible)

    def _tell(self, *events: Event) -> None:
        moves = self._shard_moves(events)
        commands = self._scheduler.handle(*moves, *events)
        self._decisions.append(SchedulerDecision(self._now, (*moves, *events), tuple(commands)))
        for command in commands:
            self._carry_out(command)

    def _shard_moves(self, events: tuple[Event, ...]) -> list[ShardMoved]:
        """Report moved shards as the pool does: only shards of units that a device may be given now."""
        # A dict as an ordered set: the order of the events must not depend on hashes.
        concerned: dict[str, None] = {}
        while self._moves:
            name, shard, place = self._moves.popleft()
            if name in self._jobs:
                concerned[name] = None
                self._jobs[name].places[shard] = place
        concerned |= dict.fromkeys(event.job for event in events if isinstance(event, UnitFinished))
        return [move for name in concerned if (move := self._news(name)) is not None]

    def _news(self, name: str) -> ShardMoved | None:
        job = self._jobs[name]
        if job.pending is None:
            return None
        place = job.places.get(job.pending)
        if job.told.get(job.pending) == place:
            return None
        job.told[job.pending] = place
        return ShardMoved(job=name, shard=job.pending, device=place)

    # Commands.

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, Run):
            self._jobs[command.job].pending = None
            self._go_on(self._turn(command.job, command.device))
        elif isinstance(command, Admit):
            self._prepare(command.job)
        elif isinstance(command, Release):  # an ended burst is as short as recorded
            self._go_on(self._release(command.job, self._jobs.pop(command.job).script.release))

    def _prepare(self, name: str) -> None:
        script = self._jobs[name].script
        self._preparer_free = max(self._now, self._preparer_free) + script.prepare_ns
        # The run ended without preparing this job, so nothing is known of its units.
        self._at(self._preparer_free, partial(self._prepared, name, script.prepared or JobRejected(job=name)))

    def _prepared(self, name: str, event: JobAdmitted | JobRejected) -> None:
        if isinstance(event, JobAdmitted):
            self._jobs[name].pending = event.unit.shard
        self._tell(event)

    def _turn(self, name: str, device: str) -> Iterator[int]:
        job = self._jobs[name]
        if not job.script.parts:  # the job was ended before another turn
            self._stop(name)
            self._finish(name, UnitFinished(job=name, device=device, seconds=0.0, unit=None, remaining_seconds=0.0))
            return
        part = job.script.parts.popleft()
        for wait, action, copies in part.steps():
            yield wait
            if action is None:
                continue
            if action.what == STOP:
                self._stop(name)
            elif action.what in BACKGROUND:
                if self._sends_ahead:
                    self._blocks.act_ahead(device, action, part.sent)
            else:
                yield from self._blocks.act(device, action, copies)
        self._blocks.end(device)
        self._finish(name, _moved_to(device, part))

    def _release(self, name: str, part: ScriptedTurn | None) -> Iterator[int]:
        for wait, action, copies in part.steps() if part is not None else ():
            yield wait
            if action is not None:
                yield from self._blocks.give_up(action, copies)
        self._blocks.forget(name)

    def _stop(self, name: str) -> None:
        self._tell(JobStopped(job=name))

    def _finish(self, name: str, event: UnitFinished | UnitFailed) -> None:
        job = self._jobs[name]
        if isinstance(event, UnitFinished):
            job.pending = None if event.unit is None else event.unit.shard
        self._tell(event)
        # The job waits at a report: its answer comes as long after the wait's beginning as in the run.
        if isinstance(event, UnitFinished) and event.unit is None and name in self._jobs and job.script.answers:
            wait, answer = job.script.answers.popleft()
            self._at(self._now + wait, partial(self._answer, name, answer))

    def _answer(self, name: str, event: Event) -> None:
        if name in self._jobs:
            self._tell(event)


def _moved_to(device: str, part: ScriptedTurn) -> UnitFinished | UnitFailed:
    assert part.end is not None, "the reader refuses parts without an end"
    end = part.end
    return end._replace(device=device) if isinstance(end, UnitFinished) else replace(end, device=device)


def _span(decisions: tuple[SchedulerDecision, ...]) -> float:
    starts = [d.at_ns for d in decisions if any(isinstance(command, Run) for command in d.commands)]
    ends = [d.at_ns for d in decisions if any(isinstance(event, UnitFinished | UnitFailed) for event in d.events)]
    return (ends[-1] - starts[0]) / _SECOND if starts and ends else 0.0


def _orders(decisions: tuple[SchedulerDecision, ...]) -> list[tuple[str, ...]]:
    return [_order(command) for decision in decisions for command in decision.commands]


def _order(command: Command) -> tuple[str, ...]:
    if isinstance(command, Run):
        return ("Run", command.job, command.device, command.unit.kind, str(command.unit.shard))
    return (type(command).__name__, command.job)
