"""An optimizer whose update takes each element by itself is told from others by a few steps of small tensors."""

from functools import partial

import pytest
import torch
from torch.optim import Adam

from hydra_tune.errors import TaskError
from hydra_tune.shard.verify.elementwise_optimizers import check_elementwise


class ByNorm(Adam):
    """Scales each gradient by its norm, so a piece of a parameter is updated otherwise than the whole."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= parameter.grad.norm()
        return super().step(closure)


@pytest.mark.parametrize("rate", [0.1, 0.0, torch.tensor(0.1), torch.tensor(0.0)])
def test_the_rate_may_be_a_number_or_a_tensor_and_start_at_zero(rate):
    piece = torch.nn.Parameter(torch.ones(2, 4))
    make = partial(Adam, [piece], lr=rate)
    check_elementwise(make(), [("weight", 0, 0, piece)])
    with pytest.raises(TaskError, match="ByNorm does not update each element by itself"):
        check_elementwise(ByNorm([piece], lr=rate), [("weight", 0, 0, piece)])
