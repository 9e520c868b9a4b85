"""Models drawn at random, traced and planned: whatever is decided, their steps have the bits of the unplanned ones."""

from functools import partial
from random import Random

import pytest
import torch
from torch import nn
from torch.nn import functional

from hydra_tune.planner.cost.peak_memory import peak_of
from hydra_tune.planner.ir.verify import verify_schedule
from hydra_tune.planner.passes.swap_recompute import AllowedPlanActions
from tests.unit.planner.made import EXAMPLES
from tests.unit.planner.run.test_planned_run import assert_same_as_unplanned, limited, tracked

WIDTH = 8
LAYERS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "joined": lambda: nn.Linear(2 * WIDTH, WIDTH),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "dropout": lambda: nn.Dropout(0.3),
    "in place": lambda: nn.Linear(WIDTH, WIDTH),
}
OPERATORS = {
    "linear": lambda layer, a, _: layer(a),
    "joined": lambda layer, a, b: layer(torch.cat([a, b], 1)),
    "batch norm": lambda layer, a, _: layer(a),
    "layer norm": lambda layer, a, _: layer(a),
    "dropout": lambda layer, a, _: layer(a),
    "in place": lambda layer, a, _: functional.relu(layer(a).mul_(0.5), inplace=True),
    "add": lambda _, a, b: a + b,
    "gate": lambda _, a, b: torch.sigmoid(a) * b,
    "softmax": lambda _, a, b: torch.softmax(a @ b.T, 1) @ b,
    "views": lambda _, a, b: torch.stack([a.view(-1, 2, WIDTH // 2)[:, 1], b[:, ::2]], 2).flatten(1),
    "scan": lambda _, a, b: torch.cumsum(functional.gelu(a), 1) - b.amax(1, keepdim=True),
}


class Drawn(nn.Module):
    """A dozen operators, each on two of what there is by then."""

    def __init__(self, seed):
        super().__init__()
        random = Random(seed)
        self.steps = [
            (random.choice(list(OPERATORS)), random.randint(max(0, place - 3), place), random.randint(0, place))
            for place in range(12)
        ]
        self.layers = nn.ModuleList(LAYERS.get(kind, nn.Identity)() for kind, _, _ in self.steps)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        values = [x]
        for layer, (kind, first, second) in zip(self.layers, self.steps, strict=True):
            values.append(OPERATORS[kind](layer, values[first], values[second]))
        return self.head(values[-1] + values[-2])


def _batch():
    return torch.randn(16, WIDTH), torch.randint(4, (16,))


SEEDS = [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 16))]


@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_planned_model_has_the_bits_of_the_unplanned_one(seed):
    random, name = Random(seed), f"drawn {seed}"
    EXAMPLES[name] = (partial(Drawn, seed), _batch)
    policy = random.choice(
        [
            AllowedPlanActions(),
            AllowedPlanActions(swaps=False),
            AllowedPlanActions(recomputes=False),
            AllowedPlanActions(interleaves=False),
        ]
    )
    schedule = limited((name, name), random.choice([0.9, 0.7, 0.5, 0.3]), policy)
    verify_schedule(schedule)
    assert any(one.swaps or one.recomputes for one in schedule.decisions)
    assert_same_as_unplanned(schedule, (name, name))
    measured, predicted = tracked(schedule, (name, name))
    assert measured <= predicted == peak_of(schedule)[1].peak_bytes - schedule.static_bytes
