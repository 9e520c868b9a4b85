"""Bytes moved in a step, where a device has room for one shard and nothing stays."""

import time
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from hydra_tune import Reported, TrainTask
from hydra_tune.devices import cpu
from hydra_tune.pool.runtime.worker import Worker
from hydra_tune.pool.stats import DeviceStats
from hydra_tune.schedule.machine import Scheduler
from hydra_tune.train.parallel import batch_grouping
from hydra_tune.train.parallel.cost_model import DATA_PARALLEL, PIPELINED
from tests.support.parallel import PARALLEL
from tests.unit.pool.tasks import against_plain, running, task

pytestmark = pytest.mark.usefixtures("captured_once")

WIDTH, LAYERS = 64, 8
PARAMETER_BYTES = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
BUDGET = "117KiB"
STEPS = 5


def wide(accumulate: int, steps: int, layers: int = LAYERS, **changes: Any) -> TrainTask:
    """Steps of 16 samples, in as many batches as wanted."""
    inputs = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(5))
    return task(
        model=lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)]),
        train=torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(dim=1)),
        batch_size=16 // accumulate,
        accumulate=accumulate,
        epochs=steps,
        **changes,
    )


def moved(
    accumulate: int, *, device_memory: str | None = BUDGET, optimizer_placement: Any = "device", **changes: Any
) -> Counter[str]:
    """Bytes moved in one step by kind, both ways together; the first steps, which make optimizer state, do not count."""
    totals: list[Counter[str]] = []
    for steps in (2, 2 + STEPS):
        described = wide(accumulate, steps, **changes)
        placed = {"device_memory": device_memory, "optimizer_placement": optimizer_placement}
        with running(num_shards=LAYERS, **placed) as pool:
            result = pool.submit(described).result(60.0)
            (device,) = pool.stats().devices.values()
        assert against_plain(described, result) == []
        totals.append(Counter(device.bytes_in_by_kind) + Counter(device.bytes_out_by_kind))
    return Counter({kind: (nbytes - totals[0][kind]) // STEPS for kind, nbytes in totals[1].items()})


@pytest.mark.cases(1)
@pytest.mark.parametrize("accumulate", [1, *(pytest.param(each, marks=pytest.mark.slow) for each in (2, 4)), 8])
def test_a_step_moves_three_times_the_parameters_however_many_batches_it_has(accumulate):
    assert 2 * PARAMETER_BYTES < moved(accumulate)["parameters"] <= 1.02 * 3 * PARAMETER_BYTES


@pytest.mark.cases(1 / 3)
def test_without_groups_it_moves_them_for_each_batch(monkeypatch):
    monkeypatch.setattr(batch_grouping, "is_worth_it", lambda plan: False)
    assert moved(4)["parameters"] > 2 * 3 * PARAMETER_BYTES


def test_clipping_has_updates_of_their_own_which_load_the_parameters_once_more():
    assert 3 * PARAMETER_BYTES < moved(4, max_grad_norm=1.0)["parameters"] <= 1.02 * 4 * PARAMETER_BYTES


def test_nothing_moves_but_the_batches_where_all_fits():
    counted = moved(4, device_memory=None)
    assert {kind for kind, nbytes in counted.items() if nbytes} == {"inputs"}


MANY, STEEP, TIGHT = 16, partial(torch.optim.SGD, lr=0.1), "68KiB"  # so that few of the shards stay on a device


def moved_on_two(way: str, accumulate: int) -> tuple[float, float]:
    """Parameters moved in one step split over two devices, over |W|: to and from the host, and between the devices.

    Counted between the reports of the second and the fourth step: before the second, shards are where the first, on one device,
    has left them.
    """
    described, found = wide(accumulate, 4, MANY, optimizer=STEEP, report_every=1, parallel=PARALLEL[way]), []
    with running(devices="cpu:2", num_shards=MANY, device_memory=TIGHT) as pool:
        events = pool.events()
        job = pool.submit(described, events=events)
        while isinstance(event := events.get(60.0), Reported):
            if event.step in (2, 4):
                found.append([counted(device) for device in pool.stats().devices.values()])
            job.proceed()
        assert pool.stats().steps_by_way == {way: 3}
    assert against_plain(described, job.result()) == []
    step = 2 * PARAMETER_BYTES * MANY / LAYERS
    before, after = ([sum(each) / step for each in zip(*devices, strict=True)] for devices in found)
    return after[0] - before[0], after[1] - before[1]


def counted(device: DeviceStats) -> tuple[int, int]:
    """Bytes of parameters, to and from the host, and from another device."""
    kinds = device.bytes_in_by_kind, device.bytes_out_by_kind, device.bytes_across_by_kind
    into, out, across = (kind.get("parameters", 0) for kind in kinds)
    return into + out, across


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize("batches", [*(pytest.param(each, marks=pytest.mark.slow) for each in (2, 4)), 8])
def test_data_parallel_on_two_devices_moves_parameters_twice_for_each_device_and_writes_them_back(batches):
    """(2N + 1)|W| on N = 2 devices, however many batches, less 4 of 16 shards that are there still.

    Harmony's 3N|W| has an update on each device.
    """
    assert moved_on_two(DATA_PARALLEL, batches) == (5 - 4 / MANY, 0)


@pytest.mark.cases(1 / 3)
def test_a_pipeline_on_two_devices_does_not_move_parameters_for_each_batch():
    """Harmony's 3|W|, less 5 of 16 shards that are there still. A shard may change devices where its own is busy."""
    by_host, between = moved_on_two(PIPELINED, 4)
    assert by_host == pytest.approx(3 - 5 / MANY, abs=1 / MANY)
    assert between <= 1 / MANY


@pytest.mark.cases(1 / 3)
def test_a_unit_waits_for_the_device_of_its_shard_that_is_about_to_be_idle(monkeypatch):
    """One device is slow to say that it is idle, and gets its units all the same, which the other one's make due meanwhile."""
    placed, start, finish = [], Scheduler._start, Worker._finish_unit

    def noted(self, record, unit, place):
        placed.append((unit.near, place))
        return start(self, record, unit, place)

    def late(self, *arguments):
        if self._device.name == "cpu:1":
            time.sleep(0.005)
        finish(self, *arguments)

    monkeypatch.setattr(Scheduler, "_start", noted)
    monkeypatch.setattr(Worker, "_finish_unit", late)
    with running(devices="cpu:2", num_shards=MANY, device_memory=TIGHT) as pool:
        assert pool.submit(wide(2, 3, MANY, optimizer=STEEP, parallel="pipeline")).result(60.0).status == "completed"
    meant = [(near, place) for near, place in placed if near is not None]
    assert len(meant) > 100
    assert set(meant) == {("cpu:0", "cpu:0"), ("cpu:1", "cpu:1")}


@pytest.fixture
def copied(monkeypatch):
    """The bytes of each copy that a CPU device makes, counted where tensors are copied, in the background too."""
    counts: list[int] = []
    copy = cpu._copy

    def counting(pairs: Any) -> None:
        copy(pairs)
        counts.append(sum(target.nbytes for _, target in pairs))

    monkeypatch.setattr(cpu, "_copy", counting)
    return counts


@pytest.mark.parametrize("way", [DATA_PARALLEL, PIPELINED])
def test_what_goes_between_devices_is_counted_apart_and_passes_no_host(copied, way):
    """Where all fits: gradients' sums and values go from device to device, and parameters come and go once."""
    with running(devices="cpu:2", num_shards=LAYERS) as pool:
        described = wide(
            4, 3, optimizer=STEEP, activations="recompute", parallel=PARALLEL[way]
        )  # which no copies are tried for
        assert pool.submit(described).result(60.0).status == "completed"
        devices = pool.stats().devices.values()
    assert sum(device.bytes_in + device.bytes_out + device.bytes_across for device in devices) == sum(copied)
    across = sum((Counter(device.bytes_across_by_kind) for device in devices), Counter())
    host = sum((Counter(d.bytes_in_by_kind) + Counter(d.bytes_out_by_kind) for d in devices), Counter())
    assert host["gradients"] == host["activations"] == host["boundaries"] == 0
    if way == DATA_PARALLEL:
        assert across["gradients"] > 0
    else:
        assert across["boundaries"] > 0
        assert across["parameters"] < PARAMETER_BYTES, "those whose home is not where the first step was"
        assert host["parameters"] <= 3 * PARAMETER_BYTES, "to the devices, and home at the end"


def test_the_figures_are_what_is_copied(copied):
    with running(num_shards=LAYERS, device_memory=BUDGET) as pool:
        assert pool.submit(wide(4, 3, max_grad_norm=1.0, activations="recompute")).result(60.0).status == "completed"
        (device,) = pool.stats().devices.values()
        assert device.bytes_in + device.bytes_out == sum(copied)
        assert device.bytes_ahead > 0
    assert sum(copied) > 9 * PARAMETER_BYTES


@pytest.mark.cases(1 / 3)
def test_updates_on_the_host_move_gradients_and_no_optimizer_state():
    counted = moved(4, optimizer_placement="host")
    assert counted["parameters"] <= 1.02 * 2 * PARAMETER_BYTES
    assert (counted["gradients"], counted["optimizer"]) == (PARAMETER_BYTES, 0)
