"""Fused trials step as their own optimizers do, whatever lies between their parameters and however options change."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import CyclicLR, ExponentialLR
from torch.utils.data import TensorDataset

from hydra_tune import TrainTask, train_plain
from tests.support.together import together
from tests.unit.pool.tasks import PATIENCE_SECONDS, running

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("captured_once")]

_GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(24, 8, generator=_GENERATOR, dtype=torch.float64)
Y = torch.randint(4, (24,), generator=_GENERATOR)


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double()


def with_frozen_biases():
    module = net()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("bias" not in name)
    return module


class TwoHeads(nn.Module):
    """Trains one of its heads in a step, by the first sample."""

    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.Linear(8, 16), nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 4)])
        self.double()

    def forward(self, x):
        hidden = self.body(x).relu()
        return self.heads[0](hidden) if len(x) == 8 else self.heads[1](hidden)


def weights_alone(module):
    return [parameter for name, parameter in module.named_parameters() if "weight" in name]


def groups(first, others):
    def of(module):
        named = list(module.named_parameters())
        return [
            {"params": [p for name, p in named if "weight" in name], **first},
            {"params": [p for name, p in named if "bias" in name], **others},
        ]

    return of


BY_TURNS = [(X[:8], Y[:8]), (X[8:14], Y[8:14]), (X[14:22], Y[14:22])]
BY_STEP = {"scheduler_interval": "step"}
CYCLIC = {"base_lr": 1e-2, "max_lr": 1e-1, "step_size_up": 2, "base_momentum": 0.0, "max_momentum": 0.9}
CASES = {
    "frozen between": {"model": with_frozen_biases, "optimizer": partial(AdamW, weight_decay=0.5)},
    "not in the optimizer": {"param_groups": weights_alone, "optimizer": partial(AdamW, weight_decay=0.5)},
    "heads by turns": {"model": TwoHeads, "batch_size": None, "train": lambda: BY_TURNS},
    "nesterov": {
        "optimizer": partial(SGD, momentum=0.9),
        "param_groups": groups({"nesterov": True}, {"nesterov": False}),
    },
    "centered": {"optimizer": RMSprop, "param_groups": groups({"centered": True}, {"centered": False})},
    "decoupled": {
        "optimizer": partial(Adam, weight_decay=0.5),
        "param_groups": groups({"decoupled_weight_decay": True}, {"decoupled_weight_decay": False}),
    },
    "sums of Adagrad": {"optimizer": Adagrad, "param_groups": groups({"initial_accumulator_value": 0.5}, {})},
    "momentum of 0": {
        "optimizer": partial(SGD, momentum=0.9, dampening=0.1),
        "scheduler": partial(CyclicLR, **CYCLIC),
        **BY_STEP,
    },
    "momentum of 0, RMSprop": {
        "optimizer": partial(RMSprop, momentum=0.9),
        "scheduler": partial(CyclicLR, **CYCLIC),
        **BY_STEP,
    },
    **{
        f"a rate that is a tensor, {kind.__name__}": {
            "optimizer": kind,
            "is_tensor": True,
            "scheduler": partial(ExponentialLR, gamma=0.5),
            **BY_STEP,
        }
        for kind in (SGD, Adam, AdamW, RMSprop, Adagrad)
    },
}  # fmt: skip


def tasks(*, optimizer=AdamW, is_tensor=False, **changes):
    arguments = {
        "model": net,
        "train": TensorDataset(X, Y),
        "batch_size": 8,
        "loss": functional.cross_entropy,
        "epochs": 4,
    }
    for seed, rate in enumerate((3e-2, 1e-2)):
        lr = torch.tensor(rate, dtype=torch.float64) if is_tensor else rate
        yield TrainTask(**(arguments | changes), optimizer=partial(optimizer, lr=lr), seed=seed)


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_of_the_plain_loop(case):
    with running(fusion="on", fusion_size=2, num_shards=1) as pool:
        with together():
            jobs = [pool.submit(one) for one in tasks(**CASES[case])]
        results = [job.result(PATIENCE_SECONDS) for job in jobs]
    for result, described in zip(results, tasks(**CASES[case]), strict=True):
        plain = train_plain(described)
        assert (result.status, result.group_size) == ("completed", 2)
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(result.state_dict()[name], tensor, rtol=1e-9, atol=1e-12)
