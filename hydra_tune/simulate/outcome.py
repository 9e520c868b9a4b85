"""What a simulation came to, as plain data."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """One bar of the timeline.

    Args:
        device: where.
        job: whose.
        kind: of the unit; `"lost"` if its device was before it was over; or `"load"`.
        shard: which.
        start_seconds, end_seconds: when.
    """

    device: str
    job: str
    kind: str
    shard: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOutcome:
    """Figures of one device.

    Args:
        name: its name.
        units: shard units run, and steps of bursts.
        busy_seconds: spent computing.
        stall_seconds: spent with a unit at hand, waiting for its bytes.
        utilisation: share of the makespan spent computing.
        loads: shards that were brought.
        bytes_in, bytes_out: loaded; written back because they had changed.
    """

    name: str
    units: int
    busy_seconds: float
    stall_seconds: float
    utilisation: float
    loads: int
    bytes_in: int
    bytes_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """What a simulation came to.

    Args:
        policy: who decided.
        makespan_seconds: from 0 to the end of the last unit.
        bound_seconds: no schedule is shorter, transfers left aside; None where devices differ or are slowed.
        utilisation: of all devices together.
        units_run: shard units, and steps of bursts.
        units_saved: units that pruned trials would still have run.
        units_skipped: of `units_run`, those that were not played one by one because they repeat others exactly.
        first_loads: of all loads, those of a shard that had been on no device before.
        network_bytes: bytes that crossed between nodes.
        devices: figures of each.
        finished_seconds: when each trial was over.
        timeline: the first bars, as many as were asked for.
    """

    policy: str
    makespan_seconds: float
    bound_seconds: float | None
    utilisation: float
    units_run: int
    units_saved: int
    units_skipped: int
    first_loads: int
    network_bytes: int
    devices: tuple[DeviceOutcome, ...]
    finished_seconds: dict[str, float]
    timeline: tuple[Interval, ...]

    @property
    def bytes_moved(self) -> int:
        """Bytes loaded and written back."""
        return sum(device.bytes_in + device.bytes_out for device in self.devices)

    @property
    def loads_per_unit(self) -> float:
        """Shards brought for each unit run."""
        return sum(device.loads for device in self.devices) / max(1, self.units_run)

    @property
    def reloads_per_unit(self) -> float:
        """As `loads_per_unit`, without the first load of each shard, which no schedule can save."""
        return self.loads_per_unit - self.first_loads / max(1, self.units_run)

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dump`."""
        return {
            **asdict(self),
            "bytes_moved": self.bytes_moved,
            "loads_per_unit": self.loads_per_unit,
            "reloads_per_unit": self.reloads_per_unit,
        }
