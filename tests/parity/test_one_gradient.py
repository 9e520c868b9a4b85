"""A parameter and a value that crosses a cut may get one gradient in one piece of memory: neither changes the other."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from hydra_tune.train.parallel import batch_grouping
from tests.parity.test_splitting import accumulating
from tests.unit.pool.tasks import against_plain, train

pytestmark = pytest.mark.usefixtures("captured_once")


class OneGradient(nn.Module):
    def __init__(self, *, between: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.shift = nn.Parameter(torch.zeros(6, 16))
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.between:
            x = torch.relu(x)
        return self.last((x.float().view(-1) + self.shift.view(-1)).view(6, 16))


class Rude(torch.optim.SGD):
    """Changes gradients in place, which a plain loop has no more use for."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
        return super().step(closure)


TASKS = {
    "batches together": {"accumulate": 4},
    "loss scaling": {"accumulate": 1, "precision": "float16"},
    "an optimizer that changes gradients": {"accumulate": 1, "optimizer": partial(Rude, lr=0.1)},
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("name", TASKS)
def test_a_gradient_in_memory_that_others_use(name, between, monkeypatch):
    monkeypatch.setattr(batch_grouping, "is_worth_it", lambda plan: len(plan.shards) > 1)
    for cut in (3, 4):
        described = accumulating(model=partial(OneGradient, between=between), batch_size=6, **TASKS[name])
        assert against_plain(described, train(described, num_shards=cut)) == []
