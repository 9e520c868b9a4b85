"""Statistics of the pool: work done and memory held by each device.

`Pool.stats` (`pool/pool.py`) collects the statistics under the pool's lock when a program calls `HydraExecutor.stats`,
and whenever a display is drawn (`pool/views/live.py`, `cli/run/sweep_run.py`); `Worker.stats`
(`pool/runtime/worker.py`) makes a device's part, and `disk_stats` (`pool/devices/host_admission.py`) the disk's.
`pool/devices/utilization.py` and `pool/views/eta.py` compare the statistics of two moments. The statistics must hold
plain values only.
"""

from dataclasses import dataclass, field

from hydra_tune.observe.event_log.writer import EventLog


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStats:
    """Statistics of a device since the pool began.

    Attributes:
        budget_bytes: memory budget in bytes.
        peak_bytes: highest value of the ledger so far.
        resident_bytes: bytes of parameters, optimizer state and values on the device now.
        busy_seconds: time spent in units, loads and spills included.
        bytes_in_by_kind, bytes_out_by_kind: bytes loaded from and spilled to the host, by kind: parameters, buffers,
            optimizer, activations, boundaries, gradients and inputs (`BlockKind`).
        bytes_across_by_kind: bytes taken over from other devices, counted at the receiving device; not part of the two
            above.
        units: shard units run; a burst counts as many units as the burst has steps, and a unit of a fused group as many
            as all its members together have run.
        bytes_ahead: the part of the loaded or taken-over bytes that was prefetched during an earlier unit's compute.
        bytes_in_vain: the part of `bytes_ahead` that no unit used.
        waiting_seconds: time during which units waited for loads, spills and takeovers.
        copying_seconds: duration of all these copies, including copies that no unit waited for.
        loads_under_way: blocks on the way to the device in the background now.
        host_update_seconds: duration of the optimizer updates on the host beside the device.
        units_repeated: units repeated after a real shortage of device memory; each repeat is logged as a warning.
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
        """Share of the copying time during which no unit waited, from 0 to 1; 0 without copies."""
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
    """Statistics of host memory and of the disk beyond since the pool began.

    Attributes:
        host_budget_bytes: budget of host copies in bytes.
        host_peak_bytes: most bytes of host copies so far; above the budget only while a whole trial was needed at once.
        bytes_read: bytes read from disk.
        bytes_written: bytes written to disk.
        stored_bytes: bytes in files now.
        busy_seconds: time that the disk's thread spent reading and writing.
        is_direct: whether reads and writes bypass the page cache (O_DIRECT).
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
    """Statistics of the event log.

    Attributes:
        path: path of the file.
        nbytes: bytes written so far.
        dropped: number of units, copies and other entries left out because of `event_log_limit`, by kind.
    """

    path: str
    nbytes: int
    dropped: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Statistics of the pool since its beginning.

    Attributes:
        devices: statistics by device name.
        units_run: sum of the devices' `units`. With fusion each trial of a group counts the units of its own steps, as
            `Result.units_run` does.
        units_saved: units that pruned and cancelled trials would still have run, counted in the same way with fusion.
        elapsed_seconds: wall time.
        scheduler_seconds: CPU time of scheduling decisions, and of predicting the units to prefetch for.
        steps_by_way: optimizer steps of several batches, without each trial's first step, by way: "one device" (batches
            in sequence), "grouped" (through each shard together), "data-parallel" or "pipelined".
        disk: present with a spill_dir.
        event_log: present with an event log.
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
    """Statistics of an event log; complete once the pool is closed."""
    return LogStats(path=str(log.path), nbytes=log.written_bytes, dropped=dict(log.dropped))
