"""A shared base under looks at models that are too large to build."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from hydra_tune import SharedModule
from hydra_tune.memory.shared.shared_file import shared_source
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.shard.capture.meta_models import BuildLimitError, BuildLimitTracker, LargeTensorFakeMode, is_unbuilt
from hydra_tune.train.building import own_build

PATIENCE_SECONDS = 60


@pytest.fixture
def base():
    return SharedModule(lambda: nn.Sequential(nn.Linear(1000, 1000), nn.BatchNorm1d(1000)))


def test_a_look_builds_nothing_and_keeps_nothing(base):
    with LargeTensorFakeMode():
        model = base.module()
    assert is_unbuilt(model)
    assert isinstance(model[0].weight, FakeTensor)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(BuildLimitError), BuildLimitTracker(1000):
        base.module()
    assert base.nbytes == 0
    assert not is_unbuilt(base.module())


def test_a_base_that_is_there_takes_no_further_memory_from_a_look(base):
    weight = base.module()[0].weight
    for mode in (LargeTensorFakeMode(), BuildLimitTracker(20_000)):
        with mode:
            model = base.module()
        assert shared_source(model[0].weight) is shared_source(weight)


def test_marks_ties_and_modes_of_the_built_model_come_with_each_model():
    def build():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
        model[1].weight = model[0].weight
        model[0].weight.mark = "of a library"
        return model

    model = SharedModule(build).module()
    assert model[1].weight is model[0].weight
    assert model[0].weight.mark == "of a library"
    assert not model.training


def test_a_model_of_its_own_is_in_no_file(base):
    model = base.module(copy=True)
    assert all(shared_source(tensor) is None for tensor in model.state_dict().values())
    assert torch.equal(model[0].weight, base.module()[0].weight)
    assert not model[0].weight.requires_grad


def test_a_thread_that_waits_for_the_base_leaves_the_builder_alone():
    """The build of the base sets the default dtype, as `from_pretrained` does, after its turn to build has run out."""

    def build():
        is_building.set()
        assert is_waiting.wait(PATIENCE_SECONDS)
        torch.set_default_dtype(torch.bfloat16)
        layer = nn.Linear(2, 2)
        torch.set_default_dtype(torch.float32)
        return layer

    def first():
        with own_build(0.0):
            return base.module().weight.dtype

    def second():
        with GATE.shared(), own_build():
            is_waiting.set()
            return base.module().weight.dtype

    base, is_building, is_waiting = SharedModule(build), threading.Event(), threading.Event()
    with ThreadPoolExecutor(2) as threads:
        builder = threads.submit(first)
        assert is_building.wait(PATIENCE_SECONDS)
        other = threads.submit(second)
        assert builder.result(PATIENCE_SECONDS) == torch.bfloat16
        assert other.result(PATIENCE_SECONDS) == torch.bfloat16
