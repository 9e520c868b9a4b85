"""How busy the devices are, from the pool's figures: lately while a sweep runs, overall when it has ended."""

from collections import deque

from hydra_tune.observe.snapshot import DeviceView
from hydra_tune.pool.stats import DeviceStats, PoolStats

_WINDOW_SECONDS = 5.0


class Meter:
    """Remembers the busy seconds of the last moments; not thread-safe."""

    def __init__(self) -> None:
        self._seen: deque[PoolStats] = deque()

    def lately(self, stats: PoolStats) -> tuple[DeviceView, ...]:
        """The devices, with the share of the last seconds in which they were busy."""
        self._seen.append(stats)
        # The oldest one kept is the last that is older than the window: the span is never shorter than that.
        while len(self._seen) > 1 and stats.elapsed_seconds - self._seen[1].elapsed_seconds >= _WINDOW_SECONDS:
            self._seen.popleft()
        return _views(stats, since=self._seen[0] if len(self._seen) > 1 else None)

    @staticmethod
    def overall(stats: PoolStats) -> tuple[DeviceView, ...]:
        """The devices, with the share of the whole time in which they were busy."""
        return _views(stats, since=None)


def _moved(device: DeviceStats) -> tuple[int, int]:
    """Bytes that came, from other devices too, and bytes that went to the host."""
    return device.bytes_in + device.bytes_across, device.bytes_out


def _views(stats: PoolStats, since: PoolStats | None) -> tuple[DeviceView, ...]:
    seconds = stats.elapsed_seconds - (since.elapsed_seconds if since else 0.0)
    views = []
    for name, device in stats.devices.items():
        before = since.devices[name] if since else None
        busy = device.busy_seconds - (before.busy_seconds if before else 0.0)
        ways = zip(_moved(device), _moved(before) if before else (0, 0), strict=True)
        # A load that is called off is taken back, so that less may have come than before.
        rates = [max(0.0, now - then) / seconds if seconds > 0 else 0.0 for now, then in ways]
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
