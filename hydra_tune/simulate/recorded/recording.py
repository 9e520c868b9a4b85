"""`Recording`: all events, decisions and actions of a pool; its file is for Perfetto and chrome://tracing as well.

`PoolRecorder` (`pool/runtime/recorder.py`) makes a `Recording` when a program calls `HydraExecutor.recording()`, as
`hydra-tune sweep --timeline` does after the sweep. Viewers show the trace part of the file as a timeline; `read_recording`
reads the complete data beside the trace, for `hydra-tune simulate --replay` (`cli/commands/simulate.py`). `replay.py` with
`script.py` and `pager_model.py`, and `recorded_profile` (`simulate/profile.py`), read a `Recording`. Changed data need
another `_FORMAT`. The module must not import the pool, and keeps numbers and names only.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra_tune.errors import ConfigError
from hydra_tune.observe.trace.chrome_events import COPY_TITLES, bar, named
from hydra_tune.observe.trace.turns import BlockCopySpan, BlockFacts, TurnAction, UnitSpan, WorkerTurn
from hydra_tune.schedule import Run
from hydra_tune.schedule.journal import SchedulerDecision

DAMAGE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""Exceptions raised by malformed data."""

_FORMAT = 2
_KEY = "hydra_tune"
_REMEDY = "hydra-tune sweep --timeline FILE writes one, beside the event log that hydra-tune trace reads"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedDevice:
    """A device of the pool.

    Args:
        name: e.g. "cpu:0".
        budget_bytes: memory that the pool may use on the device.
    """

    name: str
    budget_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A run of a pool, for `hydra_tune.simulate.recorded.replay`.

    Args:
        policy: the deciding policy: its name, or the class of an object.
        max_concurrent: jobs admitted at once.
        admission: see `hydra_tune.schedule.Scheduler`.
        devices: in the order in which they were added.
        decisions: every call of the scheduler, in order.
        turns: the workers' actions for each `Run`; a job's turns are in the order of its commands.
        releases: memory actions after each job's end.
        blocks: facts of each block of memory, by number.
    """

    policy: str
    max_concurrent: int
    admission: str
    devices: tuple[RecordedDevice, ...]
    decisions: tuple[SchedulerDecision, ...]
    turns: tuple[WorkerTurn, ...] = field(repr=False)
    releases: Mapping[str, WorkerTurn] = field(repr=False)
    blocks: Mapping[int, BlockFacts] = field(repr=False)

    @property
    def num_runs(self) -> int:
        """Number of commands to run a unit."""
        return sum(isinstance(command, Run) for decision in self.decisions for command in decision.commands)

    def to_json(self) -> dict[str, Any]:
        """A trace in Chrome's format, with the data for `read_recording` beside the trace."""
        data = {
            "format": _FORMAT,
            "policy": self.policy,
            "max_concurrent": self.max_concurrent,
            "admission": self.admission,
            "devices": [[device.name, device.budget_bytes] for device in self.devices],
            "decisions": [decision.to_json() for decision in self.decisions],
            "turns": [[turn.job, turn.device, turn.actions, turn.units, turn.sent] for turn in self.turns],
            "releases": {job: turn.actions for job, turn in self.releases.items()},
            # A list, because JSON turns the keys of objects into strings.
            "blocks": [[number, *facts] for number, facts in self.blocks.items()],
        }
        return {"traceEvents": list(self._trace()), "displayTimeUnit": "ms", _KEY: data}

    def write(self, path: Path) -> None:
        """Write the recording to a file.

        Raises:
            OSError: the file cannot be written.
        """
        path.write_text(json.dumps(self.to_json(), separators=(",", ":")), encoding="utf-8")

    def _trace(self) -> Iterator[dict[str, Any]]:
        """Make the trace events: a row for each device's units, and a row for the device's copies."""
        start = self.decisions[0].at_ns if self.decisions else 0
        rows = {device.name: 2 * number for number, device in enumerate(self.devices)}
        for name, row in rows.items():
            for more, title in ((0, name), (1, f"{name} copies")):
                yield named("thread", title, 0, row + more)
        for turn in self.turns:
            row = rows[turn.device]
            for unit in turn.units:
                details = {"job": turn.job, "kind": unit.kind, "shard": unit.shard}
                title = f"{turn.job} {unit.kind} {unit.shard}"
                yield bar(title, (0, row), unit.start_ns - start, unit.end_ns - start, details)
            for copy in (*turn.copies, *turn.sent):
                facts = self.blocks.get(copy.block) or BlockFacts("", "", 0, None)  # the job may have run no unit
                details = {"job": facts.job, "kind": facts.kind, "shard": facts.shard, "bytes": copy.nbytes}
                title = f"{COPY_TITLES[copy.what]} {facts.kind}"
                yield bar(title, (0, row + 1), copy.began_ns - start, copy.ended_ns - start, details)


def read_recording(path: Path) -> Recording:
    """Read a file of `Recording.write`.

    Raises:
        ConfigError: the file cannot be read, or is not a recording, another version's, or damaged.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; {_REMEDY}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a recording: it is not JSON ({error}); {_REMEDY}") from error
    content = data.get(_KEY) if isinstance(data, dict) else None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a recording; {_REMEDY}")
    if content.get("format") != _FORMAT:
        raise ConfigError(
            f"{path}: format must be {_FORMAT}, not {content.get('format')!r}; it is from another version"
        )
    try:
        return _made(content)
    except DAMAGE as error:
        raise ConfigError(f"{path} is a damaged recording: {type(error).__name__}: {error}") from error


def _made(data: Mapping[str, Any]) -> Recording:
    blocks = {int(number): BlockFacts(*facts) for number, *facts in data["blocks"]}
    turns = [
        WorkerTurn(
            job,
            device,
            blocks,
            _actions(actions),
            [UnitSpan(*unit) for unit in units],
            [BlockCopySpan(*copy) for copy in sent],
        )
        for job, device, actions, units, sent in data["turns"]
    ]
    return Recording(
        policy=data["policy"],
        max_concurrent=data["max_concurrent"],
        admission=data["admission"],
        devices=tuple(RecordedDevice(name=name, budget_bytes=budget) for name, budget in data["devices"]),
        decisions=tuple(SchedulerDecision.from_json(decision) for decision in data["decisions"]),
        turns=tuple(turns),
        releases={job: WorkerTurn(job, "", blocks, _actions(actions)) for job, actions in data["releases"].items()},
        blocks=blocks,
    )


def _actions(data: Iterable[Any]) -> list[TurnAction]:
    return [TurnAction(what, at_ns, copy_ns, tuple(blocks), nbytes) for what, at_ns, copy_ns, blocks, nbytes in data]
