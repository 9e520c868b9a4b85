"""Updates on the host give the bits of updates on the device, and optimizer state never travels."""

from functools import partial

import pytest
import torch

from hydra_tune import HydraExecutor
from hydra_tune.errors import ConfigError
from tests.parity import models
from tests.parity.test_splitting import Whole, accumulating, noisy, run
from tests.unit.pool.tasks import against_plain, running, task

TASKS = {
    "adamw": task,
    "momentum": partial(task, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)),
    "adagrad": partial(task, optimizer=partial(torch.optim.Adagrad, lr=0.1)),
    "dropout": partial(task, model=noisy, max_grad_norm=0.1),
    "float16": partial(task, precision="float16"),
    "batches together": partial(accumulating, model=noisy),
    "batches together, clipped": partial(accumulating, max_grad_norm=0.1, precision="bfloat16"),
    "one cycle": partial(
        task,
        scheduler=partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=6),
        scheduler_interval="step",
    ),
    "tied": partial(models.build, "gpt2"),
    "convolutions": partial(models.build, "cnn"),
}


@pytest.mark.parametrize("name", TASKS)
def test_updates_on_the_host_are_bitwise(name):
    for devices, cut in (("cpu:1", 1), ("cpu:2", 3)):
        described = TASKS[name]()
        with running(devices=devices, num_shards=cut, optimizer_placement="host") as pool:
            result = pool.submit(described).result(60.0)
            stats = pool.stats().devices.values()
        assert against_plain(described, result) == []
        assert sum(device.bytes_in_by_kind.get("optimizer", 0) for device in stats) == 0
        assert sum(device.bytes_out_by_kind.get("gradients", 0) for device in stats) > 0


def test_a_whole_model_and_helped_steps():
    for described, devices in ((task(model=Whole), "cpu:1"), (accumulating(model=noisy), "cpu:2")):
        result, count = run(described, devices=devices, optimizer_placement="host")
        assert against_plain(described, result) == []
        assert count == int(devices[-1])


def test_trials_beside_each_other():
    tasks = [task(seed=seed, model=noisy) for seed in range(6)]
    with running(devices="cpu:2", device_memory="12KiB", optimizer_placement="host") as pool:
        results = pool.run(tasks)
    assert [against_plain(*pair) for pair in zip(tasks, results, strict=True)] == [[]] * 6


def test_a_model_is_cut_less_where_no_update_has_to_fit():
    cut = {}
    for placement in ("device", "host"):
        with running(device_memory="12KiB", optimizer_placement=placement) as pool:
            cut[placement] = pool.submit(task()).result(60.0).num_shards
    assert cut["host"] < cut["device"]


def test_another_place_is_refused():
    with pytest.raises(ConfigError, match="optimizer_placement must be 'device' or 'host', not 'disk'"):
        HydraExecutor(optimizer_placement="disk")


def test_a_disk_beside_it_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="give one of the two"):
        HydraExecutor(optimizer_placement="host", spill_dir=tmp_path)
