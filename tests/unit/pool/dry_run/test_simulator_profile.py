"""A profile of tasks that are not trained: what the simulator is told is what the pool would do."""

import json
from functools import partial

import pytest
import torch
from torch import nn

from hydra_tune import HydraExecutor
from hydra_tune.errors import ConfigError
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.simulate import simulate
from hydra_tune.simulate.profile import parse_profile, recorded_profile
from tests.unit.pool.tasks import PATIENCE_SECONDS, against_plain, one_batch, running, short, task

pytestmark = pytest.mark.timeout(120)
OPTIONS = {"devices": "cpu:2", "num_shards": 3, "max_concurrent": 2}


def test_it_has_the_units_and_bytes_of_a_real_run():
    tasks = [task(), task(epochs=5, accumulate=2)]
    with HydraExecutor(**OPTIONS) as pool:
        planned = pool.profile(tasks, bandwidth="1GB/s")
    # On one device: on two, batches of a step may run side by side, of which no profile is made.
    with running(record=True, **(OPTIONS | {"devices": "cpu:1"})) as pool:
        results = pool.run(tasks)
    real = recorded_profile(pool.recording())
    assert [trial["steps"] for trial in planned["trials"]] == [6, 10]
    for expected, trial, result in zip(real["trials"], planned["trials"], results, strict=True):
        assert trial["shard_bytes"] == expected["shard_bytes"]
        assert len(trial["shard_bytes"]) == result.num_shards == 3
    kinds = [(unit["kind"], unit["shard"]) for unit in planned["trials"][0]["step"]]
    assert kinds == [("forward", 0), ("forward", 1), ("backward", 2), ("backward", 1), ("backward", 0)]
    grouped = [(unit["kind"], unit["shard"]) for unit in planned["trials"][1]["step"]]
    assert grouped == [unit for unit in kinds for _ in range(2)]
    assert sum(unit["seconds"] for unit in planned["trials"][0]["step"]) > 0
    assert [device["name"] for device in planned["devices"]] == ["cpu:0", "cpu:1"]


def test_the_simulator_plays_it():
    with HydraExecutor(**OPTIONS) as pool:
        scenario = parse_profile(json.loads(json.dumps(pool.profile([task()] * 3, steps=7))), source="the plan")
    result = simulate(scenario, "lrtf")
    assert result.units_run == 3 * 7 * 5
    assert scenario.max_concurrent == 2


def test_it_leaves_no_trace_in_the_pool():
    state = torch.get_rng_state()
    threads = torch.get_num_threads()
    with running(**OPTIONS) as pool:
        pool.profile([task()])
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.get_num_threads() == threads
        stats = pool.stats()
        assert (stats.units_run, [device.resident_bytes for device in stats.devices.values()]) == (0, [0, 0])
        assert against_plain(task(), *pool.run([task()])) == []


BUILT = []


def test_it_puts_back_what_factories_count(monkeypatch):
    """However slow the machine is: changes are put back that a build has made alone, which is for a limited time."""
    monkeypatch.setattr(GATE, "alone", partial(GATE.alone, PATIENCE_SECONDS))

    def model():
        BUILT.append(0.1 * len(BUILT))
        return nn.Sequential(nn.Linear(8, 6), nn.Dropout(BUILT[-1]), nn.Linear(6, 4))

    BUILT.clear()
    with running(**OPTIONS) as pool:
        pool.profile([task(model=model), task(model=model)])
        assert BUILT == []
        result = pool.run([task(model=model)])[0]
        assert result.module()[1].p == BUILT[0] == 0.0


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x):
        y = self.linear(x)
        return y * 2 if y.sum() > 0 else y


@pytest.mark.parametrize(
    ("wrong", "more", "message"),
    [
        (task(model=Branching), {}, "trial0 runs whole"),
        (short(train=lambda: iter(one_batch())), {}, "give steps="),
        (task(), {"steps": 0}, "steps must be a whole number"),
        (task(), {"bandwidth": "fast"}, "bandwidth"),
    ],
)
def test_what_cannot_be_told_is_refused(wrong, more, message):
    with HydraExecutor(**OPTIONS) as pool, pytest.raises(ConfigError, match=message):
        pool.profile([wrong], **more)
