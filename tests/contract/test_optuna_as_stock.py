"""One search, two drivers: stock Optuna around the plain loop, and a pool of width 1, must leave and show the same."""

import gc
import math
from functools import partial

import optuna
import pytest
import torch
from optuna.samplers import RandomSampler
from torch import nn

from hydra_tune_optuna import TrialPruned
from tests.contract.optuna_drivers import Driver, batches, build, make_pool, metrics_task, record, small_task


@pytest.fixture(scope="module", params=["plain", "hydra"])
def driver(request):
    with make_pool(request.param, width=1) as pool:
        yield Driver(pool)


def returning(value):
    def objective(trial):
        trial.suggest_float("x", 0, 1)
        return value

    return objective


def raising(error, *, numbers=(1,)):
    """An objective that raises for the trials of these numbers."""

    def objective(trial):
        task = build(trial)
        if trial.number in numbers:
            raise error
        return task

    return objective


def training(error):
    """An objective whose second task raises while it trains."""

    def objective(trial):
        passes = []

        def train():
            passes.append(1)
            if len(passes) > 2:
                raise error
            return batches()

        return build(trial) if trial.number != 1 else small_task(train=train)

    return objective


def evaluating(error):
    """An objective whose second task raises while it evaluates."""

    def objective(trial):
        def evaluate(module, batch):
            raise error

        return build(trial) if trial.number != 1 else small_task(evaluate=evaluate)

    return objective


def pruned_after(*values):
    def objective(trial):
        trial.suggest_float("x", 0, 1)
        for step, value in enumerate(values):
            trial.report(value, step)
        raise TrialPruned("no good")

    return objective


def two_metrics(trial):
    rate = trial.suggest_float("rate", 0.01, 0.5)

    def evaluate(module, batch):
        error = nn.functional.mse_loss(module(batch[0]), batch[1])
        return {"error": error, "cost": torch.tensor(rate)}

    return small_task(rate, evaluate=evaluate, metric=("val_error", "val_cost"))


def stopping(study, trial):
    if trial.number == 1:
        study.stop()


def broken(study, trial):
    raise ValueError("broken callback")


def interrupted(study, trial):
    raise KeyboardInterrupt


class StopInBuild:
    def __call__(self, trial):
        trial.study.stop()
        return build(trial)


class BrokenPruner(optuna.pruners.BasePruner):
    def prune(self, study, trial):
        raise ValueError(f"broken pruner at {trial.last_step}")


class BrokenSampler(RandomSampler):
    def after_trial(self, study, trial, state, values):
        if trial.number == 1:
            raise ValueError(f"broken sampler at {values}")


def enqueue(study):
    study.enqueue_trial({"learning_rate": 0.5, "seed": 2}, user_attrs={"who": "me"})


def noting(trial):
    trial.set_user_attr("note", trial.number)
    return build(trial)


def directions(*names):
    return {"directions": list(names)}


SCENARIOS = {
    "plain search": (build, {}),
    "float": (lambda trial: trial.suggest_float("x", 0, 1) ** 2, {}),
    "int": (returning(3), {}),
    "tensor": (returning(torch.tensor(0.5)), {}),
    "one-element list": (returning([0.5]), {}),
    "nan": (returning(math.nan), {}),
    "none": (returning(None), {}),
    "string": (returning("good"), {}),
    "inf": (returning(math.inf), {}),
    "wrong arity": (returning((1.0, 2.0)), {}),
    "arity of a multi-objective": (returning((1.0, 2.0)), directions("minimize", "maximize")),
    "one value for two": (returning(1.0), directions("minimize", "maximize")),
    "task that ends in nan": (lambda trial: metrics_task(0.5, math.nan), {}),
    "task that ends in inf": (lambda trial: metrics_task(0.5, -math.inf), {}),
    "task without validation": (lambda trial: small_task(validate=None), {}),
    "reports by steps": (lambda trial: small_task(report_every=3), {}),
    "best, minimize": (lambda trial: metrics_task(0.5, 0.2, 0.4, result="best"), {}),
    "best, maximize": (lambda trial: metrics_task(0.5, 0.7, 0.4, result="best"), {"direction": "maximize"}),
    "best, with nan": (lambda trial: metrics_task(math.nan, 0.7, 0.4, math.nan, result="best"), {}),
    "best, all nan": (lambda trial: metrics_task(math.nan, math.nan, result="best"), {}),
    "error while building": (raising(ValueError("no")), {}),
    "caught while building": (raising(ValueError("no")), {"calls": [{"n_trials": 3, "catch": ValueError}]}),
    "caught by its base": (raising(KeyError("no")), {"calls": [{"n_trials": 3, "catch": [LookupError]}]}),
    "another is caught": (raising(ValueError("no")), {"calls": [{"n_trials": 3, "catch": (TypeError,)}]}),
    "error in training": (training(ValueError("no")), {}),
    "caught in training": (training(ValueError("no")), {"calls": [{"n_trials": 3, "catch": (ValueError,)}]}),
    "error in evaluation": (evaluating(ValueError("no")), {}),
    "pruned in evaluation": (evaluating(TrialPruned("enough")), {}),
    "interrupted in training": (training(KeyboardInterrupt()), {}),
    "pruned in training": (training(TrialPruned("enough")), {}),
    "interrupted while building": (raising(KeyboardInterrupt()), {}),
    "pruned while building": (pruned_after(), {}),
    "pruned after reports": (pruned_after(0.3, 0.2), {}),
    "pruned after nan": (pruned_after(0.3, math.nan), {}),
    "pruned, several objectives": (raising(TrialPruned(), numbers=(0, 1, 2, 3)), directions("minimize", "minimize")),
    "pruned by nan": (
        lambda trial: metrics_task(0.5, math.nan, 0.4),
        {"pruner": partial(optuna.pruners.ThresholdPruner, upper=1.0)},
    ),
    "pruned at the last report": (
        lambda trial: metrics_task(0.5, 0.4, 2.0),
        {"pruner": partial(optuna.pruners.ThresholdPruner, upper=1.0)},
    ),
    "several objectives": (two_metrics, directions("minimize", "maximize")),
    "several objectives and a pruner": (
        two_metrics,
        {**directions("minimize", "minimize"), "pruner": partial(optuna.pruners.ThresholdPruner, upper=-1.0)},
    ),
    "stop in a callback": (build, {"callbacks": [stopping]}),
    "stop while building": (StopInBuild(), {}),
    "as many trials as allowed": (build, {"callbacks": [optuna.study.MaxTrialsCallback(2)]}),
    "broken callback": (build, {"callbacks": [broken]}),
    "interrupted callback": (build, {"callbacks": [interrupted]}),
    "broken pruner": (build, {"pruner": BrokenPruner}),
    "broken pruner, caught": (build, {"pruner": BrokenPruner, "calls": [{"n_trials": 2, "catch": ValueError}]}),
    "broken sampler": (build, {"sampler": partial(BrokenSampler, seed=1)}),
    "two calls": (build, {"calls": [{"n_trials": 2}, {"n_trials": 3}]}),
    "no trials": (build, {"calls": [{"n_trials": 0}]}),
    "no time": (build, {"calls": [{"timeout": 0}, {"timeout": 0.0, "n_trials": 2}]}),
    "after an error": (raising(ValueError("no"), numbers=(0,)), {"calls": [{"n_trials": 2}, {"n_trials": 2}]}),
    "garbage collected": (build, {"calls": [{"n_trials": 2, "gc_after_trial": True}]}),
    "enqueued": (build, {"prepare": enqueue}),
    "user attributes": (noting, {}),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_search_at_width_one_leaves_and_shows_what_stock_optuna_does(scenario, driver):
    objective, options = SCENARIOS[scenario]

    assert record(driver, objective, **options) == record(Driver(), objective, **options)


def test_a_step_reported_twice_is_ignored_with_a_warning(driver):
    def objective(trial):
        trial.report(7.0, 1)
        return metrics_task(0.5, 0.4, 0.3)

    def warned(driver):
        with pytest.warns(UserWarning, match="already reported") as warnings:
            seen = record(driver, objective)
        return seen, [str(warning.message) for warning in warnings]

    assert warned(driver) == warned(Driver())


def test_metric_names_of_the_study_are_logged(driver):
    def named(study):
        with pytest.warns(optuna.exceptions.ExperimentalWarning):
            study.set_metric_names(["error"])

    assert record(driver, build, prepare=named) == record(Driver(), build, prepare=named)


@pytest.mark.parametrize("value", [None, "good", nn.Linear(2, 2), [nn.Linear(2, 2)]], ids=repr)
def test_a_value_that_is_no_number_is_answered_with_the_name_of_the_task(value, driver):
    seen = record(driver, returning(value))

    assert len(seen.hints) == 4
    assert "hydra_tune.TrainTask" in seen.hints[0]
    assert type(value).__name__ in seen.hints[0]
    assert seen == record(Driver(), returning(value))


@pytest.mark.parametrize("value", [math.nan, (1.0, 2.0), 0.5, torch.tensor(0.5)], ids=repr)
def test_a_number_is_not_answered_with_the_name_of_the_task(value, driver):
    assert record(driver, returning(value)).hints == []


def test_a_nested_search_is_refused_and_leaves_the_outer_one_running(driver):
    def nesting(study, trial):
        with pytest.raises(RuntimeError, match="Nested invocation"):
            study.optimize(build, n_trials=1)

    seen = record(driver, build, callbacks=[nesting])

    assert seen == record(Driver(), build, callbacks=[nesting])
    assert len(seen.called_back) == 4


@pytest.mark.parametrize("asked", [True, False])
def test_garbage_is_collected_after_each_trial_if_asked(asked, driver):
    collected = []

    def note(phase, info):
        if phase == "start" and info["generation"] == 2:
            collected.append(info)

    gc.collect()
    gc.disable()
    gc.callbacks.append(note)
    try:
        record(driver, build, calls=[{"n_trials": 3, "gc_after_trial": asked}])
    finally:
        gc.callbacks.remove(note)
        gc.enable()

    assert len(collected) == (3 if asked else 0)


def test_what_a_callback_does_to_its_trial_stays_there(driver):
    def spoil(study, trial):
        trial.values = [math.inf]
        trial.intermediate_values.clear()

    assert record(driver, build, callbacks=[spoil]) == record(driver, build)


def test_the_storage_may_drop_its_session_in_the_end(driver, monkeypatch):
    dropped = []

    def remove_session(storage):
        dropped.append(storage)

    monkeypatch.setattr(optuna.storages.InMemoryStorage, "remove_session", remove_session)

    record(driver, build)

    assert len(dropped) == 1


@pytest.mark.parametrize("kind", [list, iter])
def test_callbacks_are_looked_up_after_each_trial(kind, driver):
    """A list may grow during the search; an iterator is used up by the first trial."""

    def called(driver):
        seen = []

        def note(study, trial):
            seen.append(trial.number)
            if kind is list and trial.number == 0:
                callbacks.append(lambda study, trial: seen.append("later"))

        callbacks = kind([note])
        driver.optimize(driver.create_study(), build, n_trials=3, callbacks=callbacks)
        return seen

    assert called(driver) == called(Driver()) == ([0, "later", 1, "later", 2, "later"] if kind is list else [0])
