"""Splits a recording into scripts: the behaviour of each job, independent of the schedule.

A script has a job's preparation time, the time of each turn apart from copies, the blocks that a turn touches, and the
driver's time for each answer to a report. The scheduler of a replay decides when and where each of these happens.
`replay.py` calls `scripts_of` before its virtual clock starts, and `simulate/profile.py` does so to make a profile of a
run. `pager_model.py` takes each `ScriptedCopy` when the action of the copy is repeated. The module must not change a
recording.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hydra_tune.errors import ConfigError
from hydra_tune.observe.trace.turns import BlockCopySpan, TurnAction, WorkerTurn
from hydra_tune.schedule import (
    Admit,
    Event,
    JobAdmitted,
    JobRejected,
    JobResumed,
    JobStopped,
    Release,
    Run,
    ShardMoved,
    Unit,
    UnitFailed,
    UnitFinished,
)
from hydra_tune.simulate.recorded.recording import Recording

_RELEASE = Unit(kind="release", shard=0, seconds=0.0)
STOP = "stop"
"""An action of a turn outside memory: the job is told to stop while its unit runs."""

# Entries of a turn (`TurnAction.what`) that follow the action on whose behalf the pager copied or waited.
_CAUSED = ("in", "out", "across", "free", "await", "keep")


class ScriptedCopy(NamedTuple):
    """A copy caused by an action of a turn.

    Args:
        what: "in", "out", "across", "free", "await" or "keep".
        block: number of the block.
        wait_ns: nanoseconds between the previous entry and the copy's beginning.
        copy_ns: nanoseconds of the copy, or of the wait for a background copy.
    """

    what: str
    block: int
    wait_ns: int
    copy_ns: int


Copies = list[ScriptedCopy]


@dataclass(slots=True)
class ScriptedTurn:
    """A turn and its end.

    Args:
        actions: the turn's actions, stops included.
        began_ns: time of the command.
        ended_ns: time at which the scheduler learned of the end.
        end: event that told the scheduler.
        sent: copies begun in the background.
    """

    actions: list[TurnAction]
    began_ns: int
    unit: Unit
    ended_ns: int = 0
    end: UnitFinished | UnitFailed | None = None
    sent: Sequence[BlockCopySpan] = ()

    @property
    def compute_ns(self) -> int:
        """Time from the command to the end without copies, in nanoseconds."""
        copied = sum(action.copy_ns for action in self.actions if action.at_ns <= self.ended_ns)
        return self.ended_ns - self.began_ns - copied

    def steps(self) -> Iterator[tuple[int, TurnAction | None, Copies]]:
        """Iterate over tuples (nanoseconds until the next action, the action, its copies); at last the time to the end."""
        before, position, actions = self.began_ns, 0, self.actions
        while position < len(actions) and actions[position].at_ns <= self.ended_ns:
            action = actions[position]
            wait, before = action.at_ns - before, action.at_ns
            position += 1
            copies: Copies = []
            while position < len(actions) and (copy := actions[position]).what in _CAUSED:
                # A copy is noted at its end.
                wait_ns = copy.at_ns - copy.copy_ns - before
                copies.append(ScriptedCopy(copy.what, copy.blocks[0], wait_ns, copy.copy_ns))
                before = copy.at_ns
                position += 1
            yield wait, action, copies
        yield max(0, self.ended_ns - before), None, []


@dataclass(slots=True)
class JobScript:
    """Everything that one job does.

    Args:
        release: memory actions after the job's end.
        prepare_ns: nanoseconds of the preparer's time.
        prepared: result of the preparation, at the time `ready_ns`.
        parts: the job's turns, in order.
        answers: for each wait at a report, nanoseconds until the answer, and the answer.
    """

    release: ScriptedTurn | None = None
    prepare_ns: int = 0
    prepared: JobAdmitted | JobRejected | None = None
    ready_ns: int = 0
    parts: deque[ScriptedTurn] = field(default_factory=deque)
    answers: deque[tuple[int, JobResumed | JobStopped]] = field(default_factory=deque)


@dataclass(slots=True)
class RunScript:
    """A whole run as scripts.

    Args:
        outside: events with a time of their own (jobs submitted, paused, cancelled, ...), with the time in nanoseconds.
    """

    scripts: dict[str, JobScript] = field(default_factory=dict)
    outside: list[tuple[int, tuple[Event, ...]]] = field(default_factory=list)


def scripts_of(recording: Recording) -> RunScript:
    """Split a recording into scripts.

    Raises:
        ConfigError: the recorded run has not ended, had no jobs, or lent devices to a running job.
    """
    return _RunScriptBuilder(recording).read()


class _RunScriptBuilder:
    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._play = RunScript()
        self._turns = _by_job(recording)
        self._running: dict[str, ScriptedTurn] = {}
        self._waiting_since: dict[str, int] = {}
        self._admitted: dict[str, int] = {}
        self._preparer_free = 0

    def read(self) -> RunScript:
        """Split the recording's decisions into events from outside and a script for each job; errors as of `scripts_of`."""
        for decision in self._recording.decisions:
            outside = [event for event in decision.events if not self._inside(decision.at_ns, event)]
            if outside:
                self._play.outside.append((decision.at_ns, tuple(outside)))
            for command in decision.commands:
                if isinstance(command, Admit):
                    self._admitted[command.job] = decision.at_ns
                elif isinstance(command, Run):
                    self._begin(command, decision.at_ns)
                elif isinstance(command, Release):
                    self._give_back(command.job, decision.at_ns)
        if self._running or not self._play.scripts:
            raise ConfigError(
                "only a run that has ended can be played again, and this one has "
                f"{f'units that run: {sorted(self._running)}' if self._running else 'no jobs'}; record until shutdown()"
            )
        return self._play

    def _script(self, job: str) -> JobScript:
        return self._play.scripts.setdefault(job, JobScript())

    def _begin(self, command: Run, now: int) -> None:
        if command.job in self._running:
            raise ConfigError(
                f"{command.job!r} ran batches of a step side by side on several devices, which cannot be played again; record "
                "a run whose trials are at least as many as its devices, or without accumulate and split_batches"
            )
        turns = self._turns.get(command.job)
        turn = turns.popleft() if turns else None
        part = (
            ScriptedTurn([], now, command.unit)
            if turn is None
            else ScriptedTurn(turn.actions.copy(), now, command.unit, sent=turn.sent)
        )
        self._running[command.job] = part
        self._script(command.job).parts.append(part)

    def _give_back(self, job: str, now: int) -> None:
        turn = self._recording.releases.get(job)
        if turn is not None and turn.actions:
            self._script(job).release = ScriptedTurn(turn.actions, now, _RELEASE, turn.actions[-1].at_ns)

    def _inside(self, now: int, event: Event) -> bool:
        """Take an event into its job's script, if the event follows from the job's own behaviour; return whether so."""
        if isinstance(event, ShardMoved):
            return True  # follows from the blocks, so the replay makes its own
        if isinstance(event, JobAdmitted | JobRejected):
            script = self._script(event.job)
            script.prepared, script.ready_ns = event, now
            # One preparer serves all jobs: its time for this job starts once it is free.
            script.prepare_ns = now - max(self._admitted[event.job], self._preparer_free)
            self._preparer_free = now
            return True
        if isinstance(event, UnitFinished | UnitFailed):
            part = self._running.pop(event.job)
            part.end, part.ended_ns = event, now
            # Without a next unit, the job waits from now on for the answer to its report.
            if isinstance(event, UnitFinished) and event.unit is None:
                self._waiting_since[event.job] = now
            return True
        return isinstance(event, JobResumed | JobStopped) and self._answered(now, event)

    def _answered(self, now: int, event: JobResumed | JobStopped) -> bool:
        job = event.job
        if job in self._running:
            # The job learned of the stop during its unit: the stop becomes an action of the turn, at its own time.
            actions = self._running[job].actions
            before = sum(action.at_ns < now for action in actions)
            actions.insert(before, TurnAction(STOP, now))
            return True
        since = self._waiting_since.pop(job, None)
        # The job did not wait, so the event comes from outside: the user cancelled the job.
        if since is None:
            return False
        self._script(job).answers.append((now - since, event))
        return True


def _by_job(recording: Recording) -> Mapping[str, deque[WorkerTurn]]:
    turns: dict[str, deque[WorkerTurn]] = {}
    for turn in recording.turns:
        turns.setdefault(turn.job, deque()).append(turn)
    return turns
