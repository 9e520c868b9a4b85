"""Computes a run's figures from its log alone: makespan, utilisation, overlap of copies, bytes, units.

`hydra-tune trace` (`cli/commands/trace.py`) calls `run_figures` as soon as the log is read, and passes the figures on
to `observe/trace/run_plot.py` and `observe/trace/run_table.py`.

Note: computing. A unit computes from the time when all inputs are there until its end, except while its worker waits or
copies. *Under compute* is the part of a copy that falls into compute time of the copy's device, for a unit of any job: this
part of the copy has cost no time. `pool.stats()` measures the time that units have waited for copies.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from hydra_tune.observe.event_log.line_format import CARRIER
from hydra_tune.observe.event_log.reader import RunLog

PLANNED_EVENTS = ("plan", "measured")
"""Events of planned steps: the considered ways, and their measured times."""

Span = tuple[int, int]
_SECOND = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFigures:
    """Figures of one device; equal to those of `pool.stats()` where both exist, except for `units`.

    Args:
        units: shard units run; a burst or a unit of a group counts once, and `RunFigures.units_run` as of `PoolStats`.
        busy_seconds: time spent in units, with waits.
        computing_seconds: time spent in units, without waits (see the note).
        utilisation: share of the makespan spent computing.
        under_compute_seconds: part of `copying_seconds` under compute of the device.
        overlap: share of the copying under compute; 0 without copies.
        host_update_overlap: share of the updates' time under compute of the device; 0 without updates.
        bytes_in_by_kind, bytes_out_by_kind, bytes_across_by_kind: loaded from the host; spilled to the host; taken over
            from other devices.
        bytes_ahead, bytes_in_vain: prefetched bytes; prefetched bytes that no unit used.
    """

    name: str
    budget_bytes: int
    units: int
    busy_seconds: float
    computing_seconds: float
    utilisation: float
    copying_seconds: float
    under_compute_seconds: float
    overlap: float
    waiting_seconds: float
    host_update_seconds: float
    host_update_overlap: float
    bytes_in_by_kind: Mapping[str, int]
    bytes_out_by_kind: Mapping[str, int]
    bytes_across_by_kind: Mapping[str, int]
    bytes_ahead: int
    bytes_in_vain: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """Figures of a run.

    Args:
        started_at: time of the first submission, as ISO 8601.
        makespan_seconds: from the first submission to the end of the last unit.
        units_run: as of `PoolStats`.
        units_saved: as of `PoolStats`.
        trials: number of jobs by end; "unknown" where the log has no end of the job.
        disk_read_bytes, disk_written_bytes, disk_seconds: of `spill_dir`.
        fusion: choices of `fusion="auto"`, in the log's order and form: the asking carrier, the number of waiting `trials`,
            how many are fused (`size`, 1 for none), `why`, and the timings.
        plans: plans for groups that do not fit the devices, in the log's order and form: the job, `what` ("plan" or
            "measured"), the text (`told`) and all numbers.
        is_whole: whether the log was closed without loss: the figures then cover the whole run.
        lost: events that the log had no room for.
        dropped: units, copies and other details left out because of the log's limit, by kind.
        dropped_from_seconds: time of the first omission, up to which the figures hold; None without omissions.
    """

    started_at: str
    policy: str
    makespan_seconds: float
    utilisation: float
    overlap: float
    units_run: int
    units_saved: int
    trials: Mapping[str, int]
    devices: tuple[DeviceFigures, ...]
    disk_read_bytes: int
    disk_written_bytes: int
    disk_seconds: float
    fusion: tuple[Mapping[str, Any], ...]
    plans: tuple[Mapping[str, Any], ...]
    is_whole: bool
    lost: int
    dropped: Mapping[str, int]
    dropped_from_seconds: float | None

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dump`."""
        return asdict(self)


def run_figures(log: RunLog) -> RunFigures:
    """Compute the figures of a run."""
    # The log's times begin at the first submission, as the makespan does.
    makespan_ns = max(unit.end_ns for unit in log.units)
    devices = tuple(_device(log, name, makespan_ns) for name in log.budgets)
    copying = sum(device.copying_seconds for device in devices)
    # Carriers are no trials: the jobs that they compute have lines of their own.
    jobs = [event for event in log.jobs if not event.job.startswith(CARRIER)]
    ends = {event.job: event.more for event in jobs if event.what == "over"}
    trials = Counter(end["status"] for end in ends.values())
    # Jobs without an end, in a log that ends before the run. A job that begins again goes on under another key.
    restarted = {event.job for event in jobs if event.what == "begins again"}
    trials["unknown"] = len({event.job for event in jobs} - restarted - ends.keys())
    return RunFigures(
        started_at=log.started_at,
        policy=log.policy,
        makespan_seconds=makespan_ns / _SECOND,
        utilisation=sum(device.utilisation for device in devices) / len(devices),
        overlap=_share(sum(device.under_compute_seconds for device in devices), copying),
        units_run=sum(unit.steps for unit in log.units),
        units_saved=sum(end["units_saved"] for end in ends.values()),
        trials={status: count for status, count in trials.items() if count},
        devices=devices,
        disk_read_bytes=sum(use.nbytes for use in log.disk if use.what == "read"),
        disk_written_bytes=sum(use.nbytes for use in log.disk if use.what == "write"),
        disk_seconds=sum(use.end_ns - use.start_ns for use in log.disk) / _SECOND,
        fusion=tuple({"job": event.job, **event.more} for event in log.jobs if event.what == "fusion"),
        plans=tuple({"job": e.job, "what": e.what, **e.more} for e in log.jobs if e.what in PLANNED_EVENTS),
        is_whole=log.end_ns is not None and not log.lost and log.dropped_from_ns is None,
        lost=log.lost,
        dropped=dict(log.dropped),
        dropped_from_seconds=None if log.dropped_from_ns is None else log.dropped_from_ns / _SECOND,
    )


def computing(log: RunLog, device: str) -> list[Span]:
    """Compute times of a device: spans in order, none of which touch."""
    # A worker's own copies, and its waits for background copies, are no compute time.
    waits = [(wait.start_ns, wait.end_ns) for wait in log.waits if wait.by == device]
    waits += [(copy.start_ns, copy.end_ns) for copy in log.copies if copy.by == device]
    return _without([(unit.ready_ns, unit.end_ns) for unit in log.units if unit.device == device], waits)


def _device(log: RunLog, name: str, makespan_ns: int) -> DeviceFigures:
    units = [unit for unit in log.units if unit.device == name]
    copies = [copy for copy in log.copies if copy.device == name]
    # Of units of any job: a copy is under compute even if the unit belongs to another trial.
    spans = computing(log, name)
    computing_ns = sum(end - start for start, end in spans)
    copying_ns = sum(copy.end_ns - copy.start_ns for copy in copies)
    under_ns = sum(_inside(spans, [(copy.start_ns, copy.end_ns) for copy in copies]))
    # Copies that a unit made itself, and its waits for copies that a copy thread had begun.
    waiting_ns = sum(copy.end_ns - copy.start_ns for copy in copies if copy.how == "waited")
    waiting_ns += sum(wait.end_ns - wait.start_ns for wait in log.waits if wait.device == name)
    updates = [(update.start_ns, update.end_ns) for update in log.host_updates if update.device == name]
    updating_ns = sum(end - start for start, end in updates)
    by_kind = {direction: Counter[str]() for direction in ("in", "out", "across")}
    for copy in copies:
        by_kind[copy.what][copy.kind] += copy.nbytes
    # Activations that a unit keeps on the host move inside the unit, and so are no copies of blocks.
    for saved in log.saved:
        if saved.device == name:
            by_kind["in"]["activations"] += saved.bytes_in
            by_kind["out"]["activations"] += saved.bytes_out
    ahead = [copy for copy in copies if copy.what != "out" and copy.how != "waited"]
    return DeviceFigures(
        name=name,
        budget_bytes=log.budgets[name],
        units=len(units),
        busy_seconds=sum(unit.end_ns - unit.start_ns for unit in units) / _SECOND,
        computing_seconds=computing_ns / _SECOND,
        utilisation=_share(computing_ns, makespan_ns),
        copying_seconds=copying_ns / _SECOND,
        under_compute_seconds=under_ns / _SECOND,
        overlap=_share(under_ns, copying_ns),
        waiting_seconds=waiting_ns / _SECOND,
        host_update_seconds=updating_ns / _SECOND,
        host_update_overlap=_share(sum(_inside(spans, updates)), updating_ns),
        bytes_in_by_kind=dict(by_kind["in"]),
        bytes_out_by_kind=dict(by_kind["out"]),
        bytes_across_by_kind=dict(by_kind["across"]),
        bytes_ahead=sum(copy.nbytes for copy in ahead),
        bytes_in_vain=sum(copy.nbytes for copy in ahead if copy.how == "vain"),
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _joined(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        # A unit or a copy of no length covers nothing.
        elif start < end:
            merged.append((start, end))
    return merged


def _without(spans: Iterable[Span], taken: Iterable[Span]) -> list[Span]:
    remaining: list[Span] = []
    holes = _joined(taken)
    first = 0
    for start, end in _joined(spans):
        # Spans and holes are in order: a hole that ends before this span is behind all later spans, too.
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        position, at = start, first
        while at < len(holes) and holes[at][0] < end:
            if holes[at][0] > position:
                remaining.append((position, holes[at][0]))
            position = max(position, holes[at][1])
            at += 1
        if position < end:
            remaining.append((position, end))
    return remaining


def _inside(spans: Sequence[Span], parts: Iterable[Span]) -> Iterable[int]:
    """Length of each part inside ordered spans that do not touch."""
    # Prefix sums: a run may have millions of copies and units, so each lookup is a binary search.
    ends = [end for _, end in spans]
    before = [0, *accumulate(end - start for start, end in spans)]

    def up_to(time: int) -> int:
        # The first span that ends at `time` or later; all spans before it count in full.
        at = bisect_left(ends, time)
        return before[at] + (max(0, time - spans[at][0]) if at < len(spans) else 0)

    return (up_to(end) - up_to(start) for start, end in parts)
