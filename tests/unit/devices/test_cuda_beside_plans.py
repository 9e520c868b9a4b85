"""The pool's own copies beside those of a planned step on one GPU, on streams that run as early or late as they may."""

import pytest
import torch

from hydra_tune.devices.cuda import CudaDevice
from hydra_tune.planner.run import copy_engine
from tests.support.streams import HASTES, Gpus

SIZE = 64


@pytest.fixture(params=[*HASTES, 1, 2])
def gpus(request, monkeypatch):
    made = Gpus(request.param)
    made.stand_in(monkeypatch, copy_engine)
    monkeypatch.setattr(copy_engine, "_STREAMS", {})
    yield made
    assert not made.faults


@pytest.fixture
def device(gpus):
    made = CudaDevice(0, 1 << 20)
    with gpus.computing_on(made._compute):
        yield made
    made.close()


@pytest.fixture
def planned(device):
    return copy_engine.CudaCopyEngine(device.torch_device, {"map": SIZE, "other": SIZE})


def host(device, value=0):
    return device.host_empty(SIZE).fill_(value)


def on(device, value):
    return device.empty(SIZE).fill_(value)


def all_are(tensor, value):
    return tensor.tolist() == [value] * SIZE


@pytest.mark.parametrize("is_ahead", [True, False])
def test_a_block_comes_to_the_memory_that_a_map_has_left(gpus, device, planned, is_ahead):
    """Sent ahead for the next unit while the step goes on, or waited for."""
    value = on(device, 3)
    on_host = planned.release(planned.offload(value, "map"))
    if is_ahead:
        device.start_load([(host(device, 9), value)]).wait()
    else:
        device.load([(host(device, 9), value)])
    back = planned.arrived(planned.prefetch(on_host))
    gpus.finish()
    assert all_are(back, 3)
    assert all_are(value, 9)


def test_a_map_comes_back_to_the_memory_that_a_block_has_left(gpus, device, planned, monkeypatch):
    """Written back because its room is needed: it is free when its copy is over, which the host has waited for."""
    on_host = planned.release(planned.offload(on(device, 3), "map"))
    block, there = on(device, 5), host(device)
    block.add_(torch.ones(SIZE, dtype=torch.uint8))
    device.start_spill([(block, there)]).wait()
    monkeypatch.setattr(gpus, "empty", lambda *_size, **_options: block)
    back = planned.arrived(planned.prefetch(on_host))
    gpus.finish()
    assert back is block
    assert all_are(back, 3)
    assert all_are(there, 6)


def test_both_go_on_at_once_and_neither_waits_for_the_others_bytes(gpus, device, planned):
    blocks, there = [on(device, 1), on(device, 2)], host(device)
    first = planned.release(planned.offload(on(device, 3), "map"))
    loading, spilling = device.start_load([(host(device, 7), blocks[0])]), device.start_spill([(blocks[1], there)])
    going, coming = planned.offload(on(device, 4), "other"), planned.prefetch(first)
    back = planned.arrived(coming)
    other = planned.arrived(planned.prefetch(planned.release(going)))
    for copy in (loading, spilling):
        copy.wait()
    gpus.finish()
    assert [one[0].item() for one in (back, other, blocks[0], there)] == [3, 4, 7, 2]
