"""The shared parameters of a trial: read on a device for the length of a unit, and never written there."""

import pytest
import torch
from torch import nn

from hydra_tune import SharedModule
from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.errors import TaskError
from hydra_tune.memory.pager import Pager
from hydra_tune.memory.shared.shared_file import shared_source
from hydra_tune.shard.partition.trial_step import twin_of
from hydra_tune.train.checkpoint.trial_checkpoint import copy_weights
from hydra_tune.train.state.shared_state import SharedTensors, digests


@pytest.fixture
def pager():
    device = CpuDevice(0, 1 << 20, 1e12)  # behind a link, so that the device has copies
    yield Pager(device)
    device.close()


@pytest.fixture
def model():
    return SharedModule(lambda: nn.Linear(16, 16)).module()


@pytest.fixture
def shared(model):
    shared = SharedTensors(dict(model.named_parameters()), (), 0, 64, runs_own_code=True)
    yield shared
    shared.leave()


def test_parameters_are_on_the_device_within_a_unit_and_at_home_after(pager, model, shared):
    homes = [parameter.data_ptr() for parameter in model.parameters()]
    values = [parameter.clone() for parameter in model.parameters()]
    with pager.lease(shared.blocks(), 0), shared.pointed(pager):
        assert all(parameter.data_ptr() != home for parameter, home in zip(model.parameters(), homes, strict=True))
        assert all(map(torch.equal, model.parameters(), values))
        assert shared.digests().keys() == {"weight", "bias"}
    assert [parameter.data_ptr() for parameter in model.parameters()] == homes
    assert shared.lost(dict(model.named_parameters()), is_thorough=True) == []


def write(model, shared):
    model.weight.zero_()
    assert shared.lost(dict(model.named_parameters())) == []


def test_a_write_on_the_device_is_refused_and_undone_for_the_others(pager, model, shared):
    values = model.weight.clone()
    with pager.lease(shared.blocks(), 0) as lease:
        versions = [data._version for data in lease.data]
        with pytest.raises(TaskError, match="written to 'weight' of a shared base"), shared.pointed(pager):
            write(model, shared)
        (view,) = shared.views(["weight"], pager).values()
        assert torch.equal(view, values)
        assert [data._version for data in lease.data] == versions, "graphs that others have kept may read on"
    assert torch.equal(model.weight, values)


def test_memory_that_the_code_has_given_a_parameter_stays(pager, model, shared):
    for _ in range(2):  # a burst that loses its device looks at the parameters in the next one only
        with pager.lease(shared.blocks(), 0), shared.pointed(pager):
            model.weight.data = torch.ones(16, 16)
    assert torch.equal(model.weight, torch.ones(16, 16))
    assert shared.lost(dict(model.named_parameters())) == ["weight"]


def test_a_parameter_that_trains_is_written_by_graphs_or_was_written_is_the_trials_own(model):
    model.bias.requires_grad_(True)
    assert digests(model).keys() == {"weight"}
    model.weight.data.mul_(2)
    assert digests(model) == {}
    other = SharedModule(lambda: nn.Linear(16, 16)).module()
    shared = SharedTensors(dict(other.named_parameters()), {"bias"}, 0, 64, runs_own_code=False)
    assert "weight" in shared
    assert "bias" not in shared


def test_copies_of_the_model_and_weights_read_back_keep_the_base_shared(model):
    source = shared_source(model.weight)
    twin = twin_of(model)
    assert shared_source(twin.weight) is source
    with torch.no_grad():
        twin.weight.zero_()
    assert shared_source(model.weight) is source
    saved = {name: tensor.clone() for name, tensor in model.named_parameters()}
    copy_weights(model, {"model": saved, "shared": {}})
    assert shared_source(model.weight) is source
    copy_weights(model, {"model": saved | {"weight": saved["weight"] + 1}, "shared": {}})
    assert shared_source(model.weight) is None
    assert torch.equal(model.weight, saved["weight"] + 1)
