"""Ray's schedulers on the pool: they decide, the pool does as it is told, and the numbers are those of hydra-tune alone."""

import pickle
import sys

import pytest

pytest.importorskip("ray")

from ray.tune.schedulers import ASHAScheduler

import hydra_tune_ray
from hydra_tune_ray.pools import pools_of
from tests.ray.searches import DEVICES, RATES, build, empty_pools, expected, losses, searched, units


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


def test_what_ray_stores_of_a_search_holds_names_and_no_handles(trained):
    """Or it could not be restored on another cluster."""
    stored = pickle.dumps(hydra_tune_ray.PoolCallback(trained))
    assert pools_of(trained).name.encode() in stored
    assert b"ActorHandle" not in stored
    assert b"_actor_handle" not in stored
