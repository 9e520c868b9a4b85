"""A study whose trials are computed together has the values that each of them has alone."""

import threading
from functools import partial

import pytest
import torch
from torch import nn

import hydra_tune_optuna as optuna
from hydra_tune import train_plain
from hydra_tune.pool.job import OVER
from tests.support.gathered import gather
from tests.unit.pool.fusion.test_fused_pool import task
from tests.unit.pool.tasks import PATIENCE_SECONDS, running


@pytest.fixture(autouse=True)
def _quiet():
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(before)


@pytest.mark.cases(1 / 3)
def test_a_study_of_fused_trials_has_the_values_of_plain_loops():
    described = {}

    def objective(trial):
        rate = trial.suggest_float("lr", 1e-3, 1e-1, log=True)
        described[trial.number] = task(trial.number, optimizer=partial(torch.optim.AdamW, lr=rate))
        return described[trial.number]

    with running(fusion="on", fusion_size=4) as pool:
        assert pool.width == 4
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0), executor=pool)
        study.optimize(objective, n_trials=6)
    assert len(study.trials) == 6
    for trial in study.trials:
        plain = train_plain(described[trial.number])
        expected = [entry["val_loss"] for entry in plain.history]
        assert list(trial.intermediate_values.values()) == pytest.approx(expected, rel=1e-9)
        assert trial.value == pytest.approx(expected[-1], rel=1e-9)


@pytest.mark.parametrize(
    ("options", "width"),
    [
        ({"fusion": "on", "fusion_size": 4}, 4),
        ({"fusion": "auto", "fusion_size": 4, "devices": "cpu:2"}, 8),
        ({"fusion": "off", "devices": "cpu:2"}, 4),
        ({"fusion": "on", "fusion_size": 4, "max_concurrent": 1}, 1),
        ({"fusion": "on", "fusion_size": 4, "max_concurrent": 3, "admission": "staggered"}, 3),
    ],
)
def test_as_many_trials_are_in_flight_as_fill_a_group_on_each_device_or_as_was_said(options, width):
    with running(**options) as pool:
        assert pool.width == width
        assert pool.num_abreast == width
        assert pool.fusion_size == (0 if options["fusion"] == "off" else 4)


def test_places_of_trials_that_are_over_are_filled_at_once(monkeypatch):
    """Every other trial ends after two epochs of eight."""
    in_flight, jobs = [], []
    gather(monkeypatch, lambda count: count >= min(8, 4 + sum(job.state in OVER for job in jobs)))

    def objective(trial):
        in_flight.append(sum(not other.state.is_finished() for other in trial.study.get_trials(deepcopy=False)))
        rate = trial.suggest_float("lr", 1e-3, 1e-1, log=True)
        optimizer = partial(torch.optim.AdamW, lr=rate)
        return task(trial.number, optimizer=optimizer, epochs=8 if trial.number % 2 else 2)

    with running(fusion="on", fusion_size=4) as pool:
        submit = pool.submit
        pool.submit = lambda *given, **options: jobs.append(submit(*given, **options)) or jobs[-1]
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0), executor=pool)
        study.optimize(objective, n_trials=8)
        sizes = [job.result().group_size for job in jobs]
    assert in_flight[:4] == [1, 2, 3, 4]
    assert set(in_flight[4:]) <= {2, 3, 4}, (
        "on a slow machine several are over at once; all are where places are kept till then"
    )
    assert len(sizes) == 8
    assert min(sizes[:6]) > 1, "who comes next runs by himself"


@pytest.mark.parametrize("n_trials", [7, 8])
def test_a_search_that_fills_all_groups_begins_with_a_smaller_group_on_each_device(n_trials, monkeypatch):
    gather(monkeypatch, lambda count: count >= 4)
    num_completed, jobs = [], []

    def objective(trial):
        completed = trial.study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
        num_completed.append(len(completed))
        return task(trial.number, epochs=2)

    with running(fusion="on", fusion_size=4, devices="cpu:2") as pool:
        submit = pool.submit
        pool.submit = lambda *given, **options: jobs.append(submit(*given, **options)) or jobs[-1]
        study = optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=2), executor=pool)
        study.optimize(objective, n_trials=n_trials)
        sizes = [job.result().group_size for job in jobs]
    assert num_completed[:4] == [0] * 4
    if n_trials == 8:
        assert min(num_completed[4:]) >= 2, "the pruner can judge each of them from its first report on"
        assert sizes[:4] == [2] * 4
    else:
        assert max(num_completed) == 0, "all together are over earlier"


@pytest.mark.cases(1 / 3)
def test_a_first_wave_that_is_paused_holds_up_no_other_trial():
    """All four are paused, and go on once another trial is over."""
    jobs, ended = [], []

    def unpause(*_):
        for job in jobs[:4]:
            job.unpause()

    def note(study, trial):
        ended.append(trial.number)
        unpause()

    def submitted(*given, **options):
        jobs.append(submit(*given, **options))
        if len(jobs) <= 4:
            jobs[-1].pause()
        return jobs[-1]

    with running(fusion="on", fusion_size=4, devices="cpu:2") as pool:
        submit, pool.submit = pool.submit, submitted
        study = optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=2), executor=pool)
        late = threading.Timer(PATIENCE_SECONDS, unpause)
        late.start()
        study.optimize(lambda trial: task(trial.number), n_trials=8, callbacks=[note])
        late.cancel()
    assert sorted(ended) == list(range(8))
    assert ended[0] >= 4


def test_a_pruner_that_groups_make_useless_is_told_without_staggering_which_would_not_help(caplog):
    optuna.logging.enable_propagation()
    with running(fusion="on", fusion_size=8, admission="staggered") as pool:
        pruner = optuna.pruners.MedianPruner(n_startup_trials=4)
        study = optuna.create_study(pruner=pruner, sampler=optuna.samplers.RandomSampler(seed=0), executor=pool)
        study.optimize(lambda trial: task(trial.suggest_int("seed", 0, 99)), n_trials=8)
    optuna.logging.disable_propagation()
    assert "MedianPruner may prune few or none of 8 trials" in caplog.text
    assert "staggered" not in caplog.text
    assert "max_concurrent" in caplog.text


@pytest.mark.cases(1 / 3)
def test_the_best_of_fused_trials_are_kept_also_of_late_ones_whose_group_lies_on_disk(tmp_path, monkeypatch):
    """Two places, so that the others join; the groups' states are beyond host memory."""
    described, jobs = {}, []
    gather(monkeypatch, lambda count: count >= min(6, 2 + sum(job.state in OVER for job in jobs)))

    def wide():
        return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).double()

    def objective(trial):
        rate = trial.suggest_float("lr", 1e-3, 1e-1, log=True)
        optimizer = partial(torch.optim.AdamW, lr=rate)
        described[trial.number] = task(trial.number, model=wide, optimizer=optimizer, epochs=1 + trial.number % 3)
        return described[trial.number]

    (tmp_path / "spill").mkdir()
    options = {"device_memory": "400KiB", "host_memory": "250KiB", "spill_dir": tmp_path / "spill", "num_shards": 3}
    with running(fusion="on", fusion_size=2, **options) as pool:
        submit = pool.submit
        pool.submit = lambda *given, **options: jobs.append(submit(*given, **options)) or jobs[-1]
        sampler = optuna.samplers.RandomSampler(seed=0)
        study = optuna.create_study(sampler=sampler, executor=pool, keep_best=2, weights_dir=tmp_path / "weights")
        study.optimize(objective, n_trials=6)
        assert pool.stats().disk.bytes_written > 0 < pool.stats().disk.bytes_read
    best = [trial.number for trial in sorted(study.trials, key=lambda trial: trial.value)[:2]]
    assert list(optuna.kept_weights(study)) == best
    assert sum(job.result().group_size == 2 for job in jobs) >= 4
    assert jobs[0].result().num_shards == 3
    for number in best:
        expected = train_plain(described[number]).state_dict()
        found = study.load_module(number).state_dict()
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12)
