"""The order of copies and computing on a GPU, on streams that run as early or late as they may (`tests/support/streams.py`)."""

from types import SimpleNamespace

import pytest
import torch

from hydra_tune.devices.cuda import CudaDevice
from hydra_tune.devices.device import DeviceCopyRoute
from tests.support.streams import HASTES, Gpus

SIZE = 64


@pytest.fixture(params=[*HASTES, 1, 2])
def gpus(request, monkeypatch):
    made = Gpus(request.param)
    made.stand_in(monkeypatch)
    yield made
    assert not made.faults


@pytest.fixture
def opened(gpus):
    made = []

    def open_one(index=0, part=None):
        made.append(CudaDevice(index, 1 << 20, part))
        return made[-1]

    yield open_one
    for device in made:
        device.close()


@pytest.fixture
def device(gpus, opened):
    made = opened()
    with gpus.computing_on(made._compute):
        yield made


def host(device, value=0):
    return device.host_empty(SIZE).fill_(value)


def on(device, value):
    return device.empty(SIZE).fill_(value)


def all_are(tensor, value):
    return tensor.tolist() == [value] * SIZE


def test_what_is_spilled_is_what_was_computed_by_then(device):
    data, there = on(device, 3), host(device)
    data.add_(torch.ones(SIZE, dtype=torch.uint8))
    device.spill([(data, there)])
    data.fill_(9)
    assert all_are(there, 4)


def test_memory_that_queued_work_still_reads_is_not_loaded_to(device):
    """The allocator gives memory as soon as nobody refers to it, whatever is queued."""
    used, seen = on(device, 1), on(device, 0)
    seen.copy_(used)
    device.load([(host(device, 5), used)])
    seen.add_(used)
    device.synchronize()
    assert all_are(seen, 6)


@pytest.mark.parametrize("starts", [True, False])
def test_copies_in_the_background_leave_work_that_is_asked_for_later_alone(device, gpus, starts):
    """A load before which its memory was read, a spill after which its memory is written by another."""
    target, source, seen = on(device, 1), on(device, 2), on(device, 0)
    seen.copy_(target)
    there = host(device)
    copies = [device.start_load([(host(device, 7), target)]), device.start_spill([(source, there)])]
    for copy in copies:
        copy.wait()
    source.fill_(9)
    seen.add_(target)
    gpus.finish()
    assert all_are(there, 2)
    assert all_are(seen, 8)
    assert all_are(target, 7)


def test_a_copy_is_over_when_its_bytes_are_there(device):
    data, there = on(device, 6), host(device)
    device.start_spill([(data, there)]).wait()
    assert all_are(there, 6)


@pytest.mark.parametrize("takes_over", [CudaDevice.take_over, lambda *args: CudaDevice.start_take_over(*args).wait()])
@pytest.mark.parametrize("other", [(1, None), (0, 1)])
def test_what_is_taken_over_is_what_its_device_has_computed_to_memory_that_is_free(gpus, opened, other, takes_over):
    """Of another GPU, and of another device on the same one; the source is given up right after."""
    source, target = opened(), opened(*other)
    assert target.reach(source) is DeviceCopyRoute.NEAR
    with gpus.computing_on(source._compute):
        data = on(source, 1)
        data.add_(torch.ones(SIZE, dtype=torch.uint8))
    with gpus.computing_on(target._compute):
        used, seen = on(target, 5), on(target, 0)
        seen.copy_(used)
        takes_over(target, source, [(data, used)])
        seen.add_(used)
    with gpus.computing_on(source._compute):
        data.fill_(9)  # somebody else's by now
    gpus.finish()
    assert all_are(seen, 7)
    assert all_are(used, 2)


def test_a_spill_and_a_load_of_one_place_follow_each_other(device, gpus):
    """As a block that makes room and the next that takes it."""
    data, there = on(device, 1), host(device)
    for value in range(2, 6):
        device.start_spill([(data, there)]).wait()
        assert all_are(there, value - 1)
        device.start_load([(host(device, value), data)]).wait()
        data.add_(torch.zeros(SIZE, dtype=torch.uint8))
    gpus.finish()
    assert all_are(data, 5)


def test_pinned_memory_goes_back_to_the_system_when_what_was_asked_for_has_been_copied(device, gpus, monkeypatch):
    """Torch's allocator would keep memory whose copy is queued; here, whoever has the memory next writes to it."""
    there, seen = host(device), []
    there.copy_(on(device, 3), non_blocking=True)

    def empty():
        seen.append(there.tolist())
        there.fill_(9)

    monkeypatch.setattr(gpus, "_C", SimpleNamespace(_host_emptyCache=empty))
    assert device.reclaim() > 0
    assert seen == [[3] * SIZE]
    gpus.finish()
    assert all_are(there, 9)


def test_whoever_leaves_a_device_leaves_nothing_undone(opened):
    """So that an error of what was asked for is raised there, and hits nobody who computes there next."""
    made = opened()
    with made.worker():
        data = on(made, 3)
        there = data.clone()
        data.fill_(4)
    assert all_are(there, 3)
    assert all_are(data, 4)
