"""Transfers of shards: places, arrival times, and evictions.

Each device has one inbound link, which carries one load after another without disturbing compute: a shard, or the values at a
boundary. Write-backs use the opposite direction at the same time; their bytes are counted, but take no time. A shard is on one
device at most. `Simulator` (`simulator.py`) brings the shard of a unit when the scheduler starts the unit, and
`SimulatedPrefetcher` (`lookahead.py`) the shard of the next unit when a unit begins to compute.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hydra_tune.simulate.engine.entities import ABSENT, SimulatedDeviceState, SimulatedJobState
from hydra_tune.simulate.engine.grid import TimeGrid
from hydra_tune.simulate.model import Scenario
from hydra_tune.simulate.outcome import Interval


@dataclass(slots=True)
class SimulationTimeline:
    """The first bars of the timeline, up to a limit."""

    limit: int
    bars: list[Interval] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        """Whether the limit is reached."""
        return len(self.bars) >= self.limit

    def add(self, device: str, job: str, kind: str, shard: int, start: float, end: float) -> None:
        """Add a bar, if there is room."""
        if not self.is_full:
            self.bars.append(
                Interval(device=device, job=job, kind=kind, shard=shard, start_seconds=start, end_seconds=end)
            )

    def shorten(self, device: str, end: float) -> None:
        """End the running burst's bar on a device earlier than planned."""
        # The running burst has the device's last bar, apart from loads that began later.
        for place in reversed(range(len(self.bars))):
            bar = self.bars[place]
            if bar.device == device and bar.kind != "load":
                self.bars[place] = replace(bar, end_seconds=min(bar.end_seconds, end))
                return

    def cut(self, device: str, now: float) -> None:
        """End all bars under way on a lost device now; a running unit's bar becomes `"lost"`."""
        for place, bar in enumerate(self.bars):
            if bar.device == device and bar.end_seconds >= now:
                kind = "load" if bar.kind == "load" else "lost"
                self.bars[place] = replace(bar, kind=kind, start_seconds=min(bar.start_seconds, now), end_seconds=now)


class ShardTransferSimulator:
    """Moves shards to devices.

    Args:
        devices, jobs: as numbered.
        timeline: receives a bar for each load.
        moved: called with a job and each of its shards that is brought or evicted; not where a device or a trial ends.
    """

    def __init__(
        self,
        scenario: Scenario,
        devices: list[SimulatedDeviceState],
        jobs: list[SimulatedJobState],
        grid: TimeGrid,
        timeline: SimulationTimeline,
        moved: Callable[[SimulatedJobState, int], None],
    ) -> None:
        self._network_bandwidth, self._node_bandwidth = scenario.network_bandwidth, scenario.node_bandwidth
        self._devices, self._jobs, self._grid, self._timeline, self._moved = devices, jobs, grid, timeline, moved
        self.node_free = dict.fromkeys((device.node for device in devices), 0.0)
        self.network_bytes = 0
        self.first_loads = 0

    def bring(self, device: SimulatedDeviceState, job: SimulatedJobState, shard: int, now: float) -> float:
        """Bring a shard to a device, unless the shard is there; return the arrival time, in seconds."""
        key = (job.number, shard)
        ready = device.shards.get(key)
        if ready is not None:
            device.shards.move_to_end(key)
            return max(ready, now)
        size = job.trial.shard_bytes[shard]
        self._leave(job, shard)
        self._make_room(device, size)
        ready = self._send(device, job, shard, size, now)
        device.shards[key] = ready
        device.used_bytes += size
        job.places[shard] = device.number
        job.homes[shard] = device.node
        self._moved(job, shard)
        return ready

    def bring_boundary(self, device: SimulatedDeviceState, job: SimulatedJobState, now: float) -> float:
        """Bring the boundary values that a trial's last unit left on another device; return their arrival time."""
        size = job.trial.boundary_bytes
        device.bytes_in += size
        node = self._devices[job.last_device].node
        return self._occupy(device, size, now, crosses=node != device.node)[1]

    def fits_beside(self, device: SimulatedDeviceState, size: int) -> bool:
        """Whether a shard fits beside the running unit's shard."""
        pinned = device.pinned()
        if device.memory_bytes is None or pinned is None:
            return True
        return size + self._size(pinned) <= device.memory_bytes

    def lose(self, device: SimulatedDeviceState, now: float) -> None:
        """Lose a device with its shards and all transfers to it."""
        self._timeline.cut(device.name, now)
        # Loads under way end with the device.
        device.link_free = now
        for number, shard in device.lose_everything():
            self._jobs[number].places[shard] = ABSENT

    def drop(self, job: SimulatedJobState) -> None:
        """Free a finished trial's bytes without a write-back."""
        for shard, place in enumerate(job.places):
            if place != ABSENT:
                # Discard the mark first: release counts bytes of a dirty shard as written back.
                self._devices[place].dirty.discard((job.number, shard))
                self._devices[place].release((job.number, shard), job.trial.shard_bytes[shard])
                job.places[shard] = ABSENT

    def _send(self, device: SimulatedDeviceState, job: SimulatedJobState, shard: int, size: int, now: float) -> float:
        device.loads += 1
        # No node is the home of a shard that was on no device: the trial's start can be made anywhere.
        self.first_loads += job.homes[shard] is None
        device.bytes_in += size
        start, ready = self._occupy(device, size, now, crosses=job.homes[shard] not in (None, device.node))
        if ready > start:
            self._timeline.add(device.name, job.name, "load", shard, start, ready)
        return ready

    def _occupy(self, device: SimulatedDeviceState, size: int, now: float, *, crosses: bool) -> tuple[float, float]:
        seconds = size / device.bandwidth if device.bandwidth is not None else 0.0
        start = max(now, device.link_free)
        # The link and the node's memory both limit a load, which ends when the slower of the two is done.
        node_done = now
        if self._node_bandwidth is not None:
            # Occupy the node's memory from now on, even if the device's link is busy: the wait for the link delays no
            # other device.
            node_done = max(now, self.node_free[device.node]) + self._grid.round(size / self._node_bandwidth)
            self.node_free[device.node] = node_done
        if crosses:
            self.network_bytes += size
            if self._network_bandwidth is not None:
                seconds += size / self._network_bandwidth
        device.link_free = max(start + self._grid.round(seconds), node_done)
        return start, device.link_free

    def _leave(self, job: SimulatedJobState, shard: int) -> None:
        place = job.places[shard]
        if place != ABSENT:
            self._devices[place].release((job.number, shard), job.trial.shard_bytes[shard])

    def _make_room(self, device: SimulatedDeviceState, size: int) -> None:
        if device.memory_bytes is None:
            return
        pinned = device.pinned()
        while device.used_bytes + size > device.memory_bytes:
            # Least recently used first, but never the shard of the running unit.
            victim = next(key for key in device.shards if key != pinned)
            job = self._jobs[victim[0]]
            device.release(victim, self._size(victim))
            job.places[victim[1]] = ABSENT
            self._moved(job, victim[1])

    def _size(self, key: tuple[int, int]) -> int:
        return self._jobs[key[0]].trial.shard_bytes[key[1]]
