"""Metrics that `finish=` computes from the values of all validation batches: those of the plain loop, in all ways to train."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hydra_tune import HydraExecutor, TrainTask, train_plain
from hydra_tune.errors import BudgetError, MetricError, TaskError

_GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(100, 8, generator=_GENERATOR)
Y = (X[:, 0] + 0.5 * torch.randn(100, generator=_GENERATOR) > 0).long()
PATIENCE_SECONDS = 60
WAYS = {
    "own code": {},
    "one shard": {"num_shards": 1},
    "cut": {"num_shards": 3},
    "cut and spilled": {"num_shards": 3, "device_memory": "40KiB"},
    "fused": {"fusion": "on"},
    "fused and cut": {"fusion": "on", "num_shards": 2},
}


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))


def evaluate(module, batch):
    x, y = batch
    outputs = module(x)
    return {"score": outputs[:, 1] - outputs[:, 0], "y": y, "loss": functional.cross_entropy(outputs, y), "n": len(y)}


def finish(collected):
    score, y = collected["score"], collected["y"]
    pairs = score[y == 1][:, None] - score[y == 0]
    chosen = score > 0
    right = (chosen & (y == 1)).sum()
    return {
        "auc": (pairs > 0).double().mean(),
        "f1": 2 * right.item() / (chosen.sum() + y.sum()).item(),
        "val_perplexity": (collected["loss"] @ collected["n"].float() / collected["n"].sum()).exp(),
        "samples": len(y),
        "batches": collected["n"].numel(),
    }


def task(seed=0, size=33, **changes):
    arguments = {
        "model": net,
        "optimizer": partial(torch.optim.AdamW, lr=1e-2 / (seed + 1)),
        "train": TensorDataset(X[:64], Y[:64]),
        "validate": TensorDataset(X[64 : 64 + size], Y[64 : 64 + size]),
        "batch_size": 8,
        "loss": functional.cross_entropy,
        "evaluate": evaluate,
        "finish": finish,
        "metric": "val_auc",
        "epochs": 3,
        "seed": seed,
    }
    return TrainTask(**(arguments | changes))


def metrics_of(history):
    return [{name: value for name, value in report.items() if name != "seconds"} for report in history]


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", WAYS)
def test_metrics_of_the_whole_set_are_those_of_the_plain_loop(way):
    """The last batch is smaller than the others; fused trials have validation sets of several sizes."""
    sizes = [33, 33, 20, 29] if "fused" in way else [33, 33]
    tasks = [task(seed, size) for seed, size in enumerate(sizes)]
    with HydraExecutor(devices="cpu:1", **WAYS[way]) as pool:
        results = pool.run(tasks)
    for result, described in zip(results, tasks, strict=True):
        assert result.error is None
        assert result.group_size == (4 if "fused" in way else 1)
        expected = metrics_of(train_plain(described).history)
        if "fused" in way:
            for mine, plain in zip(metrics_of(result.history), expected, strict=True):
                assert mine == pytest.approx(plain, rel=1e-5)
        else:
            assert metrics_of(result.history) == expected
        assert result.metrics["val_samples"] == len(described.validate)


def test_a_validation_batch_of_one_sample_keeps_its_dimension():
    with HydraExecutor(devices="cpu:1", num_shards=2) as pool:
        (result,) = pool.run([task(size=17)])
    assert result.metrics["val_samples"] == 17
    assert metrics_of(result.history) == metrics_of(train_plain(task(size=17)).history)


def test_trials_that_collect_other_values_are_not_fused():
    def other(module, batch):
        return evaluate(module, batch) | {"score": module(batch[0])[:, 1]}

    tasks = [task(0), task(1, evaluate=other), task(2, evaluate=lambda *given: {"auc": 0.5}, finish=None)]
    with HydraExecutor(devices="cpu:1", fusion="on") as pool:
        results = pool.run(tasks)
    for result, described in zip(results, tasks, strict=True):
        assert (result.group_size, result.error) == (1, None)
        assert metrics_of(result.history) == metrics_of(train_plain(described).history)


def test_random_numbers_drawn_by_finish_are_the_trials_own():
    def drawing(collected):
        return {"auc": torch.rand(()) + collected["y"].sum()}

    described = [task(seed, finish=drawing) for seed in range(2)]
    for options in ({}, {"num_shards": 2}):
        with HydraExecutor(devices="cpu:1", **options) as pool:
            results = pool.run(described)
        for result, one in zip(results, described, strict=True):
            assert metrics_of(result.history) == metrics_of(train_plain(one).history)


@pytest.mark.cases(2)
@pytest.mark.parametrize("way", ["own code", "cut", "fused"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"finish": lambda collected: 1.0}, "finish= must return {name: scalar}, not float"),
        ({"finish": lambda collected: {"auc": collected["y"]}}, "'auc' is Tensor"),
        ({"finish": lambda collected: {"auc": "high"}}, "'auc' is str"),
        ({"finish": lambda collected: {"f1": 1.0}}, "metric 'val_auc' is not reported"),
        ({"evaluate": lambda module, batch: {"score": [1, 2]}}, "'score' as list; with finish=, values are tensors"),
        ({"evaluate": lambda module, batch: module(batch[0])}, "evaluate= must return"),
        ({"evaluate": lambda module, batch: {"all": batch[0].T @ batch[0][:, : len(batch[0]) // 2]}}, "cannot be conc"),
    ],
)
def test_wrong_values_are_named(way, changes, message):
    with HydraExecutor(devices="cpu:1", **WAYS[way]) as pool:
        jobs = [pool.submit(task(seed, **changes)) for seed in range(2)]
        errors = [job.result(PATIENCE_SECONDS).error for job in jobs]
    for error in errors:
        assert isinstance(error, MetricError)
        assert message in str(error)
    with pytest.raises(MetricError) as raised:
        train_plain(task(**changes))
    assert message in str(raised.value)


def test_finish_needs_evaluate():
    with pytest.raises(TaskError, match="there is no evaluate="):
        task(evaluate=None)


@pytest.mark.parametrize("options", [{}, {"num_shards": 2}])
def test_collected_values_count_as_host_memory(tmp_path, options):
    """Each batch adds 4 MiB, beside a trial of a few kilobytes."""

    def large(module, batch):
        return evaluate(module, batch) | {"large": torch.zeros(1 << 20)}

    options |= {"host_memory": "18MiB", "spill_dir": tmp_path}
    with HydraExecutor(devices="cpu:1", max_concurrent=1, **options) as pool:
        jobs = [pool.submit(task(evaluate=large, size=size)) for size in (16, 36, 32)]
        errors = [job.result(PATIENCE_SECONDS).error for job in jobs]
    assert (errors[0], errors[2]) == (None, None)
    assert isinstance(errors[1], BudgetError)
    assert "return less from evaluate=" in str(errors[1])
