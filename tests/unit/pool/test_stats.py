"""Figures of a pool, read while its threads count on."""

from types import SimpleNamespace

import psutil
import pytest

from hydra_tune import HydraExecutor
from tests.unit.pool.tasks import running

GIB = 2**30


class CountedOn:
    """A kind of bytes that another thread counts a further kind beside, just as the kind is read."""

    def __init__(self, counts):
        self.counts = counts

    @property
    def value(self):
        self.counts[object()] += 1
        return "counted on"


def test_figures_are_read_while_a_device_counts_a_further_kind():
    with running() as pool:
        counts = pool._started()._pagers["cpu:0"].bytes_in
        counts[CountedOn(counts)] = 1
        assert pool.stats().devices["cpu:0"].bytes_in_by_kind == {"counted on": 1}
        counts.clear()


@pytest.mark.parametrize(
    ("device_memory", "device", "host"),
    [(None, 2.5 * GIB, 4 * GIB), ("64MiB", GIB / 16, (10 - 1 / 8) * 0.8 * GIB), ("5GiB", 5 * GIB, 2 * GIB)],
)
def test_cpu_devices_and_the_host_share_the_free_memory(tmp_path, monkeypatch, device_memory, device, host):
    """By default they take 90% of it together; they took 130%."""
    free = SimpleNamespace(available=10 * GIB, total=16 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with HydraExecutor("cpu:2", device_memory=device_memory, spill_dir=tmp_path) as pool:
        stats = pool.stats()
    assert [each.budget_bytes for each in stats.devices.values()] == [device, device]
    assert stats.disk.host_budget_bytes == int(host)
