"""Updates on the host give the bits of updates on the device, and optimizer state never travels."""

import logging
from functools import partial

import pytest
import torch

from hydra_tune import HydraExecutor
from hydra_tune.errors import ConfigError
from hydra_tune.shard.partition.shard_size_search import CHOICES
from hydra_tune.train.parallel.cost_model import DATA_PARALLEL
from tests.parity import models
from tests.parity.test_splitting import Whole, accumulating, noisy, run
from tests.unit.pool.tasks import SAMPLES, X, Y, against_plain, running, task

pytestmark = pytest.mark.usefixtures("captured_once")

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


# Large ones, and those of which another has all that they have.
OF_OTHERS = {"tied", "convolutions", "adamw", "batches together"}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in OF_OTHERS)) for name in TASKS])
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
    for described, devices, way in (
        (task(model=Whole), "cpu:1", None),
        (accumulating(model=noisy), "cpu:2", DATA_PARALLEL),
    ):
        result, count = run(described, way, devices=devices, optimizer_placement="host")
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
    with pytest.raises(ConfigError, match="optimizer_placement must be 'device', 'host' or 'auto', not 'disk'"):
        HydraExecutor(optimizer_placement="disk")


@pytest.mark.parametrize("placement", ["host", "auto"])
def test_a_disk_beside_it_is_refused(tmp_path, placement):
    with pytest.raises(ConfigError, match=f"optimizer_placement='{placement}' .*; give one of the two"):
        HydraExecutor(optimizer_placement=placement, spill_dir=tmp_path)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "make", [torch.optim.AdamW, pytest.param(torch.optim.Adam, marks=pytest.mark.slow), torch.optim.SGD]
)
def test_kernels_are_those_that_the_users_optimizer_asks_for(make, fused):
    """Fused kernels round otherwise than torch's default: they run where they were asked for, and nowhere else."""
    described = task(optimizer=partial(make, lr=0.1, fused=fused), epochs=1)
    with running(num_shards=3, optimizer_placement="host") as pool:
        result = pool.submit(described).result(60.0)
    assert against_plain(described, result) == []


AUTO = {
    "what fits stays": ({"device_memory": "1MiB"}, "device"),
    "a slow link": ({"device_memory": "9KiB", "link_bandwidth": "1MB/s"}, "host"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "a slow link")) for name in AUTO]
)
def test_auto_says_where_and_why_and_gives_the_same_bits(name, caplog):
    options, place = AUTO[name]
    with caplog.at_level(logging.INFO, CHOICES.name), running(optimizer_placement="auto", **options) as pool:
        planned = pool.plan([task()]).trials[0]
        result = pool.submit(task()).result(60.0)
    assert result.optimizer_placement == planned.optimizer_placement == place
    assert planned.placement.startswith(f"updates on the {place}: ")
    assert planned.placement in [record.getMessage() for record in caplog.records]
    assert against_plain(task(), result) == []


def test_auto_has_the_host_where_the_device_has_no_room_for_updates():
    with running(device_memory="6KiB", optimizer_placement="auto") as pool:
        result = pool.submit(task()).result(60.0)
        reason = pool.plan([task()]).trials[0].placement
    assert result.optimizer_placement == "host"
    assert "would not fit beside its optimizer state" in reason
    assert against_plain(task(), result) == []


@pytest.mark.slow
def test_auto_keeps_a_trial_where_its_first_plan_had_it():
    """Batches of another size have plans of their own; the state is where it is."""
    described = task(train=lambda: [(X[:8], Y[:8]), (X[:24], Y[:24]), (X[:3], Y[:3])], validate=SAMPLES, batch_size=5)
    with running(device_memory="14KiB", link_bandwidth="1MB/s", optimizer_placement="auto") as pool:
        result = pool.submit(described).result(60.0)
    assert result.optimizer_placement == "host"
    assert against_plain(described, result) == []


@pytest.mark.parametrize(("memory", "place"), [("1MiB", "device"), ("10KiB", "host")])
def test_auto_and_a_model_that_runs_whole(memory, place):
    with running(device_memory=memory, optimizer_placement="auto") as pool:
        result = pool.submit(task(model=Whole)).result(60.0)
    assert result.optimizer_placement == place
    assert against_plain(task(model=Whole), result) == []
