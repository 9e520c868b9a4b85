"""Updates on GPUs, where torch's default is to step all parameters at once, fit their devices.

The devices are of `tests/support/stand_in_gpu.py`. Torch is told that the host has the operators of that default as well, but
tensors without bytes have not: so plans do not see the default, as on a host beside GPUs, and units take the default's memory.
"""

import importlib
from functools import partial

import pytest
import torch
from torch import nn, optim

from hydra_tune import HydraExecutor
from hydra_tune.pool.runtime import settings
from tests.parity.observe import watched_ways
from tests.support.stand_in_gpu import StandInGpu
from tests.support.tracker import StorageTracker
from tests.unit.pool.tasks import PATIENCE_SECONDS, against_plain, running, task

_GENERATOR = torch.Generator().manual_seed(2)
BATCH = torch.randn(8, 128, generator=_GENERATOR), torch.randint(4, (8,), generator=_GENERATOR)


class OwnAdamW(optim.AdamW):
    """A class of the user's, which is measured only where room is short."""


def layers():
    return nn.Sequential(*(nn.Linear(128, 128) for _ in range(8)))


MODEL_BYTES = sum(p.nbytes for p in layers().parameters())


@pytest.fixture
def gpus(monkeypatch):
    """Pools have one stand-in GPU, where torch's default is as on a GPU."""
    module = importlib.import_module("torch.optim.optimizer")
    kinds = [*module._get_foreach_kernels_supported_devices(), "cpu"]
    monkeypatch.setattr(module, "_get_foreach_kernels_supported_devices", lambda: kinds)
    monkeypatch.setattr("hydra_tune.shard.cost.update_pilot._SMALL_BYTES", 0)
    monkeypatch.setattr(settings, "open_devices", lambda _, memory, __: [StandInGpu(0, memory)])


def described(kind):
    return task(model=layers, train=lambda: [BATCH] * 2, optimizer=partial(kind, lr=1e-3))


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("kind", [optim.AdamW, OwnAdamW])
@pytest.mark.parametrize(("models", "fits"), [(4.8, False), (6.0, True)])
def test_a_trial_whose_update_does_not_fit_whole_is_cut_at_once(kind, models, fits):
    """Weights, gradients, and AdamW's two moments are four models; the default takes the memory of a fifth."""
    one = described(kind)
    with watched_ways() as ways, running(num_shards=None, device_memory=int(models * MODEL_BYTES)) as pool:
        result = pool.submit(one).result(PATIENCE_SECONDS)
        device = pool.stats().devices["cpu:0"]
    assert against_plain(one, result) == []
    assert ways[id(one)].own_batches == (4 if fits else 0)
    assert (result.num_shards == 1) == fits
    assert device.peak_bytes <= device.budget_bytes


@pytest.mark.cases(1)
@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("kind", [optim.AdamW, optim.Adagrad, optim.RAdam, OwnAdamW])
def test_a_shards_update_has_room_for_all_of_its_parameters_at_once(kind):
    tracker = StorageTracker()
    with running(num_shards=3, device_memory=16 * MODEL_BYTES, instrument=tracker) as pool:
        result = pool.submit(described(kind)).result(PATIENCE_SECONDS)
        peak_bytes = pool.stats().devices["cpu:0"].peak_bytes
    assert result.error is None
    assert max(tracker.peak_bytes) <= peak_bytes


@pytest.mark.parametrize(("devices", "fits"), [("cpu:1", True), ("cuda:0", False)])
def test_a_plan_for_absent_gpus_has_that_room_too(devices, fits):
    with HydraExecutor(devices, int(4.8 * MODEL_BYTES), plans_only=True) as pool:
        (planned,) = pool.plan([described(optim.AdamW)]).trials
    assert planned.runs_own_code == fits
    assert (planned.num_shards == 1) == fits
