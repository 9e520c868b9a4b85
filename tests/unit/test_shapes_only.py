"""Data of which only shapes are known: planned with, and never trained on."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hydra_tune import HydraExecutor, ShapesOnly, TrainTask, train_plain
from hydra_tune.errors import ConfigError

SAMPLE = torch.zeros(4), torch.zeros(1)


def task(train, **more):
    return TrainTask(
        model=partial(nn.Linear, 4, 1),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss=nn.functional.mse_loss,
        train=train,
        **more,
    )


def test_it_gives_its_sample_as_often_as_it_is_long():
    data = ShapesOnly(SAMPLE, 3)
    assert [sample for sample in data] == [SAMPLE] * 3  # noqa: C416 - what is iterated ends by an IndexError
    assert len(data) == 3
    with pytest.raises(ConfigError, match="at least 1, not 0"):
        ShapesOnly(SAMPLE, 0)


@pytest.mark.parametrize(
    "where",
    [
        lambda data: task(data, batch_size=2),
        lambda data: task(DataLoader(data, 2)),
        lambda data: task(TensorDataset(torch.zeros(2, 4), torch.zeros(2, 1)), validate=data, batch_size=2),
    ],
)
def test_it_is_planned_and_not_trained(where):
    made_up = where(ShapesOnly(SAMPLE, 10))
    with HydraExecutor("cpu:1", device_memory="1MiB") as pool:
        assert pool.plan([made_up]).trials[0].num_shards == 1
        with pytest.raises(ConfigError, match="can be planned, but not trained"):
            pool.submit(made_up)
    with pytest.raises(ConfigError, match="can be planned, but not trained"):
        train_plain(made_up)


def test_a_pool_that_only_plans_has_devices_that_are_not_there_and_trains_nothing():
    real = task(TensorDataset(torch.zeros(2, 4), torch.zeros(2, 1)), batch_size=2)
    with HydraExecutor("cpu:8", device_memory="1TiB", plans_only=True) as pool:
        assert len(pool.plan([real]).devices) == 8
        with pytest.raises(ConfigError, match="plans_only=True and trains nothing"):
            pool.submit(real)


@pytest.mark.parametrize(
    ("devices", "memory", "told"),
    [("cuda", "1GiB", "number them"), ("cuda:90,91", None, "give device_memory"), ("gpu", "1GiB", "devices must be")],
)
def test_what_cannot_be_stood_for_is_told(devices, memory, told):
    with pytest.raises(ConfigError, match=told), HydraExecutor(devices, device_memory=memory, plans_only=True):
        pass
