"""`RunLog`: reads the file of an `EventLog`, even if the run was killed while writing.

`hydra-tune trace` (`cli/commands/trace.py`) calls `read_log` first, during a run or afterwards; `run_figures.py`,
`observe/trace/run_plot.py` and `observe/trace/chrome_trace.py` take the `RunLog`. The reader must read whatever
`line_format.py` writes with the same `FORMAT`, and must not import torch.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from hydra_tune.errors import ConfigError
from hydra_tune.observe.event_log.line_format import FORMAT, KEY

_REMEDY = "hydra-tune sweep writes one to runs/, HydraExecutor(event_log=FILE) to FILE"
_DAMAGE = (LookupError, TypeError, ValueError, AttributeError)


class LoggedUnit(NamedTuple):
    """A unit: its start, the time when all inputs were there, its end, and the steps of a burst."""

    device: str
    job: str
    kind: str
    shard: int
    start_ns: int
    ready_ns: int
    end_ns: int
    is_failed: bool
    steps: int = 1


class LoggedCopy(NamedTuple):
    """A copy from the host ("in"), to the host ("out") or from a device ("across"); fields as in `EventLog.copied`.

    Args:
        by: the device of the worker that made the copy; None for a copy thread, or a thread that is no worker's.
    """

    device: str
    what: str
    job: str | None
    kind: str
    shard: int | None
    nbytes: int
    how: str
    by: str | None
    start_ns: int
    end_ns: int

    @property
    def is_in_background(self) -> bool:
        """Whether a copy thread made the copy in the background."""
        return self.how in ("background", "vain")


class LoggedWait(NamedTuple):
    """A wait for a background copy to or from a device, by the worker of device `by`, or by another thread (None)."""

    device: str
    by: str | None
    start_ns: int
    end_ns: int


class LoggedDiskAccess(NamedTuple):
    """A "write" to the disk or a "read" from the disk."""

    what: str
    nbytes: int
    start_ns: int
    end_ns: int


class LoggedHostUpdate(NamedTuple):
    """An update of a shard on the host, beside a device."""

    device: str
    job: str | None
    shard: int
    start_ns: int
    end_ns: int


class LoggedActivationBytes(NamedTuple):
    """Activations that a unit kept on the host."""

    device: str
    bytes_in: int
    bytes_out: int


class LoggedJobEvent(NamedTuple):
    """An event of a job."""

    job: str
    what: str
    at_ns: int
    more: Mapping[str, Any]


@dataclass(slots=True, kw_only=True)
class RunLog:
    """A log, as far as written. Times are nanoseconds since the first job was submitted.

    Args:
        budgets: bytes of each device, by name.
        units, copies, waits, disk, host_updates, saved, jobs: events in the order of the file, roughly by their ends.
        lost: events that the log had no room for.
        dropped: units, copies and other details left out because of the log's limit, by kind.
        dropped_from_ns: time of the first omission; None without omissions.
        end_ns: end of the log; None for a log never closed: the run still goes on, was killed, or could not write any
            more.
        is_cut: whether the last line is incomplete.
    """

    started_at: str
    version: str
    policy: str
    admission: str
    max_concurrent: int
    budgets: dict[str, int]
    units: list[LoggedUnit] = field(default_factory=list)
    copies: list[LoggedCopy] = field(default_factory=list)
    waits: list[LoggedWait] = field(default_factory=list)
    disk: list[LoggedDiskAccess] = field(default_factory=list)
    host_updates: list[LoggedHostUpdate] = field(default_factory=list)
    saved: list[LoggedActivationBytes] = field(default_factory=list)
    jobs: list[LoggedJobEvent] = field(default_factory=list)
    lost: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    dropped_from_ns: int | None = None
    end_ns: int | None = None
    is_cut: bool = False
    cpu_seconds: float = 0.0

    @property
    def last_ns(self) -> int:
        """Time of the last known event."""
        timed = chain[LoggedUnit | LoggedCopy | LoggedWait | LoggedDiskAccess | LoggedHostUpdate](
            self.units, self.copies, self.waits, self.disk, self.host_updates
        )
        ends = (entry.end_ns for entry in timed)
        return max(chain(ends, (event.at_ns for event in self.jobs), [self.end_ns or 0]))


def read_log(path: Path) -> RunLog:
    """Read an event log.

    Raises:
        ConfigError: the file cannot be read, is no event log, another version's, damaged, or of a run without any unit.
    """
    try:
        with path.open("rb") as file:
            log = _begun(path, file.readline())
            _take_all(path, log, file)
    except OSError as error:
        reason = "it is not there" if isinstance(error, FileNotFoundError) else str(error.strerror)
        raise ConfigError(f"cannot read the event log {str(path)!r}: {reason}; {_REMEDY}") from error
    if not log.units:
        raise ConfigError(
            f"in the run of {str(path)!r} no unit has run, so there is nothing to show; "
            + (_first_error(log) or "if the run still goes on, try again later")
        )
    return log


def _begun(path: Path, line: bytes) -> RunLog:
    if not line.strip():
        raise ConfigError(f"{str(path)!r} is empty: its run was ended before anything was written; {_REMEDY}")
    try:
        data = json.loads(line)
    # No JSON, so no header; the next check says so.
    except ValueError:
        data = None
    if not isinstance(data, dict) or KEY not in data:
        raise ConfigError(f"{str(path)!r} is not an event log: its first line is no header; {_REMEDY}")
    if data[KEY] != FORMAT:
        raise ConfigError(
            f"{str(path)!r} is an event log of format {data[KEY]!r}, and this version reads {FORMAT}; read it with the "
            f"hydra-tune that wrote it, {data.get('hydra_tune')!r}"
        )
    try:
        return RunLog(
            started_at=data["started_at"],
            version=data["hydra_tune"],
            policy=data["policy"],
            admission=data["admission"],
            max_concurrent=data["max_concurrent"],
            budgets={device["name"]: device["budget_bytes"] for device in data["devices"]},
        )
    except _DAMAGE as error:
        raise _damaged(path, 1, error) from error


def _take_all(path: Path, log: RunLog, lines: Iterator[bytes]) -> None:
    texts: dict[str, str] = {}
    for number, line in enumerate(lines, start=2):
        if not line.endswith(b"\n"):  # only the last line: of a killed run, or still being written
            log.is_cut = True
            return
        try:
            _take(log, json.loads(line), texts)
        except _DAMAGE as error:
            raise _damaged(path, number, error) from error


def _take(log: RunLog, data: dict[str, Any], texts: dict[str, str]) -> None:
    """Add one line to the log; `texts` interns names, because a log may have millions of lines."""

    def name(key: str) -> Any:
        text = data[key]
        return text if text is None else texts.setdefault(text, text)

    match data["event"]:
        case "unit":
            times = (data["start_ns"], data["ready_ns"], data["end_ns"])
            outcome = data.get("failed", False), data.get("steps", 1)
            log.units.append(LoggedUnit(name("device"), name("job"), name("kind"), data["shard"], *times, *outcome))
        case "copy":
            facts = (name("device"), name("what"), name("job"), name("kind"), data["shard"], data["bytes"])
            log.copies.append(LoggedCopy(*facts, name("how"), name("by"), data["start_ns"], data["end_ns"]))
        case "wait":
            log.waits.append(LoggedWait(name("device"), name("by"), data["start_ns"], data["end_ns"]))
        case "disk":
            log.disk.append(LoggedDiskAccess(name("what"), data["bytes"], data["start_ns"], data["end_ns"]))
        case "host":
            span = (data["start_ns"], data["end_ns"])
            log.host_updates.append(LoggedHostUpdate(name("device"), name("job"), data["shard"], *span))
        case "saved":
            log.saved.append(LoggedActivationBytes(name("device"), data["bytes_in"], data["bytes_out"]))
        case "job":
            more = {key: value for key, value in data.items() if key not in ("event", "job", "what", "at_ns")}
            log.jobs.append(LoggedJobEvent(name("job"), name("what"), data["at_ns"], more))
        case seldom:
            _take_seldom(log, data, seldom)


def _take_seldom(log: RunLog, data: dict[str, Any], event: str) -> None:
    match event:
        case "device":
            log.budgets[data["device"]] = data["budget_bytes"]
        case "lost":
            log.lost += data["records"]
        case "dropped":
            # Two lines of this kind: the first gives the time, the last the counts.
            log.dropped = dict(data["records"])
            log.dropped_from_ns = data["at_ns"] if log.dropped_from_ns is None else log.dropped_from_ns
        case "sweep":
            pass  # `read_run_state` reads these
        case "end":
            log.end_ns, log.cpu_seconds = data["at_ns"], data["cpu_seconds"]
        case other:
            raise ValueError(f"there is no event {other!r}")


def _damaged(path: Path, number: int, error: Exception) -> ConfigError:
    return ConfigError(
        f"{str(path)!r} is damaged in line {number} ({type(error).__name__}: {error}); the lines before can be read: "
        f"head -n {number - 1} {path} > whole.jsonl"
    )


def _first_error(log: RunLog) -> str | None:
    errors = [event.more["error"] for event in log.jobs if event.what == "over" and event.more.get("error")]
    return f"its first trial that failed said: {errors[0]}" if errors else None
