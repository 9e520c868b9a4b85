"""When it pays to run batches of a step side by side."""

import pytest
from torch import nn

from hydra_tune.train.clock import UnitTimes
from hydra_tune.train.helpers import is_worth_it, lane_bytes
from tests.unit.shard.bench import Bench, bench, task_of, vectors

WIDTH = 256
PARAMETER_BYTES = 4 * (WIDTH * WIDTH + WIDTH) * 2


@pytest.fixture(scope="module")
def made() -> Bench:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    return bench(task_of(model, train=lambda: [vectors(width=WIDTH)], accumulate=4))


def test_copies_must_cost_less_than_the_help_saves(made):
    plan = made.plan()
    copies = 2 * PARAMETER_BYTES + 2 * 2 * PARAMETER_BYTES  # parameters there; of two batches, the gradients back
    seconds = copies / 2e9 / 2  # each of two batches saves as much
    assert is_worth_it(plan, UnitTimes({("backward", 0): seconds * 1.01}), 4)
    assert not is_worth_it(plan, UnitTimes({("backward", 0): seconds * 0.99}), 4)
    assert not is_worth_it(plan, UnitTimes({("backward", 0): 1.0}), 1), "a step of one batch has nothing to share"


def test_a_batch_under_way_needs_its_gradients_and_values_on_the_host(made):
    assert lane_bytes(made.plan()) >= PARAMETER_BYTES
