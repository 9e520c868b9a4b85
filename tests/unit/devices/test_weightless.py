"""When copies of a device without bytes are over, by its clock."""

import pytest
import torch

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.devices.hardware.link import LinkCostModel
from hydra_tune.devices.weightless import WeightlessDevice

SECOND = [(torch.empty(100, dtype=torch.uint8), torch.empty(100, dtype=torch.uint8))]
LINK = LinkCostModel(bytes_per_second=100.0)


@pytest.fixture(params=[None, 100.0], ids=["own threads", "one link"])
def device(request):
    real = CpuDevice(0, 1 << 20, request.param)
    yield WeightlessDevice(real, LINK)
    real.close()


def test_what_is_waited_for_takes_its_time(device):
    device.load(SECOND)
    device.spill(SECOND)
    assert device.now == 2.0


def test_copies_in_the_background_are_made_one_after_the_other(device):
    first, second = device.start_load(SECOND), device.start_spill(SECOND)
    assert (first.is_over, second.is_over) == (False, False)
    device.now = 1.5
    assert (first.is_over, second.is_over) == (True, False)
    second.wait()
    assert device.now == 2.0
    assert second.is_over


def test_one_that_has_not_begun_is_called_off_and_holds_up_nobody(device):
    first, second, third = (device.start_load(SECOND) for _ in range(3))
    device.now = 0.5
    assert second.cancel()
    assert not first.cancel()
    third.wait()
    assert device.now == 2.0


def test_one_that_is_asked_for_later_begins_later(device):
    device.start_load(SECOND)
    device.now = 5.0
    late = device.start_load(SECOND)
    late.wait()
    assert device.now == 6.0


def test_on_a_link_of_its_own_what_is_waited_for_goes_before_what_has_not_begun():
    real = CpuDevice(0, 1 << 20, 100.0)
    try:
        device = WeightlessDevice(real, LINK)
        first, second = device.start_load(SECOND), device.start_load(SECOND)
        device.now = 0.5
        device.load(SECOND)
        assert device.now == 2.0
        assert first.is_over
        second.wait()
        assert device.now == 3.0
    finally:
        real.close()


def test_where_copies_are_not_known_they_take_a_unit():
    real = CpuDevice(0, 1 << 20)
    try:
        device = WeightlessDevice(real)
        device.load(SECOND)
        copy = device.start_load(SECOND)
        assert not copy.is_over
        device.moment += 1
        assert copy.is_over
        assert device.now == 0.0
    finally:
        real.close()
