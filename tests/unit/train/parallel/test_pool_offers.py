"""What splitting a step asks of the pool, and what a plan tells the cost model."""

import pytest
from torch import nn

from hydra_tune.train.parallel.batch_grouping import is_worth_it
from hydra_tune.train.parallel.cost_model import DATA_PARALLEL, PIPELINED, shard_facts
from hydra_tune.train.parallel.pool_offers import lane_bytes
from hydra_tune.train.timing.unit_times import UnitTimes
from tests.unit.shard.bench import Bench, bench, task_of, vectors

WIDTH = 256
SHARD_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


@pytest.fixture(scope="module")
def made() -> Bench:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    return bench(task_of(model, train=lambda: [vectors(width=WIDTH)], accumulate=4))


def test_a_plan_tells_of_its_shards(made):
    linears = [place for place, node in enumerate(made.captured.nodes) if "linear" in str(node.target)]
    plan = made.plan(linears[0] + 1)
    first, second = shard_facts(plan, UnitTimes({("forward", 0): 1.0, ("backward", 0): 2.0, ("backward", 1): 4.0}))
    assert (first.seconds, second.seconds) == (3.0, 4.0)
    assert min(first.state_bytes, second.state_bytes) >= SHARD_BYTES
    assert first.gradient_bytes >= SHARD_BYTES
    assert second.value_bytes >= 4 * 4 * WIDTH, "what the first one makes"
    assert SHARD_BYTES > first.handed_bytes >= 4 * 4 * WIDTH, "its gradient, without sums of the parameters'"
    assert first.work_bytes >= first.gradient_bytes, "made during the backward unit"


def test_a_batch_under_way_needs_its_values_on_the_host_and_where_it_is_summed_last_its_gradients(made):
    plan = made.plan()
    apart, piped = lane_bytes(plan, DATA_PARALLEL), lane_bytes(plan, PIPELINED)
    assert apart - piped >= 2 * SHARD_BYTES
    assert 0 < piped < SHARD_BYTES, "no sums, which all batches have in common"


@pytest.mark.parametrize(("rows", "is_worth"), [(4, True), (300, True), (1000, False)])
def test_batches_are_grouped_while_their_values_are_less_than_parameters_and_sums(rows, is_worth):
    """At 300 rows the values are more than the parameters loaded twice, and less than these and the sums that come and go."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    made = bench(task_of(model, train=lambda: [vectors(rows, width=WIDTH)], accumulate=4))
    linears = [place for place, node in enumerate(made.captured.nodes) if "linear" in str(node.target)]
    plan = made.plan(linears[0] + 1)
    assert is_worth_it(plan) == is_worth
