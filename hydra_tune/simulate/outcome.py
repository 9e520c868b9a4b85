"""Results of a simulation, as plain data.

`Simulator` (`simulate/engine/simulator.py`) returns a `SimulationResult` when no event is left, and `SimulationTimeline`
(`simulate/engine/transfers.py`) makes the bars. `hydra-tune simulate` (`cli/commands/simulate.py`) prints `to_json`, or shows
the result by `table.py` and `plot.py`; people's programs get the result from `simulate`.

The classes are frozen and must not import the pool, torch or numpy. The simulator counts, and the properties here only
combine its counts.
"""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """One bar of the timeline.

    Args:
        device: name of the device.
        job: name of the job.
        kind: of the unit; `"lost"` for a unit cut off by the loss of its device; or `"load"`.
        shard: number of the shard.
        start_seconds, end_seconds: times of the bar.
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
        name: name of the device.
        units: shard units that ended, and steps of bursts.
        busy_seconds: seconds of compute, of units that ended.
        stall_seconds: seconds in which a unit waited for its bytes.
        utilisation: share of the makespan spent computing.
        loads: shards loaded.
        bytes_in, bytes_out: bytes loaded, boundary values included; bytes of changed shards written back.
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
    """Result of a simulation.

    Args:
        policy: the deciding policy.
        makespan_seconds: from 0 to the end of the last trial.
        bound_seconds: lower bound on the makespan of every schedule, without transfers; None where devices differ in
            speed, slow down or are lost.
        utilisation: of all devices together.
        units_run: shard units, and steps of bursts.
        units_saved: units that pruned trials did not run.
        units_skipped: units of `units_run` that were skipped as exact repetitions.
        first_loads: loads of shards that had been on no device before.
        network_bytes: bytes that crossed between nodes.
        devices: figures of each.
        finished_seconds: end of each trial.
        timeline: the first bars, at most as many as requested.
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
        """Loads of shards for each unit run."""
        return sum(device.loads for device in self.devices) / max(1, self.units_run)

    @property
    def reloads_per_unit(self) -> float:
        """Loads for each unit without each shard's first load, which no schedule can save."""
        return self.loads_per_unit - self.first_loads / max(1, self.units_run)

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dump`."""
        return {
            **asdict(self),
            "bytes_moved": self.bytes_moved,
            "loads_per_unit": self.loads_per_unit,
            "reloads_per_unit": self.reloads_per_unit,
        }
