"""A sweep file's words in Ray's: what a scheduler does is what Optuna's pruner of the name does."""

from types import SimpleNamespace

import pytest

pytest.importorskip("ray.tune")

from ray import tune
from ray.train._internal.session import _TrainingResult
from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

from hydra_tune.cli.sweep_file.spec import PruningRule
from hydra_tune_ray.messages import TrialTicket
from hydra_tune_ray.sweep import _ObserverCallback, scheduler_of
from hydra_tune_ray.trainable import PoolTrainable


def test_hyperband_ends_no_trial_for_its_length():
    scheduler = scheduler_of(PruningRule(type="hyperband", options={"min_iter": 1, "max_iter": 3, "eta": 3}))
    scheduler.set_search_properties("val_loss", "min")
    trial = SimpleNamespace(trial_id="0")
    scheduler.on_trial_add(None, trial)
    reports = [{"training_iteration": number, "val_loss": 1.0 / number} for number in range(1, 6)]
    assert {scheduler.on_trial_result(None, trial, report) for report in reports} == {TrialScheduler.CONTINUE}


@pytest.mark.parametrize(("has_pruned_itself", "state"), [(True, "pruned"), (False, "completed")])
def test_a_trial_whose_last_checkpoint_says_that_it_has_pruned_itself_is_pruned(tmp_path, has_pruned_itself, state):
    """Ray saves each trial at its end, before it calls the trial complete."""
    saver = SimpleNamespace(
        _client=SimpleNamespace(save=lambda folder: TrialTicket(pool="p", key="k", number=1, config="c")),
        _has_pruned_itself=has_pruned_itself,
    )
    PoolTrainable.save_checkpoint(saver, str(tmp_path))
    trial = Trial("task", config={}, stub=True)
    saved = _TrainingResult(checkpoint=tune.Checkpoint.from_directory(str(tmp_path)), metrics={"training_iteration": 1})
    trial.run_metadata.checkpoint_manager.register_checkpoint(saved)
    records = []
    observer = SimpleNamespace(asked=lambda number: None, finished=records.append)
    callback = _ObserverCallback(SimpleNamespace(parameters={}, metric="train_loss"), observer)
    callback.on_trial_start(0, [trial], trial)
    callback.on_trial_complete(0, [trial], trial)
    assert [record.state for record in records] == [state]
