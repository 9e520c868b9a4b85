"""Converts a run's log to a trace in Chrome's format, with rows for each device, the disk, and each trial.

A device has a row of units and, below, a row of updates on the host and rows of loads, spills and blocks from other
devices. Background copies are apart from copies that a unit waited for. Overlapping copies get separate rows.
`hydra-tune trace` (`cli/commands/trace.py`) calls `write_trace` once the figures are computed and any plot is drawn. The
module must read the log only, never a running pool.
"""

import heapq
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydra_tune.observe.event_log.line_format import CARRIER
from hydra_tune.observe.event_log.reader import LoggedCopy, LoggedJobEvent, RunLog
from hydra_tune.observe.event_log.run_figures import PLANNED_EVENTS
from hydra_tune.observe.trace.chrome_events import COPY_TITLES, bar, mark, named, placed

_TRIALS = 1
_HOST_UPDATES = 2  # the row below that of the units
_BASES = {
    "submitted": "queued",
    "preparing": "preparing",
    "running": "running",
    "resumed": "running",
    "stopped": "ending",
    "rejected": "ending",
}
_ROWS = {
    ("in", False): "loads",
    ("in", True): "loads ahead",
    ("across", False): "from other devices",
    ("across", True): "from other devices ahead",
    ("out", False): "spills",
    ("out", True): "spills in the background",
}
_DISK_TITLES = {"read": "read from disk", "write": "write to disk"}


class JobStatePeriod(NamedTuple):
    """A period of a job in one state."""

    job: str
    state: str
    start_ns: int
    end_ns: int


def write_trace(log: RunLog, path: Path) -> None:
    """Write the trace of a run.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("w", encoding="utf-8") as file:
        before = '{"displayTimeUnit":"ms","traceEvents":[\n'
        # Event by event, because the trace of a long run may have millions.
        for event in trace_events(log):
            file.write(before + json.dumps(event, separators=(",", ":")))
            before = ",\n"
        file.write("\n]}\n")


def trace_events(log: RunLog) -> Iterator[dict[str, Any]]:
    """Iterate over the events of a run's trace."""
    yield named("process", "trials", _TRIALS)
    # Below all devices, which have the places from 2 on, and below the disk, which has the place after the devices.
    yield placed("process", len(log.budgets) + 3, _TRIALS)
    yield from _stories(log)
    for number, device in enumerate(log.budgets, start=_TRIALS + 1):
        yield named("process", device, number)
        yield placed("process", number, number)
        yield from _units(log, device, number)
        yield from _host_updates(log, device, number)
        yield from _copies([copy for copy in log.copies if copy.device == device], number)
    if log.disk:
        yield from _disk(log, len(log.budgets) + _TRIALS + 1)


def _units(log: RunLog, device: str, process: int) -> Iterator[dict[str, Any]]:
    row = (process, 1)
    yield named("thread", "units", *row)
    yield placed("thread", 1, *row)
    for unit in log.units:
        if unit.device != device:
            continue
        details = {"job": unit.job, "kind": unit.kind, "shard": unit.shard, "failed": unit.is_failed}
        yield bar(f"{unit.kind[0].upper()}{unit.shard} {unit.job}", row, unit.start_ns, unit.end_ns, details)
        # The wait nests in the unit's bar, because both begin at the same time.
        if unit.ready_ns > unit.start_ns:
            yield bar("waits for bytes", row, unit.start_ns, unit.ready_ns, {"kind": "wait", "job": unit.job})


def _host_updates(log: RunLog, device: str, process: int) -> Iterator[dict[str, Any]]:
    """Updates on the host share one row, because a single thread of the device makes the updates in turn."""
    row = (process, _HOST_UPDATES)
    updates = [update for update in log.host_updates if update.device == device]
    if updates:
        yield named("thread", "updates on the host", *row)
        yield placed("thread", _HOST_UPDATES, *row)
    for update in updates:
        details = {"job": update.job, "kind": "update", "shard": update.shard}
        yield bar(f"{update.job} update {update.shard}", row, update.start_ns, update.end_ns, details)


def _copies(copies: Sequence[LoggedCopy], process: int) -> Iterator[dict[str, Any]]:
    # Rows are numbered as they are made: how many overlapping copies need is not known before.
    thread = _HOST_UPDATES + 1
    for (direction, is_background), title in _ROWS.items():
        copies_of_row = [copy for copy in copies if (copy.what, copy.is_in_background) == (direction, is_background)]
        for row, row_copies in enumerate(_apart(copies_of_row)):
            yield named("thread", title if row == 0 else f"{title} ({row + 1})", process, thread)
            yield placed("thread", thread, process, thread)
            for copy in row_copies:
                facts = {"job": copy.job, "kind": copy.kind, "shard": copy.shard, "bytes": copy.nbytes, "how": copy.how}
                shard = "" if copy.shard is None else f" {copy.shard}"
                name = f"{COPY_TITLES[direction]} {copy.job} {copy.kind}{shard}"
                yield bar(name, (process, thread), copy.start_ns, copy.end_ns, facts)
            thread += 1


def _disk(log: RunLog, process: int) -> Iterator[dict[str, Any]]:
    yield named("process", "disk", process)
    yield placed("process", process, process)
    for thread, (kind, title) in enumerate(_DISK_TITLES.items(), start=1):
        yield named("thread", title, process, thread)
        for use in log.disk:
            if use.what == kind:
                facts = {"kind": kind, "bytes": use.nbytes}
                yield bar(title, (process, thread), use.start_ns, use.end_ns, facts)


def _apart(copies: Sequence[LoggedCopy]) -> list[list[LoggedCopy]]:
    """Distribute copies over as few rows as possible, because a row cannot show overlapping bars."""
    rows: list[list[LoggedCopy]] = []
    free: list[tuple[int, int]] = []  # time at which each row is free, the earliest first
    for copy in sorted(copies, key=lambda entry: entry.start_ns):
        # In order of starts, the row that is free first is enough: no other choice needs fewer rows.
        if free and free[0][0] <= copy.start_ns:
            row = heapq.heappop(free)[1]
        else:
            row = len(rows)
            rows.append([])
        rows[row].append(copy)
        heapq.heappush(free, (copy.end_ns, row))
    return rows


# Trials.


def _stories(log: RunLog) -> Iterator[dict[str, Any]]:
    # A carrier whose job another carrier has computed tells nothing of the job, which has a story of its own.
    computing = {unit.job for unit in log.units}
    stories = {job: story for job, story in by_job(log).items() if job in computing or not job.startswith(CARRIER)}
    for number, (job, events) in enumerate(stories.items(), start=1):
        last = events[-1]
        # A story that the log does not end is drawn to the log's end.
        end_ns = last.at_ns if last.what == "over" else log.last_ns
        yield mark("b", job, _TRIALS, number, events[0].at_ns, {})
        for stay in stays(job, events, end_ns):
            yield mark("b", stay.state, _TRIALS, number, stay.start_ns, {})
            yield mark("e", stay.state, _TRIALS, number, stay.end_ns, {})
        for event in events:
            if event.what == "report":
                yield mark("n", f"report {event.more['step']}", _TRIALS, number, event.at_ns, dict(event.more))
            elif event.what == "fusion":
                yield mark("n", f"{event.more['size']} together", _TRIALS, number, event.at_ns, dict(event.more))
            elif event.what in PLANNED_EVENTS:
                yield mark("n", event.what, _TRIALS, number, event.at_ns, dict(event.more))
        if last.what == "over":
            yield mark("n", last.more["status"], _TRIALS, number, end_ns, dict(last.more))
        yield mark("e", job, _TRIALS, number, end_ns, {})


def by_job(log: RunLog) -> Mapping[str, list[LoggedJobEvent]]:
    """Group the events of each job, in order."""
    events_by_job: dict[str, list[LoggedJobEvent]] = {}
    for event in log.jobs:
        events_by_job.setdefault(event.job, []).append(event)
    return events_by_job


def stays(job: str, events: Sequence[LoggedJobEvent], end_ns: int) -> Iterator[JobStatePeriod]:
    """Iterate over a job's periods in order, each in one state.

    The states are queued, preparing, running, waiting (for an answer), paused and ending; a state may come again.
    """
    base, is_paused = "queued", False
    state, since_ns = base, events[0].at_ns
    for event in events:
        # The base goes on below a pause, so that an unpaused job shows the state that it has reached meanwhile.
        base = "waiting" if event.more.get("waits") else _BASES.get(event.what, base)
        is_paused = event.what == "paused" or (is_paused and event.what not in ("unpaused", "stopped"))
        next_state = "paused" if is_paused else base
        if next_state != state:
            if event.at_ns > since_ns:
                yield JobStatePeriod(job, state, since_ns, event.at_ns)
            state, since_ns = next_state, event.at_ns
    if end_ns > since_ns:
        yield JobStatePeriod(job, state, since_ns, end_ns)
