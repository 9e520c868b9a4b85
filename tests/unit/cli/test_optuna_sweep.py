"""A sweep's words become Optuna's sampler and pruner, and what is missing is named."""

import sys
from importlib.metadata import EntryPoint

import optuna
import pytest

from hydra_tune import HydraExecutor
from hydra_tune.cli.display.board import SweepProgressTracker
from hydra_tune.cli.run import tuners
from hydra_tune.cli.sweep_file.domains import ChoiceDomain, IntDomain
from hydra_tune.cli.sweep_file.request import SweepRequest, TrialRecord
from hydra_tune.cli.sweep_file.spec import PruningRule, SweepSpec
from hydra_tune.errors import ConfigError
from hydra_tune_optuna import optuna_internals
from hydra_tune_optuna.sweep import (
    _num_left,
    _objective,
    _record,
    check_sweep,
    make_pruner,
    make_sampler,
    run_sweep,
)
from tests.unit.pool.tasks import task


def spec(**more):
    return SweepSpec(file="space.yaml", task="train:build", metric="val_loss", **more)


@pytest.mark.parametrize(
    ("method", "sampler"), [("bayes", optuna.samplers.TPESampler), ("random", optuna.samplers.RandomSampler)]
)
def test_method_is_the_sampler_and_seed_its_seed(method, sampler):
    def first(seed):
        study = optuna.create_study(sampler=make_sampler(spec(method=method, seed=seed)))
        return study.ask().suggest_float("x", 0, 1)

    assert type(make_sampler(spec(method=method))) is sampler
    assert first(3) == first(3) != first(4)


def test_grid_has_every_point():
    domains = {"a": ChoiceDomain(values=("x", "y")), "b": IntDomain(low=0, high=4, step=2)}
    study = optuna.create_study(sampler=make_sampler(spec(method="grid", parameters=domains)))
    study.optimize(lambda trial: 0 * len(trial.suggest_categorical("a", ["x", "y"])) + trial.suggest_int("b", 0, 4))
    points = {(trial.params["a"], trial.params["b"]) for trial in study.trials}
    assert points == {(a, b) for a in "xy" for b in (0, 2, 4)}


@pytest.mark.parametrize(
    ("pruning", "pruner", "attributes"),
    [
        (None, optuna.pruners.NopPruner, {}),
        (
            PruningRule(type="hyperband", options={"min_iter": 2, "max_iter": 27, "eta": 3}),
            optuna.pruners.HyperbandPruner,
            {"_min_resource": 2, "_max_resource": 27, "_reduction_factor": 3},
        ),
        (
            PruningRule(type="hyperband", options={"min_iter": 1, "eta": 3}),
            optuna.pruners.HyperbandPruner,
            {"_max_resource": "auto"},
        ),
        (
            PruningRule(type="successive_halving", options={"min_iter": 2, "eta": 4, "min_early_stopping_rate": 1}),
            optuna.pruners.SuccessiveHalvingPruner,
            {"_min_resource": 2, "_reduction_factor": 4, "_min_early_stopping_rate": 1},
        ),
        (
            PruningRule(
                type="median",
                options={"n_startup_trials": 1, "n_warmup_steps": 2, "interval_steps": 3, "n_min_trials": 4},
            ),
            optuna.pruners.MedianPruner,
            {"_n_startup_trials": 1, "_n_warmup_steps": 2, "_interval_steps": 3, "_n_min_trials": 4},
        ),
    ],
)
def test_early_terminate_is_the_pruner(pruning, pruner, attributes):
    made = make_pruner(pruning)
    assert type(made) is pruner
    assert {name: getattr(made, name) for name in attributes} == attributes


def test_the_tuner_is_found_by_its_entry_point():
    assert tuners.find(tuners.TUNERS, "optuna") is run_sweep


def test_a_tuner_that_is_not_installed_is_named_with_its_extra(monkeypatch):
    with pytest.raises(ConfigError, match=r"pip install 'hydra-tune\[ax\]'"):
        tuners.find(tuners.TUNERS, "ax")
    monkeypatch.delitem(sys.modules, "hydra_tune_optuna.sweep")
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"a sweep needs optuna, .* pip install 'hydra-tune\[optuna\]'"):
        tuners.find(tuners.TUNERS, "optuna")


def test_a_tuner_broken_in_another_way_says_so_itself(monkeypatch):
    entry = EntryPoint("optuna", "hydra_tune_optuna.nowhere:run", "hydra_tune.tuners")
    monkeypatch.setattr(tuners, "entry_points", lambda **_: [entry])
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        tuners.find(tuners.TUNERS, "optuna")


@pytest.mark.parametrize("made", [False, True])
def test_there_has_to_be_something_to_go_on_with(tmp_path, monkeypatch, made):
    path = tmp_path / "trials.db"
    if made:
        optuna.create_study(study_name="other", storage=f"sqlite:///{path}")
    monkeypatch.chdir(tmp_path)
    message = (
        f"there is no study 'first' in sqlite:///{path} to go on with; give the command in the folder of the first run"
    )
    with pytest.raises(ConfigError, match=message):
        check_sweep(spec(storage="sqlite:///trials.db", study="first", run_cap=1), resume=True)
    assert path.exists() == made


@pytest.mark.parametrize(
    ("more", "ended", "num_going_on", "expected"),
    [
        ({"run_cap": 8}, ["completed", "pruned", "failed"], 2, (4, 9)),
        ({"run_cap": 8}, ["completed"] * 7, 3, (0, 10)),
        ({"method": "grid", "parameters": {"a": ChoiceDomain(values=(1, 2, 3, 4))}}, ["failed"], 2, (1, 4)),
        (
            {"method": "grid", "parameters": {"a": ChoiceDomain(values=(1, 2, 3, 4))}, "run_cap": 3},
            ["failed"],
            2,
            (0, 3),
        ),
        ({}, ["completed"], 2, (None, None)),
    ],
)
def test_trials_that_go_on_are_not_asked_for_again(more, ended, num_going_on, expected):
    earlier = tuple(
        TrialRecord(number=number, state=state, value=None, params={}) for number, state in enumerate(ended)
    )
    again = frozenset(record.number for record in earlier if record.state == "failed")
    assert _num_left(spec(**more), earlier, num_going_on, again) == expected


def test_trials_that_failed_in_this_run_are_not_asked_for_again():
    earlier = tuple(TrialRecord(number=number, state="failed", value=None, params={}) for number in range(3))
    assert _num_left(spec(run_cap=5), earlier, 0, frozenset({0})) == (3, 6)


def test_a_completed_trial_whose_weights_are_recovered_is_no_trial_of_this_run():
    study = optuna.create_study()
    trial = study.ask()
    width = trial.suggest_int("width", 1, 8)
    study.tell(trial, 1.0)
    swept = spec(parameters={"width": IntDomain(low=1, high=8)})
    board = SweepProgressTracker(swept, print)
    board.opened("first", tuple(_record(trial) for trial in study.trials), 1)
    asked, built = [], []

    def build(width):
        built.append(width)
        return task()

    with HydraExecutor(devices="cpu:1") as executor:
        before = board.snapshot(executor.stats()).trials
        request = SweepRequest(spec=swept, executor=executor, build=build, observer=board)
        _objective(request, asked.append)(optuna_internals.as_running(study, study.trials[0]))
        assert board.snapshot(executor.stats()).trials == before
    assert (built, asked) == ([width], [])


def test_the_error_of_a_recovery_is_no_error_of_a_completed_trial():
    study = optuna.create_study()
    study.tell(study.ask(), 1.0)
    board = SweepProgressTracker(spec(), print)
    board.opened("first", tuple(_record(trial) for trial in study.trials), 1)

    def build(trial):
        raise ValueError(f"no trial {trial.number}")

    with HydraExecutor(devices="cpu:1") as executor:
        before = board.snapshot(executor.stats()).trials
        request = SweepRequest(spec=spec(), executor=executor, build=build, observer=board)
        with pytest.raises(ValueError, match="no trial 0"):
            _objective(request, lambda _: None)(optuna_internals.as_running(study, study.trials[0]))
        assert board.snapshot(executor.stats()).trials == before
