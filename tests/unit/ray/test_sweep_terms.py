"""A sweep file's words in Ray's: what a scheduler does is what Optuna's pruner of the name does."""

from types import SimpleNamespace

import pytest

pytest.importorskip("ray.tune")

from ray.tune.schedulers import TrialScheduler

from hydra_tune.cli.sweep_file.spec import PruningRule
from hydra_tune_ray.sweep import scheduler_of


def test_hyperband_ends_no_trial_for_its_length():
    scheduler = scheduler_of(PruningRule(type="hyperband", options={"min_iter": 1, "max_iter": 3, "eta": 3}))
    scheduler.set_search_properties("val_loss", "min")
    trial = SimpleNamespace(trial_id="0")
    scheduler.on_trial_add(None, trial)
    reports = [{"training_iteration": number, "val_loss": 1.0 / number} for number in range(1, 6)]
    assert {scheduler.on_trial_result(None, trial, report) for report in reports} == {TrialScheduler.CONTINUE}
