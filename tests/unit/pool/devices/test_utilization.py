"""Busy shares and rates of the last seconds, from statistics that grow."""

from hydra_tune.pool.devices.utilization import UtilizationMeter
from hydra_tune.pool.stats import DeviceStats, PoolStats


def stats(seconds, **busy):
    devices = {
        name: DeviceStats(
            budget_bytes=1, peak_bytes=0, resident_bytes=0, busy_seconds=busy_seconds, bytes_in_by_kind={},
            bytes_out_by_kind={}, units=0,
        )
        for name, busy_seconds in busy.items()
    }  # fmt: skip
    return PoolStats(devices=devices, units_run=0, units_saved=0, elapsed_seconds=seconds, scheduler_seconds=0)


def test_a_device_that_is_added_later_is_counted_from_then():
    meter = UtilizationMeter()
    meter.lately(stats(1.0, first=1.0))
    views = meter.lately(stats(3.0, first=2.0, second=1.5))
    assert [(view.name, view.busy_share) for view in views] == [("first", 0.5), ("second", 0.75)]
