"""Trials that `stop=` ends: complete, with the reports and weights of a plain loop that ends there."""

import multiprocessing
import shutil
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from hydra_tune import HydraExecutor, Reported, TrainTask, train_plain
from hydra_tune.train.checkpoint.trial_checkpoint import StartCheckpoint
from tests.parity.exact import without_seconds
from tests.support.checkpointed import Collector, library, run

PATIENCE_SECONDS = 60
_GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(48, 8, generator=_GENERATOR)
Y = torch.randint(2, (48,), generator=_GENERATOR)
DATA = TensorDataset(X, Y)
WAYS = {"own code": {}, "cut": {"num_shards": 2}, "fused": {"fusion": "on"}}


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))


def after(count, history):
    return len(history) >= count


def task(seed=0, count=3, **changes):
    arguments = {
        "model": net,
        "optimizer": partial(torch.optim.AdamW, lr=1e-2),
        "scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=1),
        "train": DATA,
        "validate": DATA,
        "batch_size": 8,
        "loss": functional.cross_entropy,
        "epochs": 9,
        "stop": partial(after, count),
        "seed": seed,
    }
    return TrainTask(**(arguments | changes))


def assert_as_plain(result, described, *, is_exact=True):
    plain = train_plain(described)
    assert (result.status, result.error, plain.status) == ("completed", None, "completed")
    mine, expected = without_seconds(result.history), without_seconds(plain.history)
    assert [report.keys() for report in mine] == [report.keys() for report in expected]
    tolerance = {"rtol": 0, "atol": 0} if is_exact else {"rtol": 1e-4, "atol": 1e-5}
    for report, other in zip(mine, expected, strict=True):
        torch.testing.assert_close(report, other, **tolerance)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(result.state_dict()[name], tensor, **tolerance)
    own, other = result.optimizer_state_dict(), plain.optimizer_state_dict()
    assert own["param_groups"] == other["param_groups"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("changes", [{}, {"report_every": 2}, {"accumulate": 4, "report_every": 1}])
def test_a_trial_that_stops_is_complete(way, changes):
    """At other reports; one of the fused trials trains to its end, and the last stops in the middle of a pass."""
    described = [task(seed, count, **changes) for seed, count in enumerate([2, 100, 4])]
    with HydraExecutor(devices="cpu:1", **WAYS[way]) as pool:
        results = pool.run(described)
    assert [result.group_size for result in results] == [3 if way == "fused" else 1] * 3
    assert [len(result.history) for result in results[::2]] == [2, 4]
    for result, one in zip(results, described, strict=True):
        assert_as_plain(result, one, is_exact=way != "fused")


@pytest.mark.parametrize("way", ["own code", "cut"])
def test_a_trial_that_is_resumed_at_the_report_that_stops_the_trial_is_complete(tmp_path, way):
    """The checkpoint is of the moment before the report was delivered."""
    with HydraExecutor(devices="cpu:1", checkpoint_dir=tmp_path / "first", **WAYS[way]) as pool:
        events = pool.events()
        job = pool.submit(task(), "stops", events)
        while isinstance(event := events.get(PATIENCE_SECONDS), Reported):
            if event.step == 2:
                job.checkpoint()
                shutil.copytree(tmp_path / "first", tmp_path / "copy")
            job.proceed()
    with HydraExecutor(devices="cpu:1", checkpoint_dir=tmp_path / "copy", **WAYS[way]) as pool:
        found = pool.find_checkpoint("stops")
        result = pool.submit(task(), "stops", resume_from=found.path).result(PATIENCE_SECONDS)
    assert_as_plain(result, task())


@pytest.mark.cases(1 / 3)
def test_a_resumed_trial_asks_stop_once_about_each_report():
    asked, keeper, plans = [], Collector(), library()

    def notes(history):
        asked.append(len(history))
        return False

    described = task(stop=notes, report_every=4)
    run(described, plans, keeper)
    everything = list(asked)
    assert everything == list(range(1, len(everything) + 1))
    for saved in keeper.saved:
        asked.clear()
        run(described, plans, beginning=StartCheckpoint(saved=saved))
        # A trial that is saved at its report has not asked about that report yet.
        assert asked == everything[len(saved.facts["history"]) - saved.labels["at_report"] :]


def test_the_workers_of_a_loader_end_with_a_trial_that_stops_within_a_pass():
    loader = DataLoader(DATA, 8, num_workers=1)
    described = task(train=loader, validate=loader, batch_size=None, report_every=2)
    with HydraExecutor(devices="cpu:1") as pool:
        (result,) = pool.run([described])
    assert not multiprocessing.active_children()
    assert_as_plain(result, described)


def test_stop_gets_copies_of_the_reports_and_its_error_is_the_trials_own():
    def spoils(history):
        history[-1].clear()
        if len(history) == 2:
            raise ValueError("no such value")
        return False

    with HydraExecutor(devices="cpu:1") as pool:
        result = pool.submit(task(stop=spoils)).result(PATIENCE_SECONDS)
    assert isinstance(result.error, ValueError)
    assert [set(report) >= {"train_loss", "val_loss"} for report in result.history] == [True, True]
