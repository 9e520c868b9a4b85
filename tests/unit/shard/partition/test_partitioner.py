"""Shards fit, are as few as the greedy rule makes them, and a refusal names a budget that works."""

import re
from itertools import pairwise

import pytest
import torch
from torch import nn

from hydra_tune.errors import BudgetError, ConfigError
from hydra_tune.quantities import parse_bytes
from tests.parity.models import build
from tests.unit.shard.bench import Bisection, bench, task_of, vectors

NAMES = ("mlp", "cnn", "vit")


@pytest.fixture(scope="module")
def benches():
    return {name: bench(build(name), alignment=64) for name in NAMES}


def peaks(made, edges):
    return [made.pilot.cost(a, b).peak_bytes for a, b in pairwise(edges)]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_fits_whole_is_one_shard_and_needs_no_buffer(benches, name):
    made = benches[name]
    whole = made.pilot.cost(0, made.end).peak_bytes
    assert made.partition(whole, buffer_bytes=whole // 2) == [0, made.end]
    assert len(made.partition(whole - 1, buffer_bytes=0)) > 2


@pytest.mark.parametrize(
    ("name", "share"),
    [
        pytest.param(name, share, marks=[pytest.mark.slow] * ((name, share) not in {("mlp", 0.5), ("cnn", 0.5)}))
        for name in NAMES
        for share in (0.9, 0.5)
    ],
)
def test_shards_cover_the_step_at_allowed_cuts_and_each_fits(benches, name, share):
    made = benches[name]
    whole = made.pilot.cost(0, made.end).peak_bytes
    smallest = made.partitioner(1 << 40).smallest_budget()
    budget = max(int(whole * share), smallest * 10 // 8)
    edges = made.partition(budget, buffer_bytes=budget // 10)
    assert edges[0] == 0
    assert edges[-1] == made.end
    assert edges == sorted(set(edges))
    assert set(edges[1:-1]) <= set(made.analysis.cuts)
    assert max(peaks(made, edges)) <= budget - budget // 10


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "vit")) for name in NAMES])
def test_the_smallest_budget_works_and_a_little_less_does_not(benches, name):
    """By a plain bisection: where memory does not grow with the nodes, fewer candidates may miss a smaller budget."""
    made = benches[name]
    need = made.partitioner(1 << 40, kind=Bisection).smallest_budget()
    assert max(peaks(made, made.partitioner(need, kind=Bisection).partition())) <= need
    with pytest.raises(BudgetError):
        made.partitioner(need - need // 200, kind=Bisection).partition()


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fraction", [0.0, 0.3])
def test_the_budget_that_a_refusal_names_works(benches, name, fraction):
    made = benches[name]
    budget = made.partitioner(1 << 40).smallest_budget() // 2
    with pytest.raises(BudgetError) as caught:
        made.partition(budget, buffer_bytes=int(budget * fraction))
    enough = parse_bytes(re.search(r"to at least ([0-9.]+[KMG]?i?B)", str(caught.value))[1])
    made.partition(enough, buffer_bytes=int(enough * fraction))


def test_a_refusal_names_the_layer_the_need_and_the_budget(benches):
    made = benches["mlp"]
    with pytest.raises(BudgetError) as caught:
        made.partition(1024, buffer_bytes=256)
    message = str(caught.value)
    assert message.startswith("layer 'layers.0' (nodes 0 to 0) needs ")
    assert "a shard may take 768 B" in message
    assert "a budget of 1.0 KiB, of which 256 B are kept for loading" in message
    assert "lower batch_size, or raise device_memory to at least" in message


def test_greedy_takes_the_last_cut_that_fits():
    """Layers of one size, a cut between each two: shards of as many layers as fit."""
    made = bench(task_of(nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])), vectors(2, 64))
    three = max(made.pilot.cost(i, i + 3).peak_bytes for i in range(5))
    four = min(made.pilot.cost(i, i + 4).peak_bytes for i in range(4))
    assert three < four
    edges = made.partition(three)
    assert edges[:3] == [0, 3, 6]


def test_among_the_last_cuts_that_fit_the_one_that_fewest_bytes_cross_is_taken():
    """Narrow values between blocks, wide ones within: blocks are not cut."""

    def block():
        return [nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 8), nn.ReLU()]

    made = bench(task_of(nn.Sequential(*block(), *block(), *block())), vectors(32))
    budget = max(made.pilot.cost(4, 11).peak_bytes, made.pilot.cost(0, 6).peak_bytes)
    edges = made.partition(budget)
    crossing = made.analysis.crossing_bytes
    assert [crossing[edge] for edge in edges[1:-1]] == [32 * 8 * 4] * (len(edges) - 2)
    assert len(edges) > 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_shards", [1, 2, 3, 8])
def test_a_number_of_shards_is_met_where_they_fit(benches, name, num_shards):
    edges = benches[name].partition(1 << 40, num_shards)
    assert len(edges) - 1 == num_shards
    assert set(edges[1:-1]) <= set(benches[name].analysis.cuts)


def test_as_many_shards_as_there_are_cuts_and_no_more(benches):
    made = benches["mlp"]
    most = len(made.analysis.cuts) + 1
    assert made.partition(1 << 40, most) == [0, *made.analysis.cuts, made.end]
    for wrong in (0, most + 1):
        with pytest.raises(ConfigError, match=f"num_shards must be from 1 to {most} for this model, not {wrong}"):
            made.partition(1 << 40, wrong)


def test_shards_that_do_not_fit_are_cut_further(benches):
    made = benches["vit"]
    budget = made.pilot.cost(0, made.end).peak_bytes // 3
    edges = made.partition(budget, 2)
    assert len(edges) > 3
    assert max(peaks(made, edges)) <= budget


def test_layer_cuts_where_a_layer_begins(benches):
    made = benches["mlp"]
    edges = made.partition(1 << 40, "layer")
    layers = made.analysis.layers
    linears = [i for i, node in enumerate(made.captured.nodes) if "linear" in str(node.target)]
    assert set(linears[1:]) <= set(edges)
    assert all(layers[edge] != layers[edge - 1] for edge in edges[1:-1])


def test_boundaries_are_cuts_whatever_fits(benches):
    made = benches["cnn"]
    chosen = made.analysis.cuts[3::7]
    assert made.partition(1 << 40, boundaries=chosen) == [0, *chosen, made.end]


def test_a_piece_that_costs_more_than_a_longer_one_does_not_hide_it():
    """The wide value in the middle makes a shard that ends at it larger than one that goes on past it."""

    class Bulge(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            x = self.first(x)
            wide = x[:, None, :].expand(-1, 500, -1) + torch.zeros(500, 8)
            return self.last(wide[:, 0] + wide.mean(dim=1))

    made = bench(task_of(Bulge()))
    edges = [0, *made.analysis.cuts, made.end]
    feasible = min(max(peaks(made, [0, cut, made.end])) for cut in made.analysis.cuts)
    smallest = made.partitioner(1 << 40).smallest_budget()
    assert max(peaks(made, made.partition(min(feasible, smallest)))) <= min(feasible, smallest)
    assert len(edges) > 4
