"""Batches of one step that go through each shard together give the bits of the plain loop, and load each shard less often."""

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from hydra_tune import Result, TrainTask
from hydra_tune.train.parallel import batch_grouping
from tests.parity import models
from tests.parity.test_splitting import (
    Noise,
    Tied,
    Whole,
    accumulating,
    bad,
    broken_in,
    drawing,
    noisy,
    normed,
    reusing,
)
from tests.unit.pool.tasks import SAMPLES, against_plain, running

pytestmark = pytest.mark.usefixtures("captured_once")


class Shared(nn.Module):
    """One BatchNorm in two places: wherever it is cut, a batch may see what another one has made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.second(torch.relu(self.norm(self.first(x))))))


class Frozen(nn.Module):
    """The first layers are not trained, and one parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = noisy()
        self.unused = nn.Parameter(torch.zeros(3))
        for parameter in self.layers[0].parameters():
            parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


GROUPED = {
    "adamw": accumulating,
    "dropout": partial(accumulating, model=noisy),
    "normed": partial(accumulating, model=normed),
    "shared norm": partial(accumulating, model=Shared),
    "frozen": partial(accumulating, model=Frozen),
    "clipped": partial(accumulating, model=noisy, max_grad_norm=0.1),
    "float16": partial(accumulating, precision="float16"),
    "bfloat16 clipped": partial(accumulating, model=noisy, precision="bfloat16", max_grad_norm=0.1),
    "left over": partial(accumulating, accumulate=3, model=noisy),
    "pieces": partial(accumulating, accumulate=1, split_batches=3, model=noisy, report_every=2),
    "pieces of several batches": partial(accumulating, accumulate=2, split_batches=2, model=noisy, max_grad_norm=0.1),
    "memory that is used again": partial(accumulating, model=noisy, train=reusing, accumulate=3),
    "data that draws": partial(accumulating, model=noisy, train=drawing, accumulate=3),
    "validated": partial(accumulating, model=noisy, validate=SAMPLES),
    "noise": partial(accumulating, model=Noise),
    "tied": partial(accumulating, model=Tied),
    "gpt2": partial(models.build, "gpt2", accumulate=3, epochs=3),
    "convolutions": partial(models.build, "cnn", accumulate=4, epochs=3),
    "native dropout": partial(models.build, "mlp_native", accumulate=4, epochs=2, report_every="epoch"),
}
IN_ORDER = {"shared norm", "noise", "native dropout"}


def run(described: TrainTask, **options: Any) -> tuple[Result, list[tuple[str, int]], Any]:
    """Train alone on one device; the result, the units as they ran, and the device's figures."""
    with running(devices="cpu:1", record=True, **options) as pool:
        result = pool.submit(described).result(60.0)
        (device,) = pool.stats().devices.values()
        units = [(unit.kind, unit.shard) for turn in pool.recording().turns for unit in turn.units]
    return result, units, device


def is_grouped(units: list[tuple[str, int]]) -> bool:
    """Whether a shard's forward ran twice in a row."""
    return any(a == b and a[0] == "forward" for a, b in pairwise(units))


# Of others there is one with more to it, or they take seconds to capture.
OF_OTHERS = {"adamw", "clipped", "left over", "pieces", "gpt2", "convolutions", "native dropout"}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "cut"),
    [
        pytest.param(name, cut, marks=[pytest.mark.slow] * (name in OF_OTHERS or (cut == 2 and name != "dropout")))
        for name in GROUPED
        for cut in (2, 3)
    ],
)
def test_a_trial_whose_batches_go_through_shards_together_is_bitwise(name, cut, monkeypatch):
    monkeypatch.setattr(batch_grouping, "is_worth_it", lambda plan: len(plan.shards) > 1)
    described = GROUPED[name]()
    result, units, _ = run(described, num_shards=cut)
    assert against_plain(described, result) == []
    assert is_grouped(units) == (name not in IN_ORDER)


@pytest.mark.cases(1 / 3)
def test_batches_whose_values_are_larger_than_the_model_run_in_order():
    described = models.build("cnn", accumulate=4, epochs=1)
    _, units, _ = run(described, num_shards=2)
    assert not is_grouped(units)


def test_what_runs_whole_runs_in_order():
    described = accumulating(model=Whole)
    result, units, _ = run(described)
    assert against_plain(described, result) == []
    assert not is_grouped(units)


def test_no_batch_is_kept_that_the_host_has_no_room_for():
    described = accumulating()
    result, units, _ = run(described, num_shards=2, host_memory="17KiB")
    assert against_plain(described, result) == []
    assert not is_grouped(units)


@pytest.mark.parametrize("batch", [pytest.param(0, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_bad_loss_in_a_group_ends_the_trial_where_a_plain_loop_ends_it(batch):
    described = accumulating(train=broken_in(2, batch, bad(float("nan"))), on_bad_loss="fail")
    result, units, _ = run(described, num_shards=2)
    assert "the training loss is nan in step 3 (epoch 2)" in str(result.error)
    assert is_grouped(units)
