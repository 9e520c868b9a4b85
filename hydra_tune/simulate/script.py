"""What each job of a recorded run does by itself, whoever schedules it: taken from the recording.

A job prepares for so long, its turns take so long beside their copies and touch these blocks, its driver answers a report
after so long. When each of that happens, and where, is for the scheduler to say.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hydra_tune.errors import ConfigError
from hydra_tune.observe.turns import Action, Sent, Turn
from hydra_tune.schedule import (
    Admit,
    Event,
    JobAdmitted,
    JobRejected,
    JobResumed,
    JobStopped,
    Run,
    ShardMoved,
    Unit,
    UnitFailed,
    UnitFinished,
)
from hydra_tune.simulate.recording import Recording

_RELEASE = Unit(kind="release", shard=0, seconds=0.0)
STOP = "stop"
"""An action of a turn that is not one of memory: the job is told to stop while its unit runs."""

_CAUSED = ("in", "out", "across", "free", "await", "keep")


class Copy(NamedTuple):
    """What an action of a turn caused.

    Args:
        what: "in", "out", "across", "free", "await" or "keep".
        block: which.
        wait_ns: before it began, from what was done before.
        copy_ns: of the copy, or of the wait for it.
    """

    what: str
    block: int
    wait_ns: int
    copy_ns: int


Copies = list[Copy]


@dataclass(slots=True)
class Part:
    """A turn and its end.

    Args:
        actions: what was done, stops among it.
        began_ns: when it was commanded.
        unit: what was commanded.
        ended_ns: when the scheduler was told of its end.
        end: what it was told.
        sent: the copies in the background that were begun.
    """

    actions: list[Action]
    began_ns: int
    unit: Unit
    ended_ns: int = 0
    end: UnitFinished | UnitFailed | None = None
    sent: Sequence[Sent] = ()

    @property
    def compute_ns(self) -> int:
        """From the command to the end, less copies."""
        copied = sum(action.copy_ns for action in self.actions if action.at_ns <= self.ended_ns)
        return self.ended_ns - self.began_ns - copied

    def steps(self) -> Iterator[tuple[int, Action | None, Copies]]:
        """Nanoseconds until the next action, that action, and the copies it caused; at last those until the end."""
        before, position, actions = self.began_ns, 0, self.actions
        while position < len(actions) and actions[position].at_ns <= self.ended_ns:
            action = actions[position]
            wait, before = action.at_ns - before, action.at_ns
            position += 1
            copies: Copies = []
            while position < len(actions) and (copy := actions[position]).what in _CAUSED:
                wait_ns = copy.at_ns - copy.copy_ns - before
                copies.append(Copy(copy.what, copy.blocks[0], wait_ns, copy.copy_ns))
                before = copy.at_ns
                position += 1
            yield wait, action, copies
        yield max(0, self.ended_ns - before), None, []


@dataclass(slots=True)
class Script:
    """All of one job.

    Args:
        release: how its memory is given back when it is over.
        prepare_ns: of the preparer's time.
        prepared: what the preparation came to, and in `ready_ns` when.
        parts: its turns, in order.
        answers: for each wait at a report, how long and what the answer was.
    """

    release: Part | None = None
    prepare_ns: int = 0
    prepared: JobAdmitted | JobRejected | None = None
    ready_ns: int = 0
    parts: deque[Part] = field(default_factory=deque)
    answers: deque[tuple[int, JobResumed | JobStopped]] = field(default_factory=deque)


@dataclass(slots=True)
class Play:
    """A whole run as scripts.

    Args:
        scripts: by job.
        outside: what came from outside at a time of its own (jobs submitted, paused, cancelled, ...).
    """

    scripts: dict[str, Script] = field(default_factory=dict)
    outside: list[tuple[int, tuple[Event, ...]]] = field(default_factory=list)


def scripts_of(recording: Recording) -> Play:
    """Take a recording apart.

    Raises:
        ConfigError: the recording is of a run that had not ended, or of none, or of one that lent devices to a running job.
    """
    return _Reader(recording).read()


class _Reader:
    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._play = Play()
        self._turns = _by_job(recording)
        self._running: dict[str, Part] = {}
        self._waiting_since: dict[str, int] = {}
        self._admitted: dict[str, int] = {}
        self._preparer_free = 0

    def read(self) -> Play:
        for decision in self._recording.decisions:
            outside = [event for event in decision.events if not self._inside(decision.at_ns, event)]
            if outside:
                self._play.outside.append((decision.at_ns, tuple(outside)))
            for command in decision.commands:
                if isinstance(command, Admit):
                    self._admitted[command.job] = decision.at_ns
                elif isinstance(command, Run):
                    self._begin(command, decision.at_ns)
                else:
                    self._give_back(command.job, decision.at_ns)
        if self._running or not self._play.scripts:
            raise ConfigError(
                "only a run that has ended can be played again, and this one has "
                f"{f'units that run: {sorted(self._running)}' if self._running else 'no jobs'}; record until shutdown()"
            )
        return self._play

    def _script(self, job: str) -> Script:
        return self._play.scripts.setdefault(job, Script())

    def _begin(self, command: Run, now: int) -> None:
        if command.job in self._running:
            raise ConfigError(
                f"{command.job!r} ran batches of a step side by side on several devices, which cannot be played again; record "
                "a run whose trials are at least as many as its devices, or without accumulate and split_batches"
            )
        turns = self._turns.get(command.job)
        turn = turns.popleft() if turns else None
        part = (
            Part([], now, command.unit)
            if turn is None
            else Part(turn.actions.copy(), now, command.unit, sent=turn.sent)
        )
        self._running[command.job] = part
        self._script(command.job).parts.append(part)

    def _give_back(self, job: str, now: int) -> None:
        turn = self._recording.releases.get(job)
        if turn is not None and turn.actions:
            self._script(job).release = Part(turn.actions, now, _RELEASE, turn.actions[-1].at_ns)

    def _inside(self, now: int, event: Event) -> bool:
        """Take an event into its job's script, if it follows from what the job does."""
        if isinstance(event, ShardMoved):
            return True  # follows from the blocks
        if isinstance(event, JobAdmitted | JobRejected):
            script = self._script(event.job)
            script.prepared, script.ready_ns = event, now
            script.prepare_ns = now - max(self._admitted[event.job], self._preparer_free)
            self._preparer_free = now
            return True
        if isinstance(event, UnitFinished | UnitFailed):
            part = self._running.pop(event.job)
            part.end, part.ended_ns = event, now
            if isinstance(event, UnitFinished) and event.unit is None:
                self._waiting_since[event.job] = now
            return True
        return isinstance(event, JobResumed | JobStopped) and self._answered(now, event)

    def _answered(self, now: int, event: JobResumed | JobStopped) -> bool:
        job = event.job
        if job in self._running:
            actions = self._running[job].actions
            before = sum(action.at_ns < now for action in actions)
            actions.insert(before, Action(STOP, now))
            return True
        since = self._waiting_since.pop(job, None)
        if since is None:
            return False
        self._script(job).answers.append((now - since, event))
        return True


def _by_job(recording: Recording) -> Mapping[str, deque[Turn]]:
    turns: dict[str, deque[Turn]] = {}
    for turn in recording.turns:
        turns.setdefault(turn.job, deque()).append(turn)
    return turns
