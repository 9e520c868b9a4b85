"""What is taken for the speed of a device's copies: the same each time."""

import pytest

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.devices.hardware.link import LinkCostModel, link_of


@pytest.fixture
def device(request):
    made = CpuDevice(0, 1 << 30, request.param)
    yield made
    made.close()


@pytest.mark.parametrize("device", [1e8], indirect=True)
def test_a_slow_link_is_as_slow_as_it_was_made(device):
    assert link_of(device).bytes_per_second == 1e8
    assert link_of(device).seconds_per_block > 0


@pytest.mark.parametrize("device", [None], indirect=True)
def test_memory_is_faster_and_a_faster_link_no_faster_than_it(device):
    assert link_of(device).bytes_per_second > 1e9
    assert link_of(CpuDevice(0, 1, 1e15)) == link_of(device) == link_of(device)


def test_copies_take_bytes_and_blocks():
    assert LinkCostModel(bytes_per_second=100.0, seconds_per_block=0.5).seconds(200, 3) == 2 + 1.5


def test_a_device_that_is_no_cpu_tells_nothing():
    assert link_of(object()) is None
