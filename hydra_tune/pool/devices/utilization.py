"""Utilization of the devices: over the last seconds during a sweep, and overall at the end of the sweep.

`SweepProgressTracker` (`cli/display/board.py`) and `SweepMonitor` (`pool/views/live_snapshot.py`) compute a sweep's
devices here for each snapshot, under their own locks. The statistics come from `Pool.stats` (`pool/pool.py`). The module
must not read a clock: the times are those of the statistics.
"""

from collections import deque

from hydra_tune.observe.live.snapshot import DeviceView
from hydra_tune.pool.stats import DeviceStats, PoolStats

_WINDOW_SECONDS = 5.0


class UtilizationMeter:
    """Remembers the statistics of the last seconds; has no lock, so the caller must hold a lock."""

    def __init__(self) -> None:
        self._seen: deque[PoolStats] = deque()

    def lately(self, stats: PoolStats) -> tuple[DeviceView, ...]:
        """Return the devices with the busy share of the last seconds; at the first call, of the whole run."""
        self._seen.append(stats)
        # Once an entry is as old as the window, the newest such entry is the oldest kept, so the span does not fall below the
        # window again.
        while len(self._seen) > 1 and stats.elapsed_seconds - self._seen[1].elapsed_seconds >= _WINDOW_SECONDS:
            self._seen.popleft()
        return _views(stats, since=self._seen[0] if len(self._seen) > 1 else None)

    @staticmethod
    def overall(stats: PoolStats) -> tuple[DeviceView, ...]:
        """Return the devices with the busy share of the whole run."""
        return _views(stats, since=None)


def _moved(device: DeviceStats) -> tuple[int, int]:
    """Return bytes received, from other devices included, and bytes spilled to the host."""
    return device.bytes_in + device.bytes_across, device.bytes_out


def _views(stats: PoolStats, since: PoolStats | None) -> tuple[DeviceView, ...]:
    seconds = stats.elapsed_seconds - (since.elapsed_seconds if since else 0.0)
    views = []
    for name, device in stats.devices.items():
        before = since.devices.get(name) if since else None  # a device added since has no earlier statistics
        busy = device.busy_seconds - (before.busy_seconds if before else 0.0)
        counters = zip(_moved(device), _moved(before) if before else (0, 0), strict=True)
        # A cancelled load is subtracted from the counter, so the counter may decrease.
        rates = [max(0.0, now - then) / seconds if seconds > 0 else 0.0 for now, then in counters]
        views.append(
            DeviceView(
                name=name,
                busy_share=min(1.0, max(0.0, busy / seconds)) if seconds > 0 else 0.0,
                resident_bytes=device.resident_bytes,
                peak_bytes=device.peak_bytes,
                budget_bytes=device.budget_bytes,
                bytes_in_by_kind=dict(device.bytes_in_by_kind),
                bytes_out_by_kind=dict(device.bytes_out_by_kind),
                bytes_across_by_kind=dict(device.bytes_across_by_kind),
                units=device.units,
                loads_under_way=device.loads_under_way,
                bytes_in_per_second=rates[0],
                bytes_out_per_second=rates[1],
            )
        )
    return tuple(views)
