"""Figures of the pool: what each device has done and holds."""

from dataclasses import dataclass, field

from hydra_tune.observe.eventlog import EventLog


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStats:
    """Figures of one device since the pool began.

    Attributes:
        budget_bytes: memory it may use.
        peak_bytes: most that the ledger has ever held.
        resident_bytes: parameters, optimizer state and values on it now.
        busy_seconds: time spent in units, their loads and spills included.
        bytes_in_by_kind, bytes_out_by_kind: bytes loaded from and spilled to the host, as parameters, buffers, optimizer,
            activations, gradients and inputs.
        bytes_across_by_kind: bytes taken over from another device, which are not among the others; counted where they come to.
        units: shard units run.
        bytes_ahead: of the bytes loaded or taken over, those that were sent while an earlier unit computed.
        bytes_in_vain: of these, those that no unit came for.
        waiting_seconds: time that units waited for loads and spills, and for what came from another device.
        copying_seconds: time that all these took, those that nobody waited for included.
        loads_under_way: blocks on their way to it in the background now.
        host_update_seconds: time that updates on the host took beside it.
        units_repeated: units run once more because the device had really run out of memory; each is logged as a warning.
    """

    budget_bytes: int
    peak_bytes: int
    resident_bytes: int
    busy_seconds: float
    bytes_in_by_kind: dict[str, int]
    bytes_out_by_kind: dict[str, int]
    units: int
    bytes_across_by_kind: dict[str, int] = field(default_factory=dict)
    bytes_ahead: int = 0
    bytes_in_vain: int = 0
    waiting_seconds: float = 0.0
    copying_seconds: float = 0.0
    host_update_seconds: float = 0.0
    units_repeated: int = 0
    loads_under_way: int = 0

    @property
    def overlap(self) -> float:
        """Part of the time that copies took for which no unit waited, from 0 to 1; 0 where nothing was copied."""
        return max(0.0, 1.0 - self.waiting_seconds / self.copying_seconds) if self.copying_seconds else 0.0

    @property
    def bytes_in(self) -> int:
        """Bytes loaded from the host."""
        return sum(self.bytes_in_by_kind.values())

    @property
    def bytes_out(self) -> int:
        """Bytes spilled to the host."""
        return sum(self.bytes_out_by_kind.values())

    @property
    def bytes_across(self) -> int:
        """Bytes taken over from other devices."""
        return sum(self.bytes_across_by_kind.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskStats:
    """Figures of host memory and of the disk beyond it since the pool began.

    Attributes:
        host_budget_bytes: host memory that host copies may take.
        host_peak_bytes: most they have taken; beyond the budget only while a trial was wanted whole.
        bytes_read: bytes that came from disk.
        bytes_written: bytes that went there.
        stored_bytes: bytes in files now.
        busy_seconds: time the disk's thread spent reading and writing.
        is_direct: whether the page cache is passed by (O_DIRECT).
    """

    host_budget_bytes: int
    host_peak_bytes: int
    bytes_read: int
    bytes_written: int
    stored_bytes: int
    busy_seconds: float
    is_direct: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStats:
    """Figures of the event log.

    Attributes:
        path: of the file.
        nbytes: written up to now.
        dropped: units, copies and the like that were left out because of `event_log_limit`, by kind.
    """

    path: str
    nbytes: int
    dropped: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Figures of the pool since it began.

    Attributes:
        devices: by name.
        units_run: shard units run.
        units_saved: units that pruned and cancelled trials would still have run.
        elapsed_seconds: wall time.
        scheduler_seconds: CPU time spent deciding what runs where.
        steps_by_way: optimizer steps of several batches, but for each trial's first, by how they ran: "one device" (one batch
            after the other), "grouped" (through each shard together), "data-parallel" or "pipelined".
        disk: with a spill_dir.
        event_log: with one.
    """

    devices: dict[str, DeviceStats]
    units_run: int
    units_saved: int
    elapsed_seconds: float
    scheduler_seconds: float
    steps_by_way: dict[str, int] = field(default_factory=dict)
    disk: DiskStats | None = None
    event_log: LogStats | None = None


def log_stats(log: EventLog) -> LogStats:
    """Figures of an event log, whole once the pool is closed."""
    return LogStats(path=str(log.path), nbytes=log.written_bytes, dropped=dict(log.dropped))
