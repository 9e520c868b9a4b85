"""What may be fused has one key; what may not is told why."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW, Optimizer

from hydra_tune import TrainTask
from hydra_tune.errors import UnfusableError
from hydra_tune.fusion.matching.fusion_key import fusion_key
from tests.unit.pool.tasks import SAMPLES


class Net(nn.Module):
    def __init__(self, width=8, p=0.1):
        super().__init__()
        self.first, self.drop, self.head = nn.Linear(8, width), nn.Dropout(p), nn.Linear(width, 4)

    def forward(self, x):
        return self.head(self.drop(self.first(x)))


class Odd(Optimizer):
    def __init__(self, params):
        super().__init__(params, {})


def key(**changes):
    arguments = {
        "model": Net,
        "optimizer": partial(AdamW, lr=0.1),
        "train": SAMPLES,
        "batch_size": 4,
        "loss": functional.cross_entropy,
    }
    task = TrainTask(**(arguments | changes))
    module = task.model()
    groups = list(module.parameters()) if task.param_groups is None else task.param_groups(module)
    return fusion_key(task, module, task.optimizer(groups))


def step(module, batch):
    return functional.cross_entropy(module(batch[0]), batch[1])


def one_group_each(module):
    return [{"params": [p]} for p in module.parameters()]


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": partial(AdamW, lr=0.2, betas=(0.5, 0.5), weight_decay=0.3, eps=1e-3)},
        {"seed": 9, "epochs": 7, "batch_size": 3, "report_every": 2},
        {"scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=1)},
        {"validate": SAMPLES},
        {"max_grad_norm": 1.0},
        {"model": partial(Net, p=0.2)},
        {"model": partial(Net, p=0)},
        {"loss": functional.multi_margin_loss},
        {"evaluate": step},
    ],
)
def test_what_may_be_another_for_each_member_is_not_in_the_key(changes):
    assert key(**changes) == key()


@pytest.mark.parametrize(
    "changes",
    [
        {"model": partial(Net, 16)},
        {"loss": None, "step": step},
        {"optimizer": partial(Adam, lr=0.1)},
        {"param_groups": one_group_each},
        {"accumulate": 2},
        {"precision": "bfloat16"},
        {"precision": "float16"},
    ],
)
def test_what_must_be_one_for_all_is_in_the_key(changes):
    assert key(**changes) != key()


def test_a_users_own_optimizer_is_one_of_its_kind():
    assert key(optimizer=Odd) == key(optimizer=Odd, seed=9)
    assert key(optimizer=partial(AdamW, amsgrad=True)) != key(optimizer=partial(AdamW))


def test_nesterov_is_no_rate():
    assert key(optimizer=partial(SGD, lr=0.1, momentum=0.9)) != key(
        optimizer=partial(SGD, lr=0.1, momentum=0.9, nesterov=True)
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"split_batches": 2}, "split_batches=2"),
        ({"parallel": "pipeline", "accumulate": 2}, "parallel='pipeline'"),
        ({"split_operators": "1MiB"}, "split_operators"),
        ({"compile": "eager"}, "compile='eager'"),
    ],
)
def test_what_stays_out_is_told_why(changes, told):
    with pytest.raises(UnfusableError, match=told):
        key(**changes)


class Overlapping(nn.Module):
    """Two parameters on one storage, which stacked copies would not share."""

    def __init__(self):
        super().__init__()
        whole = torch.zeros(12)
        self.first, self.second = nn.Parameter(whole[:8].view(4, 2)), nn.Parameter(whole[4:])


def test_tensors_that_share_memory_stay_out():
    with pytest.raises(UnfusableError, match="'first' and 'second' of its model share memory"):
        key(model=Overlapping)
