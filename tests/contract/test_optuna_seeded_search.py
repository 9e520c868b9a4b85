"""A seeded search in a pool of width 1 is stock Optuna's search: the same trials, values and prunes, bit by bit."""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import optuna
import pytest
import torch
from torch import nn

from tests.contract.optuna_drivers import INPUTS, TARGETS, Driver, make_pool, record, small_task

GRID = {"learning_rate": [0.01, 0.1, 0.5], "width": [2, 3]}

SAMPLERS = {
    "random": partial(optuna.samplers.RandomSampler, seed=3),
    "tpe": partial(optuna.samplers.TPESampler, seed=3, n_startup_trials=3),
    "multivariate tpe": partial(optuna.samplers.TPESampler, seed=3, n_startup_trials=3, multivariate=True, group=True),
    "liar tpe": partial(optuna.samplers.TPESampler, seed=3, n_startup_trials=3, constant_liar=True),
    "gp": partial(optuna.samplers.GPSampler, seed=3, n_startup_trials=3),
    "cma-es": partial(optuna.samplers.CmaEsSampler, seed=3, n_startup_trials=2),
    "nsga-ii": partial(optuna.samplers.NSGAIISampler, seed=3, population_size=3),
    "nsga-iii": partial(optuna.samplers.NSGAIIISampler, seed=3, population_size=3),
    "qmc": partial(optuna.samplers.QMCSampler, seed=3),
    "grid": partial(optuna.samplers.GridSampler, GRID, seed=3),
    "brute force": partial(optuna.samplers.BruteForceSampler, seed=3),
    "partly fixed": lambda: optuna.samplers.PartialFixedSampler({"width": 3}, optuna.samplers.TPESampler(seed=3)),
}

PRUNERS = {
    "none": optuna.pruners.NopPruner,
    "median": partial(optuna.pruners.MedianPruner, n_startup_trials=2),
    "percentile": partial(optuna.pruners.PercentilePruner, 30.0, n_startup_trials=2),
    "successive halving": optuna.pruners.SuccessiveHalvingPruner,
    "hyperband": partial(optuna.pruners.HyperbandPruner, max_resource=6, reduction_factor=2),
    "hyperband, auto": optuna.pruners.HyperbandPruner,
    "patient": lambda: optuna.pruners.PatientPruner(optuna.pruners.ThresholdPruner(upper=0.1), patience=0),
    "threshold": partial(optuna.pruners.ThresholdPruner, upper=0.8, n_warmup_steps=1),
    "wilcoxon": partial(optuna.pruners.WilcoxonPruner, p_threshold=0.3, n_startup_steps=1),
}

NEEDS = {"cma-es": "cmaes", "gp": "scipy", "qmc": "scipy", "wilcoxon": "scipy"}

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")


@pytest.fixture(scope="module", params=["plain", "hydra"])
def driver(request):
    with make_pool(request.param, width=1) as pool:
        yield Driver(pool)


def build(trial):
    width = trial.suggest_int("width", 2, 3)
    if isinstance(trial.study.sampler, optuna.samplers.BruteForceSampler):
        rate = trial.suggest_float("learning_rate", 0.1, 0.5, step=0.2)
    else:
        rate = trial.suggest_float("learning_rate", 0.01, 0.5, log=True)
    return small_task(
        rate,
        model=lambda: nn.Sequential(nn.Linear(3, width), nn.Dropout(0.1), nn.Linear(width, 1)),
        train=lambda: [(INPUTS[:16], TARGETS[:16])],
        epochs=6,
        seed=trial.number,
    )


def narrow_enough(trial):
    """A constraint is satisfied at 0 and below."""
    return [trial.params["width"] - 2.5, 0.05 - trial.user_attrs["rate"]]


CONSTRAINED = {
    "tpe": partial(optuna.samplers.TPESampler, seed=3, n_startup_trials=3, constraints_func=narrow_enough),
    "gp": partial(optuna.samplers.GPSampler, seed=3, n_startup_trials=3, constraints_func=narrow_enough),
    "nsga-ii": partial(optuna.samplers.NSGAIISampler, seed=3, population_size=3, constraints_func=narrow_enough),
    "nsga-iii": partial(optuna.samplers.NSGAIIISampler, seed=3, population_size=3, constraints_func=narrow_enough),
}


COSTLY = {"gp", "nsga-iii"}
CONSTRAINED_SAMPLERS = [pytest.param(name, marks=[pytest.mark.slow] * (name in COSTLY)) for name in CONSTRAINED]


def build_noting(trial):
    task = build(trial)
    trial.set_user_attr("rate", trial.params["learning_rate"])
    return task


def build_two(trial):
    """Two objectives, of which the second is known beforehand."""
    task = build_noting(trial)
    cost = float(trial.params["width"])

    def evaluate(module, batch):
        return {"error": nn.functional.mse_loss(module(batch[0]), batch[1]), "cost": torch.tensor(cost)}

    return replace(task, evaluate=evaluate, metric=("val_error", "val_cost"))


def skip_without(*names):
    for name in names:
        if name in NEEDS and find_spec(NEEDS[name]) is None:
            pytest.skip(f"{name} needs {NEEDS[name]}")


def assert_same_search(driver, sampler, pruner):
    skip_without(sampler, pruner)
    options = {"sampler": SAMPLERS[sampler], "pruner": PRUNERS[pruner], "calls": [{"n_trials": 9}]}

    seen = record(driver, build, **options)

    assert seen == record(Driver(), build, **options)
    assert len(seen.trials) >= 6
    return seen


# Each is another one with a little changed.
OF_OTHERS = {"multivariate tpe", "liar tpe", "nsga-iii", "percentile", "hyperband, auto"}


def each(names):
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in OF_OTHERS)) for name in names]


@pytest.mark.parametrize("sampler", each(SAMPLERS))
def test_every_sampler_searches_as_in_stock_optuna(sampler, driver):
    assert_same_search(driver, sampler, "successive halving")


@pytest.mark.parametrize("pruner", each(PRUNERS))
def test_every_pruner_prunes_as_in_stock_optuna(pruner, driver):
    seen = assert_same_search(driver, "random", pruner)

    pruned = sum("PRUNED" in trial for trial in seen.trials)
    assert (pruned == 0) == (pruner == "none")


@pytest.mark.parametrize("sampler", ["tpe", "nsga-ii", "cma-es", "grid"])
def test_samplers_and_hyperband_get_along(sampler, driver):
    """Hyperband shows samplers a study with few attributes; ours must not need more."""
    assert_same_search(driver, sampler, "hyperband")


deprecated_function = pytest.mark.filterwarnings("ignore:`constraints_func` has been deprecated:FutureWarning")


@deprecated_function
@pytest.mark.parametrize("sampler", CONSTRAINED_SAMPLERS)
def test_constraints_are_asked_and_kept_as_in_stock_optuna(sampler, driver):
    skip_without(sampler)
    options = {"sampler": CONSTRAINED[sampler], "calls": [{"n_trials": 9}]}

    seen = record(driver, build_noting, **options)

    assert seen == record(Driver(), build_noting, **options)
    assert all("('constraints', (" in trial for trial in seen.trials)


@pytest.mark.skipif(not hasattr(optuna.Trial, "set_constraint"), reason="Optuna 4 has constraints of samplers only")
@pytest.mark.parametrize("sampler", CONSTRAINED_SAMPLERS)
def test_constraints_that_the_objective_sets_are_kept_as_in_stock_optuna(sampler, driver):
    def constrained(trial):
        task = build(trial)
        trial.set_constraint("width", trial.params["width"] - 2.5)
        return task

    skip_without(sampler)
    options = {"sampler": SAMPLERS[sampler], "calls": [{"n_trials": 9}]}
    seen = record(driver, constrained, **options)

    assert seen == record(Driver(), constrained, **options)
    assert all("('constraints:width', " in trial for trial in seen.trials)


@deprecated_function
@pytest.mark.parametrize("sampler", CONSTRAINED_SAMPLERS)
@pytest.mark.parametrize("constrained", [False, True], ids=["free", "constrained"])
def test_several_objectives_are_searched_as_in_stock_optuna(sampler, constrained, driver):
    skip_without(sampler)
    options = {
        "sampler": (CONSTRAINED if constrained else SAMPLERS)[sampler],
        "directions": ["minimize", "maximize"],
        "calls": [{"n_trials": 9}],
    }

    assert record(driver, build_two, **options) == record(Driver(), build_two, **options)


@deprecated_function
def test_a_constraint_that_breaks_ends_the_search_as_in_stock_optuna(driver):
    def broken(trial):
        raise ValueError("no constraint")

    options = {"sampler": partial(optuna.samplers.TPESampler, seed=1, constraints_func=broken)}
    seen = record(driver, build, **options)

    assert seen == record(Driver(), build, **options)
    assert seen.raised == ["ValueError('no constraint')"]
