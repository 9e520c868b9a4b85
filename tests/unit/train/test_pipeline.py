"""Which plans' batches may be pipelined, and which together."""

import pytest
from torch import nn

from hydra_tune.train.pipeline import goes_with
from tests.unit.shard.bench import Bench, bench, task_of, vectors


@pytest.fixture(scope="module")
def made() -> Bench:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    return bench(task_of(model, train=lambda: [vectors()], accumulate=4))


def first_linear(made: Bench) -> int:
    return next(place for place, node in enumerate(made.captured.nodes) if "linear" in str(node.target))


def test_a_pipeline_needs_two_shards(made):
    cut = made.plan(first_linear(made) + 1)
    assert cut.may_be_pipelined, "its buffers are one shard's"
    assert not cut.may_run_beside, "but each forward reads what the one before has written"
    assert not made.plan().may_be_pipelined


def test_only_plans_that_are_cut_alike_go_together(made):
    place = first_linear(made) + 1
    cut, again, other = made.plan(place), made.plan(place), made.plan(*made.spread(3))
    assert goes_with(cut, again)
    assert not goes_with(cut, other)
    assert not goes_with(cut, made.plan())
