"""What a run came to, from its log alone: makespan, utilisation, how much of the copying was hidden, bytes, units.

Note: what counts as computing. A unit computes from when all it needs is there until it ends, but for what its worker waits
meanwhile. *Under compute* is the part of a copy that lies in such time of its own device, whoever's unit that is: there the
copy has cost no time. `pool.stats()` measures the same the other way round, by what units have waited for copies.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from hydra_tune.observe.runlog import RunLog

PLANNED_EVENTS = ("plan", "measured")
"""What is said of steps that are planned: which ways there are, and what they have proved to take."""

Span = tuple[int, int]
_SECOND = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFigures:
    """Figures of one device; those that `pool.stats()` has too are equal to them.

    Args:
        name: its name.
        budget_bytes: memory the pool might use on it.
        units: shard units run.
        busy_seconds: time spent in units, what they waited for included.
        computing_seconds: the same without (see the note).
        utilisation: share of the makespan spent computing.
        copying_seconds: time that copies to and from it took, each on its own.
        under_compute_seconds: of these, those that lie under compute on it.
        overlap: share of the copying that lies under compute; 0 where nothing was copied.
        waiting_seconds: time that units waited for copies.
        host_update_seconds: time that updates on the host took beside it.
        host_update_overlap: share of it that lies under compute on it; 0 where there was none.
        bytes_in_by_kind, bytes_out_by_kind, bytes_across_by_kind: loaded from and spilled to the host; taken over from other
            devices.
        bytes_ahead, bytes_in_vain: of the bytes loaded or taken over, those sent ahead, and of these those no unit came for.
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
    """What a run came to.

    Args:
        started_at: when the first trial was submitted, as ISO 8601.
        policy: who decided.
        makespan_seconds: from then to the end of the last unit.
        utilisation: of all devices together.
        overlap: share of all copying that lies under compute.
        units_run: shard units, and steps of bursts.
        units_saved: units that pruned and cancelled trials would still have run.
        trials: how many came to which end; "unknown" where the log ends before.
        devices: figures of each.
        disk_read_bytes, disk_written_bytes, disk_seconds: of `spill_dir`.
        fusion: what `fusion="auto"` has chosen, in order, as the log has it: which job asked, of how many `trials` that waited
            how many are computed together (`size`, 1 for none), `why`, and what was timed.
        plans: what was planned of groups for which devices have no room, in order, as the log has it: which job, `what` is
            said ("plan" or "measured"), in words (`told`) and with all numbers.
        is_whole: whether the log was closed, and has lost nothing: then these are the figures of the whole run.
        lost: events that the log had no room for.
        dropped: units, copies and the like that were left out because of the log's limit, by kind.
        dropped_from_seconds: when that began, up to when these figures are; None if nothing was left out.
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
    """Work out the figures of a run.

    Args:
        log: of it, with at least one unit.
    """
    makespan_ns = max(unit.end_ns for unit in log.units)
    devices = tuple(_device(log, name, makespan_ns) for name in log.budgets)
    copying = sum(device.copying_seconds for device in devices)
    over = [event.more for event in log.jobs if event.what == "over"]
    trials = Counter(end["status"] for end in over)
    trials["unknown"] = len({event.job for event in log.jobs}) - len(over)
    return RunFigures(
        started_at=log.started_at,
        policy=log.policy,
        makespan_seconds=makespan_ns / _SECOND,
        utilisation=sum(device.utilisation for device in devices) / len(devices),
        overlap=_share(sum(device.under_compute_seconds for device in devices), copying),
        units_run=sum(unit.steps for unit in log.units),
        units_saved=sum(end["units_saved"] for end in over),
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
    """When a device computed: spans in order, none of which meet."""
    waits = [(wait.start_ns, wait.end_ns) for wait in log.waits if wait.by == device]
    waits += [(copy.start_ns, copy.end_ns) for copy in log.copies if copy.by == device]
    return _without([(unit.ready_ns, unit.end_ns) for unit in log.units if unit.device == device], waits)


def _device(log: RunLog, name: str, makespan_ns: int) -> DeviceFigures:
    units = [unit for unit in log.units if unit.device == name]
    copies = [copy for copy in log.copies if copy.device == name]
    spans = computing(log, name)
    computing_ns = sum(end - start for start, end in spans)
    copying_ns = sum(copy.end_ns - copy.start_ns for copy in copies)
    under_ns = sum(_inside(spans, [(copy.start_ns, copy.end_ns) for copy in copies]))
    waiting_ns = sum(copy.end_ns - copy.start_ns for copy in copies if copy.how == "waited")
    waiting_ns += sum(wait.end_ns - wait.start_ns for wait in log.waits if wait.device == name)
    updates = [(update.start_ns, update.end_ns) for update in log.host_updates if update.device == name]
    updating_ns = sum(end - start for start, end in updates)
    by_kind = {what: Counter[str]() for what in ("in", "out", "across")}
    for copy in copies:
        by_kind[copy.what][copy.kind] += copy.nbytes
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
    """The same time as spans in order, none of which meet."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif start < end:
            found.append((start, end))
    return found


def _without(spans: Iterable[Span], taken: Iterable[Span]) -> list[Span]:
    """What is left of spans where others are taken out of them."""
    left: list[Span] = []
    holes = _joined(taken)
    first = 0
    for start, end in _joined(spans):
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        position, at = start, first
        while at < len(holes) and holes[at][0] < end:
            if holes[at][0] > position:
                left.append((position, holes[at][0]))
            position = max(position, holes[at][1])
            at += 1
        if position < end:
            left.append((position, end))
    return left


def _inside(spans: Sequence[Span], parts: Iterable[Span]) -> Iterable[int]:
    """How much of each part lies in spans that are in order and do not meet."""
    ends = [end for _, end in spans]
    before = [0, *accumulate(end - start for start, end in spans)]

    def up_to(time: int) -> int:
        at = bisect_left(ends, time)
        return before[at] + (max(0, time - spans[at][0]) if at < len(spans) else 0)

    return (up_to(end) - up_to(start) for start, end in parts)
