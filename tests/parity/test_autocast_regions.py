"""Steps that enter `torch.autocast` themselves: cut bit for bit, and fused with the bits of `precision=`."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hydra_tune import HydraExecutor, TrainTask
from tests.parity.exact import differences, without_seconds
from tests.parity.observe import watched_ways
from tests.parity.own_functions import StraightThrough
from tests.parity.test_fusion import fused
from tests.unit.pool.tasks import SAMPLES, X, Y, against_plain, task, train

BATCHES = [(X[:8], Y[:8])] * 3
REGION = partial(torch.autocast, "cpu", dtype=torch.bfloat16)


class Net(nn.Module):
    """Uses a layer twice, which a region casts once, and leaves autocast for another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.single, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.single(self.drop(self.twice(self.twice(x).relu()))).relu()
        with torch.autocast("cpu", enabled=False):
            h = functional.linear(h.float(), self.single.weight)
        return self.head(h)


class Simple(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def all_of_it(module: nn.Module, batch: Any) -> Tensor:
    with REGION():
        return functional.cross_entropy(module(batch[0]), batch[1])


@torch.autocast("cpu", dtype=torch.bfloat16)
def decorated(module: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(module(batch[0]), batch[1])


def divided(module: nn.Module, batch: Any) -> Tensor:
    return all_of_it(module, batch) / 2


def loss_in_float32(module: nn.Module, batch: Any) -> Tensor:
    with REGION():
        logits = module(batch[0])
    return functional.cross_entropy(logits.float(), batch[1])


def loss_outside(module: nn.Module, batch: Any) -> Tensor:
    """Computes in bfloat16, which no loss inside a region does."""
    with REGION():
        logits = module(batch[0])
    return functional.cross_entropy(logits, batch[1]) + functional.linear(batch[0], torch.ones(1, 8)).mean()


def two_regions(module: nn.Module, batch: Any) -> Tensor:
    """Casts each parameter twice."""
    with REGION():
        first = module(batch[0])
    with REGION():
        second = module(batch[0].flip(1))
    return functional.cross_entropy(first.float(), batch[1]) + functional.mse_loss(second.float(), first.float())


def own_function_outside(module: nn.Module, batch: Any) -> Tensor:
    with REGION():
        logits = module(batch[0])
    return functional.cross_entropy(StraightThrough.apply(logits.float()), batch[1])


def in_float16(module: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        return functional.cross_entropy(module(batch[0]), batch[1])


def cross_entropy(module: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(module(batch[0]), batch[1])


MERGED = (all_of_it, decorated, divided, loss_in_float32, loss_outside)


def shards_of(step: Any, model: Any, shards: int, **changes: Any) -> dict[str, int]:
    """Into how many shards the steps of a trial were cut, whose numbers are the plain loop's."""
    evaluate = lambda module, batch: {"loss": step(module, batch)}  # noqa: E731
    described = task(model=model, step=step, loss=None, evaluate=evaluate, validate=SAMPLES, report_every=1, **changes)
    with watched_ways() as ways:
        result = train(described, devices="cpu:2", num_shards=shards)
    assert against_plain(described, result) == []
    return dict(ways[id(described)].shards)


def two_trials(step: Any, **changes: Any) -> list[TrainTask]:
    changes |= {"model": Simple, "step": step, "loss": None, "train": lambda: BATCHES, "report_every": 1}
    return [task(seed=seed, **changes) for seed in (1, 2)]


@pytest.mark.cases(5)
@pytest.mark.parametrize("model", [Net, Simple])
@pytest.mark.parametrize("step", MERGED)
def test_a_step_with_a_region_is_cut(step, model):
    shards = shards_of(step, model, 3)
    assert shards["train"] == 3
    assert shards["evaluate"] > 1


@pytest.mark.parametrize("changes", [{"accumulate": 2}, {"activations": "keep"}, {"activations": "recompute"}], ids=str)
def test_a_step_with_a_region_is_cut_in_every_way(changes):
    assert shards_of(all_of_it, Net, 3, **changes)["train"] == 3


@pytest.mark.parametrize("step", [two_regions, own_function_outside, in_float16])
def test_other_regions_stay_one_operator(step):
    assert shards_of(step, Simple, 1)["train"] == 1


@pytest.mark.parametrize("step", MERGED)
def test_trials_with_a_region_are_fused(step, caplog):
    results, reasons, is_fused = fused(two_trials(step), caplog)
    assert is_fused, reasons
    assert [result.error for result in results] == [None, None]


@pytest.mark.parametrize("step", [all_of_it, decorated, loss_in_float32])
def test_fused_a_region_has_the_bits_of_the_precision(step, caplog):
    with_region, _, _ = fused(two_trials(step), caplog)
    with_precision, _, _ = fused(two_trials(cross_entropy, precision="bfloat16"), caplog)
    for one, other in zip(with_region, with_precision, strict=True):
        assert without_seconds(one.history) == without_seconds(other.history)
        assert list(differences(one.state_dict(), other.state_dict())) == []


class Deep(nn.Module):
    """Uses one layer many times, which a region casts once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(12):
            x = self.layer(x).relu()
        return self.head(x)


@pytest.mark.parametrize("changes", [{}, {"precision": "bfloat16"}], ids=str)
def test_regions_of_two_devices_leave_each_others_casts(changes):
    """Trials that fit run their own code, in which torch has a single cache of casts for all threads."""
    step = cross_entropy if changes else all_of_it
    others = {"model": Deep, "loss": None, "train": lambda: BATCHES * 30, "epochs": 1, **changes}
    described = [task(step=step, seed=seed, **others) for seed in range(4)]
    with HydraExecutor(devices="cpu:2") as pool:
        results = pool.run(described)
    for one, result in zip(described, results, strict=True):
        assert against_plain(one, result) == []
