"""Population-based training of trials that a pool computes together."""

import pytest

pytest.importorskip("ray")

import torch
from ray import tune

import hydra_tune_ray
from hydra_tune_ray.pools import pools_of
from tests.ray.searches import (
    DEVICES,
    Pausing,
    build,
    cloned_after,
    empty_pools,
    expected,
    held_back,
    losses,
    searched,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
BEST, WORST, CHANGED = 0.02, 1e-6, 0.015
RATES = [BEST, 0.01, 0.005, WORST]
EACH = {"epochs": 6, "dtype": "float64"}


def changed(config):
    return {**config, "lr": CHANGED}


@pytest.fixture(scope="module")
def fused(ray_cluster):
    made = hydra_tune_ray.trainable(build, fusion="on", fusion_size=4, **DEVICES | {"devices": "cpu:1"})
    yield made
    pools_of(made).close()


@pytest.mark.filterwarnings("ignore:Consider boosting PBT performance:UserWarning")  # Ray's own
def test_a_member_is_copied_and_changed(fused, tmp_path):
    flag = tmp_path / "paused"
    scheduler = Pausing(
        flag,
        time_attr="training_iteration",
        perturbation_interval=3,
        hyperparam_mutations={"lr": [BEST, CHANGED]},
        quantile_fraction=0.25,
        resample_probability=0.0,
        custom_explore_fn=changed,
    )
    results = searched(
        held_back(fused, flag, WORST, 3),
        tmp_path,
        scheduler=scheduler,
        space={"lr": tune.grid_search(RATES), **EACH},
        checkpoints=tune.CheckpointConfig(checkpoint_at_end=True),
    )
    assert results.num_errors == 0
    found = {result.config["lr"]: result for result in results}
    wanted, weights = cloned_after(3, BEST, CHANGED, **EACH)
    torch.testing.assert_close(losses(found[CHANGED])[-3:], wanted, **CLOSE)
    torch.testing.assert_close(hydra_tune_ray.load_module(build, found[CHANGED]).state_dict(), weights, **CLOSE)
    alone = expected([{"lr": lr, **EACH} for lr in RATES[:3]])
    for lr, reports in zip(RATES, alone, strict=False):
        torch.testing.assert_close(losses(found[lr])[-3:], reports[-3:], **CLOSE)
    empty_pools(fused)
