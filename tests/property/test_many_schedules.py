"""Sharded-LRTF on a thousand random instances, far larger than those that Hypothesis looks at."""

import random

import pytest

from hydra_tune.schedule import Fifo, ShardedLRTF, Unit, makespan_bound
from tests.unit.schedule.driver import drive


def random_jobs(rng):
    """Steps of forward and backward units over a trial's shards; trials differ up to a hundredfold."""
    jobs = {}
    for index in range(rng.randint(1, 12)):
        num_shards, scale = rng.randint(1, 4), 10 ** rng.uniform(-1, 1)
        step = [
            Unit(kind=kind, shard=shard, seconds=scale * rng.uniform(0.2, 2.0))
            for kind, shards in (("forward", range(num_shards)), ("backward", reversed(range(num_shards))))
            for shard in shards
        ]
        jobs[f"job{index}"] = step * rng.randint(1, 6)
    return jobs


def excess(policy, seed):
    """How far beyond the bound the makespan is, and how far it may be; seconds.

    Shards stay where they last ran, so that the slack is made use of; moving them takes no time.
    """
    rng = random.Random(seed)
    jobs, num_devices = random_jobs(rng), rng.randint(1, 8)
    slack = rng.choice([0.0, rng.uniform(0.1, 20.0)])
    pool = drive(jobs, policy=policy, num_devices=num_devices, step_seconds=slack)
    bound = makespan_bound([sum(unit.seconds for unit in units) for units in jobs.values()], num_devices)
    longest_unit = max(unit.seconds for units in jobs.values() for unit in units)
    return pool.now - bound, longest_unit + ShardedLRTF().slack_steps * slack


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 10))])
def test_within_the_longest_unit_and_the_slack_of_the_bound(block):
    for seed in range(100 * block, 100 * block + 100):
        beyond, allowed = excess(ShardedLRTF(), seed)
        assert -1e-6 <= beyond <= allowed + 1e-6, f"seed {seed}"


def test_the_limit_means_something():
    """First come, first served is beyond it on some of the same instances."""
    cases = [excess(Fifo(), seed) for seed in range(50)]
    assert any(beyond > allowed for beyond, allowed in cases)
