"""Several trials in flight: what is asked, drained, cancelled and let go, whichever pool trains."""

import gc
import os
import signal
import threading
import time
import weakref
from functools import partial
from types import SimpleNamespace

import optuna
import pytest
from torch import nn

import hydra_tune_optuna
from hydra_tune import HydraTuneError
from hydra_tune_optuna import TrialCancelledError
from tests.contract.optuna_drivers import (
    Driver,
    batches,
    build,
    make_pool,
    metrics_task,
    optuna_log,
    record,
    small_task,
)

WIDTH = 4
ENDED = {"completed", "pruned", "cancelled", "failed"}

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")


@pytest.fixture(scope="module", params=["plain", "hydra"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def pool(kind):
    with make_pool(kind, WIDTH) as pool:
        yield pool


@pytest.fixture
def jobs(pool, monkeypatch):
    """The jobs that the study submits."""
    submitted = []
    submit = pool.submit

    def noting(task, name=None, events=None):
        submitted.append(submit(task, name=name, events=events))
        return submitted[-1]

    monkeypatch.setattr(pool, "submit", noting)
    return submitted


def make_study(pool, **options):
    options = {"sampler": optuna.samplers.RandomSampler(seed=1), "pruner": optuna.pruners.NopPruner(), **options}
    return hydra_tune_optuna.create_study(**options, executor=pool)


def states(study):
    return [trial.state.name for trial in study.trials]


def endless(**options):
    """A task that ends only when it is cancelled or pruned."""
    return small_task(epochs=1_000_000, **options)


class Watched:
    """Builds tasks and keeps the largest number of trials that were in flight at once."""

    def __init__(self):
        self.most = 0

    def __call__(self, trial):
        running = trial.study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,))
        self.most = max(self.most, len(running))
        return build(trial)


@pytest.mark.parametrize(("n_jobs", "expected"), [(1, WIDTH), (-1, WIDTH), (2, 2), (3, 3), (100, WIDTH)], ids=str)
def test_the_pool_sets_the_width_and_a_larger_number_of_jobs_than_one_caps_it(n_jobs, expected, pool):
    watched = Watched()
    study = make_study(pool)

    study.optimize(watched, n_trials=9, n_jobs=n_jobs)

    assert watched.most == expected
    assert states(study) == ["COMPLETE"] * 9


@pytest.mark.parametrize("n_jobs", [0, -2])
def test_a_number_of_jobs_that_makes_no_sense_is_refused(n_jobs, pool):
    study = make_study(pool)

    with pytest.raises(ValueError, match=f"n_jobs must be -1 or at least 1, not {n_jobs}"):
        study.optimize(build, n_trials=1, n_jobs=n_jobs)
    assert study.trials == []


def test_trials_are_new_ones_of_each_call(pool):
    study = make_study(pool)

    study.optimize(build, n_trials=5)
    study.optimize(build, n_trials=6)

    assert len(study.trials) == 11


def test_values_and_reports_are_those_of_the_plain_loop_however_many_run_beside(pool):
    seen = record(Driver(pool), build, calls=[{"n_trials": 9}])

    stock = record(Driver(), build, calls=[{"n_trials": 9}])
    assert seen.trials == stock.trials
    assert sorted(seen.called_back) == sorted(stock.called_back)


def failing(number, error, task=build):
    def objective(trial):
        if trial.number == number:
            raise error
        return task(trial)

    return objective


def test_an_uncaught_error_lets_the_running_trials_finish_and_then_raises(pool):
    seen = []
    study = make_study(pool)

    with pytest.raises(ValueError, match="no"):
        study.optimize(
            failing(3, ValueError("no")), n_trials=50, callbacks=[lambda study, trial: seen.append(trial.number)]
        )

    by_number = dict(enumerate(states(study)))
    assert by_number.pop(3) == "FAIL"
    assert set(by_number.values()) == {"COMPLETE"}
    assert len(by_number) < 3 + WIDTH
    assert sorted(seen) == sorted(by_number)  # each but the failed one


def test_the_first_of_several_uncaught_errors_is_raised(pool):
    all_in_flight = threading.Event()

    def objective(trial):
        def train():
            assert all_in_flight.wait(60)
            raise KeyError(trial.number)

        if trial.number == WIDTH - 1:
            all_in_flight.set()
        return small_task(train=train)

    study = make_study(pool)
    with optuna_log() as log, pytest.raises(KeyError) as raised:
        study.optimize(objective, n_trials=50)

    failed = [line for line in log if "because of the following error" in line]
    assert states(study) == ["FAIL"] * WIDTH
    assert len(failed) == WIDTH
    assert repr(raised.value) in failed[0]


@pytest.mark.cases(1)
def test_an_interrupt_raised_in_training_cancels_the_running_trials(pool, jobs):
    def objective(trial):
        def train():
            raise KeyboardInterrupt

        return endless() if trial.number < WIDTH - 1 else small_task(train=train)

    study = make_study(pool)
    with pytest.raises(KeyboardInterrupt):
        study.optimize(objective, n_trials=50)

    assert states(study) == ["FAIL"] * WIDTH
    assert [job.state for job in jobs] == ["cancelled"] * (WIDTH - 1) + ["failed"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("error", [RuntimeError("broken callback"), KeyboardInterrupt()], ids=repr)
def test_what_a_callback_raises_cancels_and_fails_the_running_trials(error, pool, jobs):
    def objective(trial):
        return small_task() if trial.number == 1 else endless()

    def broken(study, trial):
        raise error

    study = make_study(pool)
    with optuna_log() as log, pytest.raises(type(error)):
        study.optimize(objective, n_trials=50, callbacks=[broken])

    assert states(study)[1] == "COMPLETE"
    assert set(states(study)) == {"COMPLETE", "FAIL"}
    assert states(study).count("COMPLETE") == 1
    assert [job.state in ENDED for job in jobs] == [True] * len(study.trials)
    failed = [line for line in log if "failed with parameters" in line]
    assert len(failed) == states(study).count("FAIL")
    assert repr(error) in failed[0]


def test_ctrl_c_fails_the_running_trials_and_ends_their_jobs(pool, jobs):
    def interrupting():
        os.kill(os.getpid(), signal.SIGINT)
        return batches()

    def objective(trial):
        return endless(train=interrupting) if trial.number == WIDTH - 1 else endless()

    study = make_study(pool)
    with pytest.raises(KeyboardInterrupt):
        study.optimize(objective)

    assert set(states(study)) == {"FAIL"}
    assert {job.state for job in jobs} == {"cancelled"}


def test_after_ctrl_c_the_pool_and_the_study_go_on(pool):
    study = make_study(pool)
    with pytest.raises(KeyboardInterrupt):
        study.optimize(failing(2, KeyboardInterrupt(), lambda trial: endless()), n_trials=9)

    study.optimize(build, n_trials=2)

    assert states(study) == ["FAIL"] * 3 + ["COMPLETE"] * 2


def test_stop_lets_the_running_trials_finish(pool):
    study = make_study(pool)

    study.optimize(build, callbacks=[lambda study, trial: study.stop()])

    assert set(states(study)) == {"COMPLETE"}
    assert 1 <= len(study.trials) <= WIDTH + 1


def test_an_objective_that_stops_the_study_lets_the_running_trials_finish(pool):
    def objective(trial):
        if trial.number == 5:
            trial.study.stop()
        return build(trial)

    study = make_study(pool)
    study.optimize(objective)

    assert states(study) == ["COMPLETE"] * 6


@pytest.mark.parametrize("counted", [None, (optuna.trial.TrialState.COMPLETE,)], ids=["all", "completed"])
def test_a_limit_on_all_trials_of_a_study_holds_but_for_those_in_flight(counted, pool):
    study = make_study(pool)
    study.optimize(build, n_trials=2)

    study.optimize(build, callbacks=[optuna.study.MaxTrialsCallback(8, states=counted)])

    assert set(states(study)) == {"COMPLETE"}
    assert 8 <= len(study.trials) <= 8 + WIDTH


def test_no_trial_starts_after_the_time_is_out_and_running_ones_finish(pool, monkeypatch):
    """It is out while there is room for one more."""
    now, begun, is_out = [0.0], [], threading.Event()
    monkeypatch.setattr("hydra_tune_optuna.search.driver.time", SimpleNamespace(monotonic=lambda: now[0]))

    def objective(trial):
        begun.append(now[0])
        if trial.number == WIDTH - 2:
            now[0] = 10.0
            is_out.set()

        def late():
            assert is_out.wait(60)
            yield from batches()

        return small_task(train=late, epochs=1)

    study = make_study(pool)
    study.optimize(objective, timeout=10.0)
    assert states(study) == ["COMPLETE"] * (WIDTH - 1)
    assert begun == [0.0] * (WIDTH - 1)


@pytest.mark.parametrize(
    "task",
    [partial(small_task, metric="val_accuracy", evaluate=lambda module, batch: {"error": 1.0}), None],
    ids=["of the task", "before any report"],
)
def test_a_metric_that_is_not_reported_is_named(task, pool):
    objective = (lambda trial: task()) if task else (lambda trial: small_task(report_every=1000))
    study = make_study(pool)

    with pytest.raises(HydraTuneError, match=r"val_accuracy.*error" if task else "report_every"):
        study.optimize(objective, n_trials=1)
    assert states(study) == ["FAIL"]


@pytest.mark.parametrize("directions", [["minimize"], ["minimize", "maximize", "minimize"]])
def test_metrics_that_do_not_fit_the_objectives_fail_before_training(directions, pool, jobs):
    def evaluate(module, batch):
        return {"error": 1.0, "cost": 2.0}

    study = make_study(pool, directions=directions)
    with optuna_log() as log:
        study.optimize(lambda trial: small_task(evaluate=evaluate, metric=("val_error", "val_cost")), n_trials=2)

    assert states(study) == ["FAIL"] * 2
    assert jobs == []
    assert "values 2 did not match the number of the objectives" in log[0]
    assert "('val_error', 'val_cost')" in log[0]


def test_the_best_report_of_several_objectives_is_refused(pool):
    def objective(trial):
        return small_task(evaluate=dict, metric=("val_error", "val_cost"), result="best")

    with pytest.raises(HydraTuneError, match="result='best' needs one metric, not 2"):
        make_study(pool, directions=["minimize", "minimize"]).optimize(objective, n_trials=1)


@pytest.mark.parametrize("fails", [False, True], ids=["all complete", "all fail"])
def test_a_grid_is_searched_once_however_wide_the_pool(fails, kind):
    grid = {"x": [1, 2, 3], "y": [1, 2]}
    visited = []

    def objective(trial):
        visited.append((trial.suggest_int("x", 1, 3), trial.suggest_int("y", 1, 2)))
        return metrics_task(0.5, float("nan") if fails else 0.25)

    with make_pool(kind, 8) as wide:
        study = make_study(wide, sampler=optuna.samplers.GridSampler(grid))
        study.optimize(objective)

    assert sorted(visited) == [(x, y) for x in (1, 2, 3) for y in (1, 2)]
    assert states(study) == ["FAIL" if fails else "COMPLETE"] * 6


@pytest.mark.cases(1)
@pytest.mark.parametrize("exhaustive", ["grid", "brute force"])
def test_what_a_callback_enqueues_is_run_though_all_points_are_in_flight(exhaustive, pool):
    samplers = {
        "grid": optuna.samplers.GridSampler({"seed": [0, 1, 2]}),
        "brute force": optuna.samplers.BruteForceSampler(seed=1, avoid_premature_stop=True),
    }

    def enqueue(study, trial):
        if len(study.trials) == 3:
            study.enqueue_trial({"seed": trial.params["seed"]})

    def objective(trial):
        # The sampler stops the search at the end of the last point, so some are to be in flight long after the first.
        return small_task(seed=trial.suggest_int("seed", 0, 2), epochs=(4, 100, 400, 4)[trial.number])

    study = make_study(pool, sampler=samplers[exhaustive])
    study.optimize(objective, callbacks=[enqueue])

    assert states(study) == ["COMPLETE"] * 4


@pytest.mark.parametrize(("value", "state"), [(0.5, "COMPLETE"), (float("nan"), "FAIL")])
def test_an_enqueued_trial_may_end_while_one_point_of_a_grid_is_left(kind, value, state):
    def enqueue(study, trial):
        if trial.number == 0:
            study.enqueue_trial({"seed": 7})

    def objective(trial):
        return metrics_task(0.5, value if trial.suggest_int("seed", 0, 9) == 7 else 0.25)

    with make_pool(kind, 1) as narrow:
        study = make_study(narrow, sampler=optuna.samplers.GridSampler({"seed": [0, 1]}))
        study.optimize(objective, callbacks=[enqueue])

    assert [(trial.params["seed"] == 7, trial.state.name) for trial in study.trials] == [
        (False, "COMPLETE"),
        (True, state),
        (False, "COMPLETE"),
    ]


def test_an_exhausted_grid_repeats_one_point_and_stops_as_in_stock_optuna(pool):
    def objective(trial):
        return small_task(trial.suggest_float("rate", 0.1, 0.2))

    options = {
        "sampler": lambda: optuna.samplers.GridSampler({"rate": [0.1, 0.2]}, seed=1),
        "calls": [{}, {"n_trials": 5}],
    }
    seen = record(Driver(pool), objective, **options)

    assert seen.trials == record(Driver(), objective, **options).trials
    assert len(seen.trials) == 3


@pytest.mark.parametrize("strict", [False, True], ids=["default", "avoid_premature_stop"])
def test_brute_force_visits_each_point_of_a_conditional_space_once(strict, kind):
    visited = []

    def objective(trial):
        kind = trial.suggest_categorical("kind", ["a", "b"])
        depth = trial.suggest_int("depth", 1, 3) if kind == "b" else 0
        visited.append((kind, depth))
        return small_task()

    sampler = optuna.samplers.PartialFixedSampler(
        {}, optuna.samplers.BruteForceSampler(seed=1, avoid_premature_stop=strict)
    )
    with make_pool(kind, 8) as wide:
        make_study(wide, sampler=sampler).optimize(objective)

    assert sorted(visited) == [("a", 0), ("b", 1), ("b", 2), ("b", 3)]


@pytest.mark.parametrize("pruner", [optuna.pruners.HyperbandPruner(max_resource=6), optuna.pruners.MedianPruner()])
def test_pruned_trials_make_room_for_others(pruner, pool):
    study = make_study(pool, pruner=pruner, sampler=optuna.samplers.TPESampler(seed=1))

    # Each trial is worse than all before, so that some are pruned in whatever order the trials end.
    study.optimize(lambda trial: metrics_task(*[trial.suggest_float("rate", 1, 2) + trial.number] * 6), n_trials=24)

    assert {"COMPLETE", "PRUNED"} == set(states(study))
    for trial in study.get_trials(states=(optuna.trial.TrialState.PRUNED,)):
        assert trial.value == trial.intermediate_values[trial.last_step]


def test_a_job_cancelled_from_outside_fails_its_trial_by_name(pool, jobs):
    def objective(trial):
        if trial.number == 2:
            jobs[1].cancel()
        return endless() if trial.number == 1 else small_task()

    study = make_study(pool)
    study.optimize(objective, n_trials=3, catch=TrialCancelledError)
    assert states(study) == ["COMPLETE", "FAIL", "COMPLETE"]

    jobs.clear()
    with pytest.raises(TrialCancelledError, match=r"trial 1 was cancelled by job\.cancel\(\)"):
        make_study(pool).optimize(objective, n_trials=3)


@pytest.mark.parametrize("used", [False, True], ids=["unused", "used"])
def test_an_executor_that_is_shut_down_is_named(used, kind):
    pool = make_pool(kind, 2)
    if used:
        pool.run([small_task()])
    pool.shutdown()
    study = make_study(pool)

    with pytest.raises(HydraTuneError, match="shut down"):
        study.optimize(build, catch=Exception)
    assert states(study) in ([], ["FAIL"])


def test_an_executor_that_is_shut_down_during_a_search_ends_it(kind):
    pool = make_pool(kind, 2)
    closer = threading.Thread(target=pool.shutdown)

    def closing():
        if closer.ident is None:
            closer.start()
        return batches()

    study = make_study(pool)
    with pytest.raises(HydraTuneError, match="shut"):
        study.optimize(lambda trial: endless(train=closing), catch=Exception)
    closer.join()

    assert set(states(study)) == {"FAIL"}


def test_two_studies_share_a_pool_at_once(pool):
    studies = [make_study(pool), make_study(pool)]
    threads = [threading.Thread(target=study.optimize, args=(build,), kwargs={"n_trials": 6}) for study in studies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [states(study) for study in studies] == [["COMPLETE"] * 6] * 2
    assert [trial.value for trial in studies[0].trials] == [trial.value for trial in studies[1].trials]


def test_models_are_let_go_when_their_trial_is_told(pool):
    alive = weakref.WeakSet()
    most = []

    def model():
        alive.add(module := nn.Linear(3, 1))
        return module

    def settled(count):
        """How many there are: so many, once the frames of workers are gone that have run their last units."""
        end = time.monotonic() + 60
        while True:
            gc.collect()
            if len(alive) <= count or time.monotonic() > end:
                return len(alive)
            time.sleep(0.002)

    def count(study, trial):
        most.append(settled(3))

    make_study(pool).optimize(lambda trial: small_task(model=model), n_trials=7, n_jobs=2, callbacks=[count])

    assert max(most) <= 3  # two in flight, one just told
    assert settled(0) == 0


def test_callbacks_run_in_the_calling_thread(pool):
    threads = set()

    make_study(pool).optimize(
        build, n_trials=5, callbacks=[lambda study, trial: threads.add(threading.current_thread())]
    )

    assert threads == {threading.current_thread()}
