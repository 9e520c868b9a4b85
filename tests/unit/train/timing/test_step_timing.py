"""What a trial's steps are seen to take."""

import time
from collections import Counter

import pytest
import torch

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.shard.partition.plan_cache import PlanLibrary, ShardPlanConstraints
from hydra_tune.train.timing.step_timing import timed_steps
from tests.unit.pool.tasks import X, Y, one_batch, task

BUDGET = 8 << 10


@pytest.fixture
def device():
    made = CpuDevice(0, BUDGET)
    yield made
    made.close()


def timed(device, sends_ahead=True, **changes):
    library = PlanLibrary(
        ShardPlanConstraints(budget_bytes=BUDGET, buffer_fraction=0.15 * sends_ahead, alignment=device.alignment)
    )
    return timed_steps(task(**changes), library, device, sends_ahead=sends_ahead)


@pytest.mark.parametrize("sends_ahead", [True, False])
def test_every_unit_of_a_step_is_seen(device, sends_ahead):
    pace = timed(device, sends_ahead, activations="recompute")
    shards = 1 + max(shard for _, shard, _ in pace.seconds)
    assert shards > 1
    kinds = Counter(kind for kind, _, _ in pace.seconds)
    assert kinds == {"forward": shards - 1, "backward": shards, "update": shards}
    assert min(pace.seconds.values()) > 0
    assert pace.link.bytes_per_second > 0


def test_batches_of_a_step_are_told_apart(device):
    pace = timed(device, accumulate=3)
    assert {nth for kind, _, nth in pace.seconds if kind == "backward"} == {0, 1, 2}


def test_drawing_a_batch_is_part_of_a_step(device):
    def slow():
        for _ in range(4):
            time.sleep(0.1)
            yield X[:8].clone(), Y[:8].clone()

    assert sum(timed(device, train=slow).seconds.values()) >= 0.1


def test_a_run_of_one_step_is_timed_and_nothing_is_evaluated(device):
    def evaluated(module, batch):
        raise AssertionError("nobody asked")

    validated = {"validate": one_batch, "evaluate": evaluated, "metric": "val_x"}
    assert timed(device, train=one_batch, epochs=1, **validated).seconds


def test_schedulers_that_know_how_long_a_run_is_are_not_exceeded(device):
    def scheduler(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6)

    assert timed(device, scheduler=scheduler, scheduler_interval="step").seconds
