"""What a pool does otherwise than Optuna on purpose: each line of "Differences from plain Optuna", on both sides."""

import threading
import warnings
from importlib import import_module

import optuna
import pytest
from optuna.samplers import RandomSampler
from torch.optim import SGD

import hydra_tune_optuna
from hydra_tune.errors import TaskError
from tests.contract.optuna_drivers import Driver, batches, build, make_pool, net, optuna_log, record, small_task

WIDTH = 3


@pytest.fixture(scope="module", params=["plain", "hydra"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def narrow(kind):
    with make_pool(kind, 1) as pool:
        yield Driver(pool)


@pytest.fixture(scope="module")
def wide(kind):
    with make_pool(kind, WIDTH) as pool:
        yield Driver(pool)


def states(study):
    return [trial.state.name for trial in study.trials]


class Reseeding(RandomSampler):
    """Counts how often it is given another seed."""

    def __init__(self):
        super().__init__(seed=1)
        self.reseeded = 0

    def reseed_rng(self):
        self.reseeded += 1
        super().reseed_rng()


def test_samplers_are_not_reseeded_for_several_jobs(wide):
    def reseeded(driver):
        sampler = Reseeding()
        driver.optimize(driver.create_study(sampler=sampler), lambda trial: 1.0, n_trials=4, n_jobs=2)
        return sampler.reseeded

    assert reseeded(Driver()) == 4
    assert reseeded(wide) == 0


def test_objectives_that_return_a_number_run_in_the_calling_thread_one_by_one(wide):
    def threads(driver):
        seen = set()

        def objective(trial):
            seen.add(threading.current_thread())
            return 1.0

        driver.optimize(driver.create_study(), objective, n_trials=6, n_jobs=WIDTH)
        return seen

    assert threading.current_thread() not in threads(Driver())
    assert threads(wide) == {threading.current_thread()}


def test_an_uncaught_error_of_the_last_trial_is_raised(wide):
    def objective(trial):
        if trial.number == 3:
            raise ValueError("the last one")
        return 1.0

    stock, ours = Driver().create_study(), wide.create_study()
    Driver().optimize(stock, objective, n_trials=4, n_jobs=2)  # is lost
    with pytest.raises(ValueError, match="the last one"):
        wide.optimize(ours, objective, n_trials=4, n_jobs=2)
    assert states(stock) == states(ours) == ["COMPLETE"] * 3 + ["FAIL"]


def test_an_error_in_a_callback_cancels_what_runs(wide):
    def broken(study, trial):
        raise ValueError("broken callback")

    others = threading.Barrier(2, timeout=60)

    def waiting(trial):
        if trial.number < 2:
            others.wait()  # both have been asked for
        return 1.0

    stock = optuna.create_study()
    with pytest.raises(ValueError, match="broken"):
        stock.optimize(waiting, n_trials=9, n_jobs=2, callbacks=[broken])
    assert set(states(stock)) == {"COMPLETE"}

    ours = wide.create_study(pruner=optuna.pruners.NopPruner())
    with pytest.raises(ValueError, match="broken"):
        wide.optimize(
            ours, lambda trial: small_task(epochs=1_000_000 if trial.number else 1), n_trials=9, callbacks=[broken]
        )
    assert states(ours)[0] == "COMPLETE"
    assert set(states(ours)[1:]) == {"FAIL"}


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit])
def test_a_trial_interrupted_by_what_is_no_exception_is_failed(error, narrow):
    def objective(trial):
        raise error

    stock, ours = Driver().create_study(), narrow.create_study()
    for driver, study in ((Driver(), stock), (narrow, ours)):
        with pytest.raises(error):
            driver.optimize(study, objective, n_trials=2)
    assert states(stock) == ["RUNNING"]
    assert states(ours) == ["FAIL"]


def test_ctrl_c_is_not_to_be_caught(narrow):
    def objective(trial):
        raise KeyboardInterrupt

    stock, ours = Driver().create_study(), narrow.create_study()
    Driver().optimize(stock, objective, n_trials=2, catch=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        narrow.optimize(ours, objective, n_trials=2, catch=KeyboardInterrupt)
    assert (states(stock), states(ours)) == (["FAIL"] * 2, ["FAIL"])


def test_where_optuna_trips_over_its_own_assertion_the_error_is_shown_and_the_trial_failed(narrow):
    value = "0.25"
    stock, ours = record(Driver(), lambda trial: value), record(narrow, lambda trial: value)

    assert stock.raised == ["AssertionError('Should not reach.')"]
    assert "'RUNNING'" in stock.trials[0]
    assert ours.raised[0].startswith("TypeError('must be real number, not ")
    assert "'FAIL'" in ours.trials[0]


def test_an_objective_that_fails_its_own_trial_is_told_so(narrow):
    def objective(trial):
        trial.study.tell(trial, state=optuna.trial.TrialState.FAIL)
        return 1.0

    stock, ours = record(Driver(), objective), record(narrow, objective)

    assert stock.raised == ["AssertionError('Should not reach.')"]
    assert ours.raised == ["ValueError('Cannot tell a FAIL trial.')"]
    assert "because of the following error: ValueError('Cannot tell a FAIL trial.')" in ours.log[1]


def test_the_bar_of_a_time_is_shown_for_any_number_of_jobs(wide, capsys):
    def shown(driver):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            study = driver.create_study(sampler=RandomSampler(seed=1))
            driver.optimize(study, lambda trial: 1.0, timeout=0.05, n_jobs=2, show_progress_bar=True)
        return [str(warning.message) for warning in caught], "00:00/00:00" in capsys.readouterr().err

    assert shown(Driver()) == (["The timeout-based progress bar is not supported with n_jobs != 1."], False)
    assert shown(wide) == ([], True)


def test_functions_of_a_task_cannot_stop_the_study(narrow):
    def objective(trial):
        def train():
            trial.study.stop()
            return batches()

        return small_task(train=train)

    assert record(Driver(), objective).raised == record(narrow, lambda trial: trial.study.stop()).raised == []
    (raised,) = record(narrow, objective).raised
    assert "`Study.stop` is supposed to be invoked inside an objective function or a callback" in raised


@pytest.mark.parametrize("part", ["model", "optimizer", "train"])
def test_a_parameter_drawn_in_a_function_of_the_task_fails_the_trial_by_name(part, narrow):
    parts = {"model": net, "optimizer": lambda parameters: SGD(parameters, lr=0.1), "train": batches}

    def objective(trial):
        def draws(*arguments):
            trial.suggest_int("drawn", 1, 2)  # drawn by the objective before: only looked up
            trial.suggest_float("late", 0.0, 1.0)
            return parts[part](*arguments)

        trial.suggest_int("drawn", 1, 2)
        return small_task(**{part: draws})

    seen = record(narrow, objective, calls=[{"n_trials": 2, "catch": TaskError}])

    assert [state for _, state in seen.called_back] == ["FAIL", "FAIL"]
    assert all("late" not in trial for trial in seen.trials)
    assert any("trial 1 draws 'late' in a function of its task" in line for line in seen.log)


def test_a_number_of_metrics_that_does_not_fit_fails_before_training(narrow):
    trained = []

    def train():
        trained.append(1)
        return batches()

    study = narrow.create_study(directions=["minimize", "maximize"])
    with optuna_log() as log:
        narrow.optimize(study, lambda trial: small_task(train=train), n_trials=1)

    assert states(study) == ["FAIL"]
    assert trained == []
    assert "The number of the values 1 did not match the number of the objectives 2" in log[0]


@pytest.mark.parametrize("n_jobs", [0, -2])
def test_a_number_of_jobs_that_makes_no_sense_is_a_value_error_here_as_there(n_jobs, narrow):
    for driver, words in (
        (Driver(), "max_workers must be greater than 0"),
        (narrow, "n_jobs must be -1 or at least 1"),
    ):
        with pytest.raises(ValueError, match=words):
            driver.optimize(driver.create_study(), build, n_trials=1, n_jobs=n_jobs)


def test_submodules_are_attributes_and_not_to_be_imported_by_path():
    assert hydra_tune_optuna.samplers is optuna.samplers
    with pytest.raises(ModuleNotFoundError):
        import_module("hydra_tune_optuna.samplers")


def test_trials_have_what_those_of_optuna_have(narrow):
    """They are of a class of their own, for Ctrl-C is held back while their methods run."""
    seen = []
    record(narrow, lambda trial: seen.append(trial) or 1.0)

    assert all(isinstance(trial, optuna.Trial) for trial in seen)
    assert {name for name in dir(seen[0]) if not name.startswith("_")} == {
        name for name in dir(optuna.create_study().ask()) if not name.startswith("_")
    }
