"""The partitioner cuts where a plain bisection would, and finds the same smallest budget with less to measure."""

from contextlib import suppress

import pytest

from hydra_tune.errors import BudgetError
from hydra_tune.shard.cost.pilot import ShardPilot
from hydra_tune.shard.partition.partitioner import ShardPartitioner
from tests.parity.models import build
from tests.unit.shard.bench import Bisection, bench


@pytest.fixture(scope="module", params=["mlp", "vit"])
def made(request):
    return bench(build(request.param), alignment=64)


class Counting(ShardPilot):
    """Notes the candidates that it is asked for."""

    def __init__(self, pilot):
        self.pilot, self.asked = pilot, set()

    def cost(self, first, last):
        self.asked.add((first, last))
        return self.pilot.cost(first, last)

    def least_bytes(self, first, last):
        return self.pilot.least_bytes(first, last)

    @property
    def nodes(self):
        return sum(last - first for first, last in self.asked)


def partitioner(kind, made, budget, fraction=0.0, pilot=None):
    return kind(pilot or made.pilot, made.analysis, made.end, budget_bytes=budget, buffer_bytes=int(budget * fraction))


@pytest.mark.cases(2)
@pytest.mark.parametrize("fraction", [0.0, 0.15])
@pytest.mark.parametrize("share", [1.0, 0.9, 0.8, 0.7])
def test_it_cuts_at_the_same_nodes(made, share, fraction):
    budget = int(made.pilot.cost(0, made.end).peak_bytes * share)
    expected = partitioner(Bisection, made, budget, fraction).partition()
    assert partitioner(ShardPartitioner, made, budget, fraction).partition() == expected


@pytest.mark.cases(1)
def test_its_refusals_are_the_same(made):
    refusals = []
    for kind in (Bisection, ShardPartitioner):
        with pytest.raises(BudgetError) as found:
            partitioner(kind, made, made.pilot.cost(0, made.end).peak_bytes // 10, 0.15).partition()
        refusals.append(found.value)
    one, other = (str(refusal).split(" or raise")[0] for refusal in refusals)
    assert one == other
    assert refusals[0].enough_bytes == pytest.approx(refusals[1].enough_bytes, rel=0.002)


@pytest.mark.cases(2)
@pytest.mark.parametrize("num_shards", [None, 3, "layer"])
def test_it_finds_the_same_smallest_budget(made, num_shards):
    expected = partitioner(Bisection, made, 1 << 40, 0.15).smallest_budget(num_shards)
    budget = expected * 2
    peak = max(made.pilot.cost(0, made.end).peak_bytes, 1)
    found = partitioner(ShardPartitioner, made, budget, 0.15).least_budget(num_shards, min(peak, budget))
    assert found == pytest.approx(expected, rel=0.002)


def test_it_measures_less_where_shards_are_small(made):
    budget = partitioner(Bisection, made, 1 << 40).smallest_budget() * 11 // 10
    nodes = {}
    for kind in (Bisection, ShardPartitioner):
        pilot = Counting(made.pilot)
        partitioner(kind, made, budget, pilot=pilot).partition()
        nodes[kind] = pilot.nodes
    assert nodes[ShardPartitioner] < nodes[Bisection]


def test_it_does_not_measure_a_whole_model_whose_parameters_are_too_large(made):
    pilot = Counting(made.pilot)
    budget = made.pilot.least_bytes(0, made.end) // 2
    with suppress(BudgetError):
        partitioner(ShardPartitioner, made, budget, pilot=pilot).partition()
    assert pilot.asked
    assert (0, made.end) not in pilot.asked
    assert made.pilot.least_bytes(0, made.end) <= made.pilot.cost(0, made.end).peak_bytes
