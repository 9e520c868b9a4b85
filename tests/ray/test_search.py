"""Ray's schedulers on the pool: they decide, the pool does as it is told, and the numbers are those of hydra-tune alone."""

import dataclasses
import pickle
import socket
import sys

import pytest

pytest.importorskip("ray")

from ray import tune
from ray.tune.schedulers import ASHAScheduler

import hydra_tune_ray
from hydra_tune import load_module
from hydra_tune.errors import CheckpointError
from hydra_tune_ray.checkpoint_transfer import FOLDER, read_files
from hydra_tune_ray.pools import pools_of
from tests.ray.searches import (
    DEVICES,
    RATES,
    build,
    empty_pools,
    expected,
    losses,
    same,
    searched,
    trained_by_itself,
    units,
)


class Recorded(ASHAScheduler):
    """ASHA that notes after which report it has ended each trial."""

    def __init__(self, **options):
        super().__init__(**options)
        self.stopped = {}

    def on_trial_result(self, controller, trial, result):
        decision = super().on_trial_result(controller, trial, result)
        if decision == self.STOP:
            self.stopped[trial.config["lr"]] = result["training_iteration"]
        return decision


@pytest.fixture(scope="module")
def trained(ray_cluster):
    made = hydra_tune_ray.trainable(build, **DEVICES)
    yield made
    pools_of(made).close()


@pytest.fixture(scope="module")
def reports():
    return dict(zip(RATES, expected([{"lr": lr, "epochs": 8} for lr in RATES]), strict=True))


def test_asha_ends_each_trial_at_its_very_step(trained, reports, tmp_path):
    units_of_an_epoch = units(epochs=1)
    scheduler = Recorded(max_t=8, grace_period=2, reduction_factor=2)
    before = sum(each.units_run for each in empty_pools(trained))
    results = searched(trained, tmp_path, scheduler=scheduler)
    assert results.num_errors == 0
    made = {result.config["lr"]: losses(result) for result in results}
    assert any(step < 8 for step in scheduler.stopped.values())
    assert {lr: len(each) for lr, each in made.items()} == {lr: scheduler.stopped.get(lr, 8) for lr in RATES}
    for lr, each in made.items():
        assert each == reports[lr][: len(each)]
    # No trial has trained beyond its last report.
    after = sum(each.units_run for each in empty_pools(trained))
    assert after - before == units_of_an_epoch * sum(map(len, made.values()))


@pytest.mark.slow
def test_without_a_scheduler_all_train_to_their_ends(trained, reports, tmp_path):
    results = searched(trained, tmp_path, max_concurrent_trials=8, reuse=False)
    assert {result.config["lr"]: losses(result) for result in results} == reports
    empty_pools(trained)


def test_the_processes_of_trials_import_no_torch(trained, tmp_path):
    class Looking(trained):
        def step(self):
            return {**super().step(), "has_torch": "torch" in sys.modules}

    (result,) = searched(Looking, tmp_path, space={"lr": 0.01, "epochs": 2})
    assert not result.metrics["has_torch"]


def test_reports_come_directly_and_by_ray_where_that_way_breaks(trained, reports, tmp_path):
    class Breaking(trained):
        def step(self):
            found = {**super().step(), "is_direct": self._client._line is not None}
            if self.iteration == 3:
                self._client._line._socket.shutdown(socket.SHUT_RDWR)
            return found

    (result,) = searched(Breaking, tmp_path, space={"lr": RATES[0], "epochs": 8})
    assert list(result.metrics_dataframe["is_direct"]) == [True] * 4 + [False] * 4
    assert losses(result) == reports[RATES[0]]


def test_a_trial_that_goes_on_from_its_end_is_done_and_saved_as_it_was(trained, tmp_path):
    """As where Ray has not noted yet that it was over."""
    first = trained(config={"lr": 0.01, "epochs": 1})
    assert first.step()["done"]
    first.save_checkpoint(str(tmp_path / "first"))
    first.cleanup()
    again = trained(config={"lr": 0.01, "epochs": 1})
    again.load_checkpoint(str(tmp_path / "first"))
    assert again.step()["done"]
    again.save_checkpoint(str(tmp_path / "again"))
    again.cleanup()
    saved, copied = (read_files(tmp_path / name / FOLDER) for name in ("first", "again"))
    assert saved == copied
    empty_pools(trained)


def weights_in(folder, config):
    return load_module(build(config), folder / FOLDER).state_dict()


@pytest.mark.parametrize("report_every", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_what_is_trained_after_the_last_report_is_saved(trained, tmp_path, report_every):
    config = {"lr": 0.01, "epochs": 2, "report_every": report_every}  # 8 steps, of which 2 or 8 are after it
    (wanted,) = trained_by_itself([config])
    first = trained(config=config)
    count = 0
    while not first.train().get("done"):
        count += 1
        first.save_checkpoint(str(tmp_path / "waiting"))
    assert count == 8 // report_every
    first.save_checkpoint(str(tmp_path / "first"))
    assert same(weights_in(tmp_path / "first", config), wanted)
    first.cleanup()
    # Gone on with, from where there is something left to train, or nothing.
    for name in ["waiting", "first"] if count else ["first"]:
        again = trained(config=config)
        again.load_checkpoint(str(tmp_path / name))
        assert again.train()["done"]
        again.save_checkpoint(str(tmp_path / f"from {name}"))
        assert same(weights_in(tmp_path / f"from {name}", config), wanted)
        again.cleanup()
    empty_pools(trained)


@pytest.mark.slow
def test_a_search_ends_with_what_is_trained_after_the_last_report(trained, tmp_path):
    config = {"lr": 0.01, "epochs": 2, "report_every": 3}
    (result,) = searched(trained, tmp_path, space=config, checkpoints=tune.CheckpointConfig(checkpoint_at_end=True))
    assert result.error is None
    assert result.metrics["step"] == 6
    assert same(hydra_tune_ray.load_module(build, result).state_dict(), trained_by_itself([config])[0])
    empty_pools(trained)


def pruned(config):
    """Its weights overflow in the first step."""
    return dataclasses.replace(build({"report_every": config["report_every"], "lr": 1e30}), on_bad_loss="prune")


@pytest.mark.slow
@pytest.mark.parametrize("at_end", [False, True])
def test_a_trial_that_prunes_itself_ends_with_its_last_report(trained, tmp_path, at_end):
    made = hydra_tune_ray.trainable(pruned, pools=pools_of(trained))
    checkpoints = tune.CheckpointConfig(checkpoint_at_end=at_end)
    results = searched(made, tmp_path, space={"report_every": tune.grid_search([1, 2])}, checkpoints=checkpoints)
    after, before = results
    assert after.error is None
    if at_end:
        with pytest.raises(CheckpointError, match="which has pruned itself"):
            hydra_tune_ray.load_module(pruned, after)
    assert len(set(losses(after))) == 1
    assert "has a loss that is not finite before its first report" in str(before.error)


def test_what_ray_stores_of_a_search_holds_names_and_no_handles(trained):
    """Or it could not be restored on another cluster."""
    stored = pickle.dumps(hydra_tune_ray.PoolCallback(trained))
    assert pools_of(trained).name.encode() in stored
    assert b"ActorHandle" not in stored
    assert b"_actor_handle" not in stored
