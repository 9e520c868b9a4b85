"""Fused trials in mixed precision: each member trains as its plain loop, with a loss scale of its own."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, TensorDataset

from hydra_tune import HydraExecutor, TrainTask, train_plain
from hydra_tune.train.loop import gradient_rules
from hydra_tune.train.single_trial import SingleTrial
from tests.parity.registry import Spec, build
from tests.parity.test_fusion import fused
from tests.support.kernels import has_lstm_in
from tests.support.together import together
from tests.unit.fusion.groups import Run
from tests.unit.pool.fusion.test_fusion_checkpoints import stopped
from tests.unit.pool.tasks import PATIENCE_SECONDS, running

LOW = ("bfloat16", "float16")
_GENERATOR = torch.Generator().manual_seed(1)
X, Y = torch.randn(48, 8, generator=_GENERATOR), torch.randint(4, (48,), generator=_GENERATOR)
# A last bit in float32 turns a last bit of some product in float16. A step made or skipped wrongly turns all of them.
ONE_BIT = 2.0**-12


class Net(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.first, self.drop, self.head = nn.Linear(8, 16), nn.Dropout(p), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.drop(self.first(x).relu()))


def overflowing(module, batch):
    """A loss whose scaled gradients are infinite at some samples, whose inputs say by how much."""
    x, y, factor = batch
    return functional.cross_entropy(module(x), y) * factor.max()


def data(*steps, size=8):
    """Batches of the 48 samples, in order; at some of the batches the scaled loss overflows float32, and the loss does not."""
    factor = torch.ones(48)
    for step in steps:
        factor[size * step : size * (step + 1)] = 1e35
    return DataLoader(TensorDataset(X, Y, factor), size)


def task(precision="float16", **changes: Any) -> TrainTask:
    arguments = {
        "model": Net,
        "optimizer": partial(AdamW, lr=1e-2),
        "train": data(),
        "step": overflowing,
        "epochs": 3,
        "report_every": 1,
        "precision": precision,
    }
    return TrainTask(**(arguments | changes))


def scale_of(seat_or_trial):
    state = seat_or_trial._gradients.state()
    return None if state["scale"] is None else (state["scale"].item(), state["growth"].item())


def alone(task):
    """The trial in a pool that fuses nothing, with its loss scale at the end."""
    scales, close = [], SingleTrial.close

    def closed(trial, **options):
        scales.append(scale_of(trial))
        close(trial, **options)

    with pytest.MonkeyPatch.context() as patch, HydraExecutor(devices="cpu:1", device_memory="64MiB") as pool:
        patch.setattr(SingleTrial, "close", closed)
        result = pool.run([task])[0]
    assert result.error is None
    return result, scales[-1]


def assert_same(weights, history, other_weights, other_history, tolerance=ONE_BIT):
    assert [row["step"] for row in history] == [row["step"] for row in other_history]
    for own, other in zip(history, other_history, strict=True):
        for key in other.keys() - {"seconds", "step", "epoch"}:
            assert own[key] == pytest.approx(other[key], rel=tolerance)
    for name, tensor in other_weights.items():
        if tensor.is_floating_point():
            assert (weights[name] - tensor).abs().max() <= tolerance * tensor.abs().max().clamp(min=1e-2), name


def check(run, tasks, tolerance=ONE_BIT):
    for seat, own in zip(run.seats, tasks, strict=True):
        assert (seat.status, seat.error) == ("completed", None)
        unfused, scale = alone(own)
        weights = {name: tensor.detach() for name, tensor in seat.module.state_dict().items()}
        assert_same(weights, seat.member.history, unfused.state_dict(), unfused.history, tolerance)
        plain = train_plain(own)
        assert_same(weights, seat.member.history, plain.state_dict(), plain.history, tolerance)
        assert scale_of(seat.member) == scale
        assert (scale is None) == (own.precision != "float16")


@pytest.fixture
def growing(monkeypatch):
    """Loss scales that grow every three steps, here and in torch's scaler."""
    monkeypatch.setattr(gradient_rules, "_GROWTH_INTERVAL", 3)
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, growth_interval=3))


VARIANTS = [
    {},
    {"report_every": 6},  # several steps in a unit
    {"accumulate": 2},
    {"max_grad_norm": 0.05},
    {"accumulate": 2, "max_grad_norm": 0.05},
    {"optimizer": partial(SGD, lr=0.05, momentum=0.9)},
    {
        "optimizer": partial(SGD, lr=0.05, momentum=0.9),
        "scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=1),
    },
]


@pytest.mark.cases(3)
@pytest.mark.usefixtures("growing")
@pytest.mark.parametrize("num_shards", [None, 2])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(v) or "plain")
@pytest.mark.parametrize("precision", LOW)
def test_members_skip_their_own_steps_and_keep_their_own_scales(precision, variant, num_shards):
    """Members that overflow at the first step, later, twice, and never."""
    bad = [(0,), (3,), (1, 4), ()] if precision == "float16" else [()] * 3
    tasks = [
        task(precision, train=data(*steps), seed=seed, validate=data(), epochs=3 - (seed == 1), **variant)
        for seed, steps in enumerate(bad)
    ]
    run = Run(tasks, num_shards=num_shards)
    check(run, tasks)
    if precision == "float16":
        assert len({scale_of(seat.member) for seat in run.seats}) > 1


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize("precision", LOW)
def test_members_that_differ_in_all_that_they_may(precision):
    options = [
        {"model": partial(Net, 0.1), "optimizer": partial(AdamW, lr=1e-2)},
        {"model": partial(Net, 0.4), "optimizer": partial(AdamW, lr=3e-3, weight_decay=0.1), "train": data(size=6)},
        {
            "model": partial(Net, 0.0),
            "optimizer": partial(AdamW, lr=1e-3),
            "train": data(size=16),
            "max_grad_norm": 0.1,
        },
    ]
    tasks = [task(precision, seed=seed, validate=data(), **own) for seed, own in enumerate(options)]
    check(Run(tasks), tasks)


def mean_of_low_precision(module, batch):
    return (module(batch[0]) - batch[1][:, None]).square().mean() * 0.1


def squares(outputs, target):
    return functional.mse_loss(outputs.mean(1), target * 0.1)


@pytest.mark.cases(1)
@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("loss", [functional.cross_entropy, squares, None], ids=["classes", "squares", "mean"])
def test_smaller_batches_are_padded(precision, loss):
    own = {"loss": loss, "step": None} if loss else {"step": mean_of_low_precision}
    tasks = [
        task(precision, seed=seed, train=TensorDataset(X, Y), batch_size=size, **own)
        for seed, size in enumerate((8, 6, 16))
    ]
    run = Run(tasks)
    assert any(is_padded for _, is_padded in run.trial._places.stacked)
    check(run, tasks, ONE_BIT if precision == "float16" else 2.0**-8)


@pytest.mark.cases(1)
@pytest.mark.parametrize("precision", LOW)
def test_members_with_losses_of_their_own(precision):
    losses = (functional.cross_entropy, partial(functional.cross_entropy, label_smoothing=0.1), squares)
    tasks = [
        task(precision, seed=seed, train=TensorDataset(X, Y), batch_size=8, step=None, loss=loss)
        for seed, loss in enumerate(losses)
    ]
    run = Run(tasks)
    assert run.sizes[0] == len(losses)
    check(run, tasks)


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.LSTM(4, 8, 2, batch_first=True), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.layers(x.view(-1, 2, 4))[0][:, -1])


class WithRegion(Net):
    """A model with a region in a precision of its own."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        hidden = self.first(x).relu()
        with torch.autocast("cpu", dtype=self.dtype):
            mixed = hidden @ hidden.T
        return self.head(mixed @ hidden * 0.1)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("precision", "model"),
    [
        pytest.param(  # without dropout, for which no LSTM is traced
            "bfloat16",
            Sequence,
            marks=pytest.mark.skipif(not has_lstm_in("bfloat16"), reason="plain PyTorch fails too"),
        ),
        *((precision, partial(WithRegion, getattr(torch, other))) for precision in LOW for other in LOW),
    ],
    ids=["lstm", *(f"{other} in {precision}" for precision in LOW for other in LOW)],
)
def test_kernels_and_regions_of_their_own_do_not_part_members(precision, model):
    tasks = [
        task(precision, seed=seed, model=model, optimizer=partial(SGD, lr=1e-2), validate=data()) for seed in range(3)
    ]
    run = Run(tasks)
    assert run.sizes[0] == len(tasks)
    check(run, tasks, 2.0**-6)


@pytest.mark.usefixtures("growing")
def test_a_member_takes_its_scale_along_when_it_leaves_and_comes_back():
    tasks = [task(train=data(step), seed=seed, epochs=3) for seed, step in enumerate((0, 2, 5))]

    def before(run, _unit):
        if len(run.units) == 5:
            run.seats[0].is_paused = True

    run = Run(tasks, before=before, back=9)
    check(run, tasks)


@pytest.mark.usefixtures("growing")
def test_a_member_that_joins_brings_its_own_scale():
    tasks = [task(train=data(0, 1, 2), seed=0, epochs=3), task(seed=1, epochs=1), task(train=data(4), seed=2, epochs=2)]
    run = Run(tasks[:2], later=[(3, tasks[2])])
    check(run, tasks)


@pytest.mark.cases(1)
@pytest.mark.usefixtures("growing")
@pytest.mark.parametrize(("first", "then"), [("on", "on"), ("on", "off"), ("off", "on")])
def test_a_search_that_was_stopped_goes_on_with_its_scales_fused_or_not(tmp_path, monkeypatch, first, then):
    made = [{"train": data(step), "seed": seed} for seed, step in enumerate((0, 2, 5))]
    tasks = [task(validate=data(), epochs=4, report_every=2, **own) for own in made]
    stopped(tmp_path, tasks, epochs=2, fusion=first)
    scales, close = {}, SingleTrial.close

    def closed(trial, **options):
        scales[trial.task.seed] = scale_of(trial)
        close(trial, **options)

    monkeypatch.setattr(SingleTrial, "close", closed)
    with running(checkpoint_dir=tmp_path, fusion=then) as pool:
        found = [pool.find_checkpoint(f"trial {number}") for number in range(len(tasks))]
        assert all(0 < one.steps < 24 for one in found)
        with together():
            jobs = [pool.submit(one, f"trial {n}", resume_from=found[n].path) for n, one in enumerate(tasks)]
        results = [job.result(PATIENCE_SECONDS) for job in jobs]
    resumed = dict(scales)
    assert {result.group_size for result in results} == {3 if then == "on" else 1}
    for result, own in zip(results, tasks, strict=True):
        unfused, scale = alone(own)
        assert_same(result.state_dict(), result.history, unfused.state_dict(), unfused.history)
        assert resumed[own.seed] == scale


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("name", ["cnn", "gpt2", "hf_bert"])
def test_models_train_as_their_plain_loops_within_the_precisions_rounding(name, precision, caplog):
    """A step's rounding is compared in `test_stacked_autocast.py`; here training goes the same way through the pool."""
    tasks = [
        replace(build(Spec(name, "evaluation", "sgd", seed)), precision=precision, optimizer=partial(SGD, lr=rate))
        for seed, rate in ((5, 3e-3), (11, 1e-3))
    ]
    results, reasons, is_fused = fused(tasks, caplog)
    assert is_fused, reasons
    for result, own in zip(results, tasks, strict=True):
        plain, wide = train_plain(own), train_plain(replace(own, precision="float32"))
        for rows in zip(result.history, plain.history, wide.history, strict=True):
            here, there, exact = (row["train_loss"] for row in rows)
            assert abs(here - exact) <= 2 * abs(there - exact) + 1e-3 * abs(exact)
