"""Schedulers that pause trials, copy them and change them: every number is what hydra-tune itself makes of it."""

import pytest

pytest.importorskip("ray")

from ray import tune
from ray.tune.schedulers import HyperBandScheduler, MedianStoppingRule

import hydra_tune_ray
from hydra_tune_ray.pools import pools_of
from tests.ray.searches import (
    DEVICES,
    EACH,
    RATES,
    Pausing,
    build,
    cloned_after,
    empty_pools,
    expected,
    held_back,
    losses,
    same,
    searched,
    trained_by_itself,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
BAD, GOOD = 1e-6, 0.02


@pytest.fixture(scope="module")
def trained(ray_cluster):
    made = hydra_tune_ray.trainable(build, **DEVICES)
    yield made
    pools_of(made).close()


@pytest.fixture(scope="module")
def reports():
    return dict(zip(RATES, expected([{"lr": lr, "epochs": 8} for lr in RATES]), strict=True))


def check(results, reports):
    assert results.num_errors == 0
    for result in results:
        frame = result.metrics_dataframe  # a report that comes when Ray has decided to pause the trial is not in it
        wanted = reports[result.config["lr"]]
        assert list(frame["train_loss"]) == [wanted[number - 1] for number in frame["training_iteration"]]
    return {result.config["lr"]: result.metrics["training_iteration"] for result in results}


class Counted(HyperBandScheduler):
    """Counts the trials it pauses."""

    paused = 0

    def on_trial_result(self, controller, trial, result):
        decision = super().on_trial_result(controller, trial, result)
        self.paused += decision == self.PAUSE
        return decision


class Noted(MedianStoppingRule):
    """Notes after which report it has ended each trial."""

    def __init__(self, **options):
        super().__init__(**options)
        self.stopped = {}

    def on_trial_result(self, controller, trial, result):
        decision = super().on_trial_result(controller, trial, result)
        if decision == self.STOP:
            self.stopped[trial.config["lr"]] = result["training_iteration"]
        return decision


@pytest.mark.parametrize("reuse", [False, True])
def test_hyperband_pauses_trials_and_they_go_on_as_they_were(trained, reports, tmp_path, reuse):
    scheduler = Counted(max_t=8, reduction_factor=2)
    results = searched(trained, tmp_path, scheduler=scheduler, reuse=reuse, max_concurrent_trials=16)
    steps = check(results, reports)
    assert scheduler.paused >= 8
    assert set(steps.values()) != {8}
    empty_pools(trained, seconds=5)


def test_median_stopping(trained, reports, tmp_path):
    scheduler = Noted(grace_period=1, min_samples_required=2)
    steps = check(searched(trained, tmp_path, scheduler=scheduler), reports)
    assert steps == {lr: scheduler.stopped.get(lr, 8) for lr in RATES}
    empty_pools(trained)


@pytest.mark.filterwarnings("ignore:Consider boosting PBT performance:UserWarning")  # Ray's own
@pytest.mark.parametrize("reuse", [False, True])
def test_population_based_training_copies_and_changes(trained, tmp_path, reuse):
    flag = tmp_path / "paused"
    scheduler = Pausing(
        flag,
        time_attr="training_iteration",
        perturbation_interval=2,
        hyperparam_mutations={"lr": [GOOD, 0.01]},
        quantile_fraction=0.5,
        resample_probability=0.0,
        custom_explore_fn=lambda config: {**config, "lr": 0.75 * GOOD},
    )
    results = searched(
        held_back(trained, flag, BAD, 2),
        tmp_path,
        scheduler=scheduler,
        space={"lr": tune.grid_search([GOOD, BAD]), "epochs": 4},
        checkpoints=EACH,
        reuse=reuse,
    )
    assert results.num_errors == 0
    copied = next(result for result in results if result.config["lr"] == 0.75 * GOOD)
    wanted, weights = cloned_after(2, GOOD, 0.75 * GOOD)
    assert losses(copied)[-2:] == wanted
    assert same(hydra_tune_ray.load_module(build, copied).state_dict(), weights)
    empty_pools(trained)


def test_weights_are_in_rays_checkpoints(trained, tmp_path):
    configs = [{"lr": lr, "epochs": 3} for lr in RATES[:2]]
    results = searched(
        trained, tmp_path, space={"lr": tune.grid_search(RATES[:2]), "epochs": 3}, checkpoints=tune.CheckpointConfig()
    )
    for result, weights in zip(results, trained_by_itself(configs), strict=True):
        assert same(hydra_tune_ray.load_module(build, result).state_dict(), weights)
