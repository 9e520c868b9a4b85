"""Trials of Ray that a pool computes together: they are saved, paused and stopped as others are."""

import pytest

pytest.importorskip("ray")

import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler

import hydra_tune_ray
from hydra_tune_ray.pools import pools_of
from tests.ray.searches import (
    DEVICES,
    EACH,
    RATES,
    build,
    empty_pools,
    expected,
    searched,
    trained_by_itself,
    units,
)
from tests.ray.test_schedulers import Counted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
DOUBLE = {"dtype": "float64"}
SPACE = {"lr": tune.grid_search(RATES), "epochs": 8, **DOUBLE}


class Noted(ASHAScheduler):
    """Notes after which report it has ended each trial."""

    def __init__(self, **options):
        super().__init__(**options)
        self.stopped = {}

    def on_trial_result(self, controller, trial, result):
        decision = super().on_trial_result(controller, trial, result)
        if decision == self.STOP:
            self.stopped[trial.config["lr"]] = result["training_iteration"]
        return decision


@pytest.fixture(scope="module")
def fused(ray_cluster):
    made = hydra_tune_ray.trainable(build, fusion="on", fusion_size=8, **DEVICES | {"devices": "cpu:1"})
    yield made
    pools_of(made).close()


@pytest.fixture(scope="module")
def reports():
    return dict(zip(RATES, expected([{"lr": lr, "epochs": 8, **DOUBLE} for lr in RATES]), strict=True))


def check(results, reports):
    assert results.num_errors == 0
    for result in results:
        frame = result.metrics_dataframe
        wanted = [reports[result.config["lr"]][number - 1] for number in frame["training_iteration"]]
        torch.testing.assert_close(list(frame["train_loss"]), wanted, **CLOSE)
    return {result.config["lr"]: result.metrics["training_iteration"] for result in results}


def test_asha_stops_each_member_when_ray_says(fused, reports, tmp_path):
    (before,) = empty_pools(fused)
    assert before.width == 8, "a group of one device"
    scheduler = Noted(max_t=8, grace_period=2, reduction_factor=2)
    results = searched(fused, tmp_path, scheduler=scheduler, space=SPACE, checkpoints=EACH, max_concurrent_trials=8)
    steps = check(results, reports)
    assert steps == {lr: scheduler.stopped.get(lr, 8) for lr in RATES}
    assert min(steps.values()) < 8
    (after,) = empty_pools(fused)
    # Within a group, the forward and the backward of a trial's step are units; alone, the step is one unit.
    alone = units(epochs=1) * sum(steps.values())
    assert after.units_run - before.units_run > 1.5 * alone, "they were computed together"
    best = min(results, key=lambda result: result.metrics["train_loss"])
    (weights,) = trained_by_itself([{"lr": best.config["lr"], "epochs": 8, **DOUBLE}])
    torch.testing.assert_close(hydra_tune_ray.load_module(build, best).state_dict(), weights, **CLOSE)


def test_hyperband_pauses_members_and_they_go_on(fused, reports, tmp_path):
    scheduler = Counted(max_t=8, reduction_factor=2)
    results = searched(fused, tmp_path, scheduler=scheduler, space=SPACE, max_concurrent_trials=16)
    steps = check(results, reports)
    assert scheduler.paused >= 8
    assert set(steps.values()) != {8}
    empty_pools(fused)
