"""What a machine is said to have."""

import os

import psutil
import pytest
import torch

from hydra_tune.devices import copying
from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.devices.hardware import link, nvml
from hydra_tune.devices.hardware.link import crossing_rate, link_rates
from hydra_tune.devices.hardware.survey import survey
from hydra_tune.errors import ConfigError

without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@without_a_gpu
def test_without_a_gpu_these_are_the_cpu_devices_of_auto():
    found = survey(measures=False)
    assert [device.name for device in found.devices] == [f"cpu:{n}" for n in range(len(os.sched_getaffinity(0)))]
    total = psutil.virtual_memory().total
    for device in found.devices:
        assert (device.total_bytes, device.compute_capability, device.rates) == (total, None, None)
        assert 0 < device.budget_bytes < device.free_bytes <= total
        assert device.model
    assert found.crossings == ()


@without_a_gpu
def test_what_keeps_gpus_from_being_seen_is_said():
    (note,) = survey("cpu:1", "1MiB", measures=False).notes
    assert "no GPU" in note


def has_no_nvml():
    try:
        nvml.driver()
    except nvml.NvmlError:
        return True
    return False


@pytest.mark.skipif(not has_no_nvml(), reason="there is NVML")
def test_nvml_that_is_not_there_is_said():
    with pytest.raises(nvml.NvmlError) as absent:
        nvml.memory("00000000:01:00.0")
    (note,) = survey("cpu:1", "1MiB", measures=False).notes
    assert str(absent.value).rstrip(".") in note


def test_the_budget_is_what_was_asked_for():
    assert [device.budget_bytes for device in survey("cpu:3", "1MiB", measures=False).devices] == [1 << 20] * 3


def test_devices_that_are_not_there_are_refused():
    with pytest.raises(ConfigError, match="devices must be 'auto'"):
        survey("tpu")


class Clock:
    """A time in which nothing passes but what is slept."""

    def __init__(self):
        self.now = 0.0

    def sleep(self, seconds):
        self.now += seconds

    def perf_counter(self):
        return self.now

    def perf_counter_ns(self):
        return round(self.now * 1e9)


@pytest.fixture
def clock(monkeypatch):
    """Of links, and of whoever measures them."""
    made = Clock()
    monkeypatch.setattr(copying, "time", made)
    monkeypatch.setattr(link, "time", made)
    return made


def test_links_are_measured_each_way(clock, monkeypatch):
    """Each copy takes two seconds, one after the other."""
    monkeypatch.setattr(CpuDevice, "_send", lambda *_, **__: clock.sleep(2.0))
    (device,) = survey("cpu:1", "8MiB").devices
    assert (device.rates.to_device, device.rates.to_host, device.rates.both_ways) == (1 << 20,) * 3


@pytest.fixture
def slow(clock):
    """Two devices behind links of 100 and 50 MB a second."""
    devices = [CpuDevice(0, 4 << 20, 1e8), CpuDevice(1, 4 << 20, 5e7)]
    yield devices
    for device in devices:
        device.close()


def test_a_slow_link_is_measured_as_slow_as_it_is(slow):
    rates = link_rates(slow[0])
    for rate in (rates.to_device, rates.to_host, rates.both_ways):
        assert rate == pytest.approx(1e8)  # its one link takes both ways together


def test_a_copy_across_is_as_slow_as_the_slower_link(slow):
    assert crossing_rate(*slow) == pytest.approx(5e7)


def test_a_device_with_next_to_no_memory_is_measured():
    device = CpuDevice(0, 3)
    try:
        assert link_rates(device).to_device > 0
    finally:
        device.close()
