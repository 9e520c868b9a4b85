"""A study whose trials are computed together has the values that each of them has alone."""

from functools import partial

import pytest
import torch

import hydra_tune_optuna as optuna
from hydra_tune import train_plain
from tests.unit.pool.tasks import running
from tests.unit.pool.test_fusion import task


def test_a_study_of_fused_trials_has_the_values_of_plain_loops():
    described = {}

    def objective(trial):
        rate = trial.suggest_float("lr", 1e-3, 1e-1, log=True)
        described[trial.number] = task(trial.number, optimizer=partial(torch.optim.AdamW, lr=rate))
        return described[trial.number]

    optuna.logging.set_verbosity(optuna.logging.WARNING)
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
