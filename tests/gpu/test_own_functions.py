"""A model cut around its own `autograd.Function`, on a GPU: the bits of its own code there."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hydra_tune import HydraExecutor, TrainTask
from tests.gpu.bits import assert_same_bits, bits

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("deterministic"),
]
GENERATOR = torch.Generator().manual_seed(2)
X, Y = torch.randn(64, 32, generator=GENERATOR), torch.randint(8, (64,), generator=GENERATOR)


class Rounded(torch.autograd.Function):
    """Rounds forward, and hands gradients on where the input was small."""

    @staticmethod
    def forward(ctx, x, steps):
        ctx.save_for_backward(x)
        return (x * steps).round() / steps

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 2), None


class Quantised(nn.Module):
    """Rounds between its layers, one of which a reentrant checkpoint computes again."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x):
        x = Rounded.apply(self.first(x), 16.0)
        x = torch.utils.checkpoint.checkpoint(
            self.middle, functional.dropout(x, 0.1, self.training), use_reentrant=True
        )
        return self.head(Rounded.apply(x, 4.0).relu())


def task(seed):
    return TrainTask(
        model=Quantised,
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        train=TensorDataset(X, Y),
        validate=TensorDataset(X, Y),
        batch_size=16,
        loss=functional.cross_entropy,
        epochs=3,
        seed=seed,
    )


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_a_model_cut_around_its_functions_has_the_bits_of_its_own_code(shards):
    tasks = [task(seed) for seed in range(2)]
    with HydraExecutor("cuda:0", "512MiB") as pool:
        expected = [bits(result) for result in pool.run(tasks)]
    with HydraExecutor("cuda:0", "512MiB", num_shards=shards) as pool:
        found = pool.run(tasks)
    assert [result.num_shards for result in found] == [shards] * 2
    assert_same_bits([bits(result) for result in found], expected)
