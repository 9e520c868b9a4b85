"""`loss_weight=` gives a step the sum of its batches' weights, as in a loop by hand; `remainder=` divides its last losses."""

import logging
import re
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hydra_tune import HydraExecutor, Reported, TrainTask, train_plain
from hydra_tune.errors import TaskError
from hydra_tune.pool.job import OVER
from hydra_tune.shard.partition import trial_step
from tests.support.gathered import gather

PATIENCE_SECONDS = 60
WIDTH, WORDS, BATCHES = 64, 12, 7
WAYS = {
    "own code": {},
    "own code, spilled": {"device_memory": "250KiB"},
    "cut after its first step": {"device_memory": "140KiB"},
    "cut in 2": {"num_shards": 2},
    "cut in 3": {"num_shards": 3},
    "cut, spilled": {"num_shards": 3, "device_memory": "130KiB"},
}


def net():
    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers, nn.Linear(WIDTH, WORDS))


def padded(lengths, size, generator):
    words = torch.randint(WORDS, (len(lengths), size), generator=generator)
    labels = words.roll(-1, 1)
    for row, length in zip(labels, lengths, strict=True):
        row[length:] = -100
    return {"words": words, "labels": labels}


def batches():
    """Padded to two sizes; the last step of an epoch has a single batch."""
    generator = torch.Generator().manual_seed(0)
    for number in range(BATCHES):
        size = 5 if number == 1 else 6
        yield padded([1 + (number + row) % size for row in range(4)], size, generator)


def tokens(batch):
    return (batch["labels"] != -100).sum()


def share(batch):
    return np.float64(tokens(batch).item() / 7)


def token_loss(module, batch, total):
    scores = module(batch["words"])
    return functional.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten(), reduction="sum") / total


def sample_mean(module, batch):
    return functional.cross_entropy(module(batch["words"]).flatten(0, 1), batch["labels"].flatten())


def task(seed=0, **changes):
    arguments = {
        "model": net,
        "optimizer": partial(torch.optim.AdamW, lr=0.01),
        "step": token_loss,
        "loss_weight": tokens,
        "accumulate": 3,
        "train": batches,
        "validate": batches,
        "epochs": 2,
        "seed": seed,
    }
    return TrainTask(**(arguments | changes))


def by_hand(described):
    """What anyone would write, with plain numbers."""
    torch.manual_seed(described.seed)
    module = net()
    optimizer, weigh = described.optimizer(module.parameters()), described.loss_weight
    for _ in range(described.epochs):
        module.train()
        drawn, losses = list(batches()), []
        for begin in range(0, len(drawn), described.accumulate):
            window = drawn[begin : begin + described.accumulate]
            losses.append(0.0)
            if weigh is None:
                is_rest = described.remainder == "divide_by_rest"
                divisor = len(window) if is_rest else described.accumulate
            else:
                total = sum(weigh(batch).item() for batch in window)
            for batch in window:
                loss = sample_mean(module, batch) if weigh is None else token_loss(module, batch, total)
                (loss / divisor if weigh is None else loss).backward()
                losses[-1] += loss.item()
            if described.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(module.parameters(), described.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        module.eval()
        with torch.no_grad():
            evaluated = [
                (sample_mean(module, batch) if weigh is None else token_loss(module, batch, weigh(batch).item())).item()
                for batch in batches()
            ]
    count = len(drawn) if weigh is None else len(losses)
    return module.state_dict(), sum(losses) / count, sum(evaluated) / len(evaluated)


def assert_same(result, described, close=torch.equal, *, metrics=True):
    state, loss, val_loss = by_hand(described)
    assert [name for name, tensor in result.state_dict().items() if not close(tensor, state[name])] == []
    if not metrics:
        return
    assert result.metrics["train_loss"] == pytest.approx(loss, rel=1e-12 if close is torch.equal else 1e-5)
    assert result.metrics["val_loss"] == pytest.approx(val_loss, rel=1e-12 if close is torch.equal else 1e-5)


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", WAYS)
def test_the_bits_are_those_of_a_loop_by_hand(way):
    tasks = [task(), task(1, max_grad_norm=0.5)]
    with HydraExecutor("cpu:1", max_concurrent=2, **WAYS[way]) as pool:
        results = pool.run(tasks)
    for result, described in zip(results, tasks, strict=True):
        assert_same(result, described)
        assert (result.num_shards > 1) == way.startswith("cut")


@pytest.mark.parametrize("way", ["own code", "cut in 2"])
def test_weights_may_be_fractions(way):
    with HydraExecutor("cpu:1", **WAYS[way]) as pool:
        (result,) = pool.run([task(loss_weight=share)])
    assert_same(result, task(loss_weight=share))


@pytest.mark.parametrize("changes", [{}, {"loss_weight": share}], ids=["tokens", "fractions"])
def test_the_plain_loop_weighs_too(changes):
    assert_same(train_plain(task(**changes)), task(**changes))


def test_a_new_sum_is_no_reason_for_a_new_capture(monkeypatch):
    captures = []
    capture = trial_step.capture
    monkeypatch.setattr(trial_step, "capture", lambda *given, **more: captures.append(1) or capture(*given, **more))
    with HydraExecutor("cpu:1", **WAYS["cut in 2"]) as pool:
        (result,) = pool.run([task()])
    assert_same(result, task())
    assert len(captures) == 4  # two sizes of batches, to train and to evaluate


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "changes",
    [{}, {"step": sample_mean, "loss_weight": None, "remainder": "divide_by_rest"}],
    ids=["weighed", "divided by the rest"],
)
@pytest.mark.parametrize("way", ["own code", "cut in 2"])
def test_a_resumed_trial_goes_on_with_the_next_step(way, changes, tmp_path):
    described = task(report_every=2, **changes)
    with HydraExecutor("cpu:1", checkpoint_dir=tmp_path, **WAYS[way]) as pool:
        events = pool.events()
        job = pool.submit(described, "trial", events)
        while job.state not in OVER:
            event = events.get(PATIENCE_SECONDS)
            if isinstance(event, Reported):
                # Two steps of the first epoch's three are over.
                pool.suspend([job])
                break
            event.job.proceed()
    with HydraExecutor("cpu:1", checkpoint_dir=tmp_path, **WAYS[way]) as pool:
        path = pool.find_checkpoint("trial").path
        result = pool.submit(described, "trial", resume_from=path).result(PATIENCE_SECONDS)
    assert_same(result, described, metrics=False)
    assert result.metrics == train_plain(described).metrics


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "validation",
    [{}, {"evaluate": lambda module, batch: {"loss": sample_mean(module, batch)}}],
    ids=["weighed validation", "own validation"],
)
def test_fused_trials_are_weighed_each_by_itself(validation, monkeypatch, caplog):
    gather(monkeypatch, lambda count: count >= 3)
    tasks = [task(seed, optimizer=partial(torch.optim.SGD, lr=0.1 + seed / 10), **validation) for seed in range(3)]
    with HydraExecutor("cpu:1", fusion="on") as pool, caplog.at_level(logging.INFO, "hydra_tune.fusion"):
        results = pool.run(tasks)
    assert "trials are fused" in caplog.text, caplog.text
    for result, described in zip(results, tasks, strict=True):
        assert_same(result, described, close=partial(torch.allclose, rtol=1e-4, atol=1e-6), metrics=not validation)


@pytest.mark.cases(1)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_fused_trials_of_a_dataset_are_weighed_too(accumulate, monkeypatch, caplog):
    """Their batches would be gathered for all members at once."""
    generator = torch.Generator().manual_seed(1)
    drawn = [padded([1, 4, 6, 2], 6, generator) for _ in range(3)]
    data = TensorDataset(*(torch.cat([batch[name] for batch in drawn]) for name in ("words", "labels")))
    arguments = {
        "step": lambda module, batch, total: token_loss(
            module, dict(zip(("words", "labels"), batch, strict=True)), total
        ),
        "loss_weight": lambda batch: tokens({"labels": batch[1]}),
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "train": data,
        "validate": data,
        "batch_size": 4,
        "accumulate": accumulate,
    }
    tasks = [task(seed, **arguments) for seed in range(2)]
    gather(monkeypatch, lambda count: count >= 2)
    with HydraExecutor("cpu:1", fusion="on") as pool, caplog.at_level(logging.INFO, "hydra_tune.fusion"):
        results = pool.run(tasks)
    assert "trials are fused" in caplog.text
    for result, described in zip(results, tasks, strict=True):
        expected = train_plain(described)
        assert result.metrics == pytest.approx(expected.metrics, rel=1e-5)
        state = expected.state_dict()
        assert all(torch.allclose(value, state[name], atol=1e-6) for name, value in result.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["data", "pipeline"])
def test_the_batches_of_a_step_may_run_side_by_side(parallel):
    described = task(parallel=parallel, epochs=4)
    with HydraExecutor("cpu:2", num_shards=2) as pool:
        (result,) = pool.run([described])
        assert sum(pool.stats().steps_by_way.values()) > 2
    assert_same(result, described)


WRONG = [
    (
        {"step": None, "loss": functional.cross_entropy},
        "loss= does not take it; give step= instead, e.g. step=lambda module",
    ),
    ({"split_batches": 2}, "draw smaller batches with a larger accumulate="),
    ({"split_batches": "auto"}, "draw smaller batches with a larger accumulate="),
    ({"loss_weight": 3}, "loss_weight must be callable, not 3"),
    ({"remainder": "divide_by_rests"}, "did you mean 'divide_by_rest'?"),
]


@pytest.mark.parametrize(("changes", "told"), WRONG, ids=[told for _, told in WRONG])
def test_what_cannot_be_weighed_is_refused_by_name(changes, told):
    with pytest.raises(TaskError, match=re.escape(told)):
        task(**changes)


@pytest.mark.parametrize("weight", [None, "4", torch.ones(2)], ids=str)
def test_a_weight_that_is_no_number_is_refused(weight):
    described = task(loss_weight=lambda batch: weight)
    with pytest.raises(TaskError, match="loss_weight= must return a number"):
        train_plain(described)
    with HydraExecutor("cpu:1") as pool:
        (result,) = pool.run([described], on_error="return")
    assert "loss_weight= must return a number" in str(result.error)


@pytest.mark.parametrize("remainder", ["divide_by_accumulate", "divide_by_rest"])
@pytest.mark.parametrize("way", ["own code", "cut in 2", "plain loop"])
def test_the_losses_of_the_last_step_are_divided_as_asked(way, remainder):
    described = task(step=sample_mean, loss_weight=None, remainder=remainder)
    if way == "plain loop":
        result = train_plain(described)
    else:
        with HydraExecutor("cpu:1", **WAYS[way]) as pool:
            (result,) = pool.run([described])
    assert_same(result, described)


def test_trials_with_another_last_divisor_are_not_fused(monkeypatch, caplog):
    gather(monkeypatch, lambda count: count >= 2)
    tasks = [task(seed, step=sample_mean, loss_weight=None, remainder="divide_by_rest") for seed in range(2)]
    with HydraExecutor("cpu:1", fusion="on") as pool, caplog.at_level(logging.INFO, "hydra_tune.fusion"):
        results = pool.run(tasks)
    for result, described in zip(results, tasks, strict=True):
        assert_same(result, described)
    assert "it has remainder='divide_by_rest'" in caplog.text


def test_an_isolated_pool_weighs_too():
    with HydraExecutor("cpu:1", isolate=True) as pool:
        (result,) = pool.run([task()])
    assert_same(result, task())
