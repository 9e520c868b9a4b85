"""Where updates are made: the side with which a step is expected to take less time, and why."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from hydra_tune.devices.hardware.link import LinkCostModel, dram_bandwidth
from hydra_tune.shard.cost.optimizer_placement import (
    MachineSpeeds,
    PlacementCandidate,
    _on_host,
    choose_placement,
    update_seconds,
)
from hydra_tune.shard.cost.pilot import ShardCost
from hydra_tune.shard.cost.traffic_model import StepAccessPattern
from hydra_tune.shard.verify.step_outcome import UnitSeconds

MIB = 1 << 20
SPEEDS = MachineSpeeds(
    link=LinkCostModel(bytes_per_second=1e9), dram_bytes_per_second=1e10, is_host=True, has_core=True
)


def cost(*, on_host):
    """A layer of 1 MiB with AdamW."""
    return ShardCost(
        state_bytes=MIB,
        value_bytes=1024,
        handed_bytes=1024,
        optimizer_bytes=2 * MIB,
        forward_workspace=1024,
        backward_workspace=MIB,
        update_workspace=MIB,
        first_update_workspace=3 * MIB,
        trained_bytes=MIB,
        updates_on_host=on_host,
    )


def cut(shards=8, *, on_host, seconds=1e-4):
    every = (seconds,) * shards
    return PlacementCandidate(
        costs=[cost(on_host=on_host)] * shards, seconds=UnitSeconds(forward=every, backward=every)
    )


def choose(budget_mib, speeds=SPEEDS, habits=None, rate=1e-10, **changes):
    cuts = {"on_device": cut(on_host=False), "on_host": cut(on_host=True)} | changes
    return choose_placement(*cuts.values(), budget_mib * MIB, habits or StepAccessPattern(), speeds, rate)


def test_on_the_host_where_the_link_is_slow_and_state_would_travel():
    choice = choose(6)
    assert choice.place == "host"
    assert "copies were measured at 953.7 MiB/s, the host's memory at 9.3 GiB/s" in choice.reason


def test_on_the_device_where_everything_stays():
    choice = choose(64)
    assert choice.place == "device"
    assert "nothing moves" in choice.reason


def test_on_the_device_where_little_has_to_leave():
    assert choose(30).place == "device"


def test_on_the_host_where_state_does_not_fit_beside():
    choice = choose(6, on_device=None)
    assert choice.place == "host"
    assert "would not fit beside its optimizer state" in choice.reason


def test_on_the_device_where_the_hosts_memory_is_slower_than_the_gpus_link():
    gpu = replace(SPEEDS, is_host=False)
    assert choose(6, gpu).place == "host"
    assert choose(6, replace(gpu, dram_bytes_per_second=1e9)).place == "device"
    assert choose(6, gpu, rate=1e-7).place == "device"  # or where the optimizer is


# Seven of eight updates are beside something, the last never is: all seven where they are short, and else as much of them as
# goes by in sending seven of eight gradients, and half of the parameters.
@pytest.mark.parametrize(("rate", "beside"), [(1e-9, 7 * MIB * 1e-9), (3e-9, (7 + 8 / 2) * MIB / 1e9)])
def test_updates_that_wait_for_all_gradients_are_beside_nothing(rate, beside):
    gpu = replace(SPEEDS, is_host=False)
    at_once, waiting = (
        _on_host(cut(on_host=True), 64 * MIB, StepAccessPattern(waits=waits), gpu, rate)[0] for waits in (False, True)
    )
    assert waiting - at_once == pytest.approx(beside, rel=1e-9)


def test_a_host_without_a_core_to_spare_computes_one_after_the_other():
    fast = replace(SPEEDS, link=LinkCostModel(bytes_per_second=2e10))
    long = {"on_device": cut(on_host=False, seconds=0.01), "on_host": cut(on_host=True, seconds=0.01)}
    assert choose(6, fast, rate=5e-9, **long).place == "host"
    assert choose(6, replace(fast, has_core=False), rate=5e-9, **long).place == "device"


@pytest.mark.parametrize("shape", [(), (5,), (2048, 1024)])
def test_an_optimizer_is_timed_on_a_stand_in(shape):
    parameter = torch.ones(shape).requires_grad_()
    optimizer = torch.optim.AdamW([{"params": []}, {"params": [parameter]}], lr=1.0)
    assert update_seconds(optimizer, [parameter, torch.ones(10_000)]) > 0
    assert parameter.eq(1).all()
    assert not optimizer.state


def test_a_model_without_parameters_takes_no_time():
    assert update_seconds(partial(torch.optim.SGD, lr=0.1)([torch.ones(1).requires_grad_()]), []) == 0


def test_the_hosts_memory_is_measured_once():
    assert dram_bandwidth() == dram_bandwidth() > 0
