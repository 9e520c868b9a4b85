"""Storages, heartbeats, copies and the progress bar, with real files and real threads."""

import copy
import pickle
import signal
import threading
import time
from datetime import datetime, timedelta
from functools import partial

import optuna
import pytest
import sqlalchemy

import hydra_tune_optuna
from hydra_tune import HydraTuneError
from hydra_tune_optuna.search import heartbeat
from hydra_tune_optuna.search.heartbeat import StudyHeartbeatSender
from tests.contract.optuna_drivers import (
    Driver,
    RetryStale,
    build,
    make_pool,
    optuna_log,
    record,
    small_task,
    trials_of,
    when_stale,
)

# Typed, for sqlite3 itself no longer takes dates from Python 3.12 on.
HEARTBEATS = sqlalchemy.text("UPDATE trial_heartbeats SET heartbeat = :at").bindparams(
    sqlalchemy.bindparam("at", type_=sqlalchemy.DateTime())
)

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")

STORAGES = {
    "memory": lambda folder: None,
    "sqlite": lambda folder: f"sqlite:///{folder}/study.db",
    "journal": lambda folder: optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(folder / "study.log"))
    ),
}


@pytest.fixture(scope="module", params=["plain", "hydra"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def narrow(kind):
    with make_pool(kind, 1) as pool:
        yield pool


@pytest.fixture(scope="module")
def wide(kind):
    with make_pool(kind, 3) as pool:
        yield pool


@pytest.fixture
def heartbeats(tmp_path):
    """An SQLite storage with a heartbeat, closed afterwards, and the ids of the trials it was told are alive."""
    storage = optuna.storages.RDBStorage(
        f"sqlite:///{tmp_path}/study.db",
        heartbeat_interval=60,
        grace_period=120,
        **when_stale(RetryStale()),
    )
    beats = []
    beat = storage.record_heartbeat

    def noting(trial_id):
        beat(trial_id)
        beats.append((trial_id, threading.current_thread().name))

    storage.record_heartbeat = noting
    yield storage, beats
    storage.remove_session()
    storage.engine.dispose()


@pytest.mark.cases(1)
@pytest.mark.parametrize("storage", STORAGES)
def test_a_search_leaves_the_same_in_every_storage(storage, narrow, tmp_path):
    def search(driver, folder):
        folder.mkdir()
        options = {"storage": STORAGES[storage](folder), "calls": [{"n_trials": 4}]}
        return record(driver, build, pruner=optuna.pruners.SuccessiveHalvingPruner, **options)

    seen = search(Driver(narrow), tmp_path / "pool")

    stock = search(Driver(), tmp_path / "stock")
    assert seen.trials == stock.trials
    assert seen.called_back == stock.called_back


@pytest.mark.cases(1)
@pytest.mark.parametrize("storage", ["sqlite", "journal"])
def test_a_search_goes_on_from_its_storage(storage, wide, tmp_path):
    def open_storage():
        return STORAGES[storage](tmp_path)

    options = {"study_name": "search", "pruner": optuna.pruners.NopPruner(), "executor": wide}
    study = hydra_tune_optuna.create_study(storage=open_storage(), **options)
    study.optimize(build, n_trials=3)
    loaded = hydra_tune_optuna.load_study(storage=open_storage(), **options)
    loaded.optimize(build, n_trials=3)

    again = hydra_tune_optuna.load_study(study_name="search", storage=open_storage())
    assert isinstance(loaded, hydra_tune_optuna.PoolStudy)
    assert type(again) is optuna.Study
    assert [trial.state.name for trial in again.trials] == ["COMPLETE"] * 6
    assert trials_of(again) == trials_of(loaded)


def test_without_an_executor_studies_are_stock_ones():
    assert type(hydra_tune_optuna.create_study()) is optuna.Study
    assert type(hydra_tune_optuna.study.create_study(direction="maximize")) is optuna.Study


@pytest.mark.parametrize(
    "executor", [threading.Thread(), hydra_tune_optuna.PoolStudy, 4], ids=["thread", "class", "int"]
)
def test_what_is_no_executor_is_refused_before_the_study_exists(executor, tmp_path):
    storage = f"sqlite:///{tmp_path}/study.db"

    with pytest.raises(HydraTuneError, match="executor must be a HydraExecutor, not"):
        hydra_tune_optuna.create_study(storage=storage, executor=executor)
    assert optuna.get_all_study_names(storage) == []


@pytest.mark.cases(1)
def test_one_thread_beats_for_all_running_trials(wide, heartbeats):
    storage, beats = heartbeats
    before = threading.active_count()
    study = hydra_tune_optuna.create_study(storage=storage, executor=wide)
    while_running = []

    study.optimize(
        build, n_trials=5, callbacks=[lambda study, trial: while_running.append(threading.active_count() - before)]
    )

    names = {name for _, name in beats}
    assert names == {"hydra-tune-heartbeat"}
    assert {trial_id for trial_id, _ in beats} <= {trial._trial_id for trial in study.trials}
    assert beats[0][0] == study.trials[0]._trial_id
    assert "hydra-tune-heartbeat" not in [thread.name for thread in threading.enumerate()]


def test_a_storage_that_answers_no_heartbeat_keeps_no_search_from_its_end(narrow, heartbeats, monkeypatch):
    storage, _ = heartbeats
    monkeypatch.setattr(heartbeat, "_PATIENCE_SECONDS", 0.1)
    answers, beat = threading.Event(), storage.record_heartbeat

    def hanging(trial_id):
        if threading.current_thread().name == "hydra-tune-heartbeat":
            answers.wait(60)
        beat(trial_id)

    monkeypatch.setattr(storage, "record_heartbeat", hanging)
    study = hydra_tune_optuna.create_study(storage=storage, executor=narrow)
    with optuna_log() as log:
        study.optimize(build, n_trials=1)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "hydra-tune-heartbeat"]
    assert [trial.state for trial in study.trials] == [optuna.trial.TrialState.COMPLETE]
    assert any("The storage has not answered a heartbeat for 0.1 seconds" in line for line in log)
    answers.set()
    thread.join()


def test_a_trial_of_a_dead_process_is_failed_and_retried(narrow, heartbeats):
    storage, _ = heartbeats
    study = hydra_tune_optuna.create_study(storage=storage, executor=narrow)
    study.enqueue_trial({"learning_rate": 0.25, "seed": 1})
    with pytest.warns(UserWarning, match="Heartbeat of storage"):
        dead = study.ask()
    storage.record_heartbeat(dead._trial_id)
    with storage.engine.begin() as connection:
        long_ago = datetime.now() - timedelta(hours=1)  # noqa: DTZ005 - as the database has it
        connection.execute(HEARTBEATS, {"at": long_ago})

    study.optimize(build, n_trials=1)

    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE"]
    assert study.trials[1].params == {"learning_rate": 0.25, "seed": 1}


RETRIES = {
    "again": partial(RetryStale),
    "no more": partial(RetryStale, max_retry=0),
    "with reports": partial(RetryStale, inherit_intermediate_values=True),
    "old name": partial(optuna.storages.RetryFailedTrialCallback, max_retry=2),
}


@pytest.mark.cases(1)
@pytest.mark.filterwarnings("ignore:Heartbeat of storage")
@pytest.mark.filterwarnings("ignore:RetryFailedTrialCallback has been deprecated")
@pytest.mark.filterwarnings("ignore:The reported value is ignored")
@pytest.mark.parametrize(
    "retry", [pytest.param(name, marks=[pytest.mark.slow] * (name != "again")) for name in RETRIES]
)
def test_stale_trials_are_retried_as_in_stock_optuna(retry, narrow, tmp_path):
    def search(driver, name):
        storage = optuna.storages.RDBStorage(
            f"sqlite:///{tmp_path}/{name}.db",
            heartbeat_interval=60,
            grace_period=120,
            **when_stale(RETRIES[retry]()),
        )

        def leave_a_stale_one(study):
            trial = study.ask()
            build(trial)
            trial.report(0.5, 0)
            trial.set_user_attr("who", "dead")
            storage.record_heartbeat(trial._trial_id)
            with storage.engine.begin() as connection:
                long_ago = datetime.now() - timedelta(hours=1)  # noqa: DTZ005 - as the database has it
                connection.execute(HEARTBEATS, {"at": long_ago})

        seen = record(driver, build, storage=storage, prepare=leave_a_stale_one, calls=[{"n_trials": 2}])
        storage.remove_session()
        storage.engine.dispose()
        return seen

    ours, stock = search(Driver(narrow), "ours"), search(Driver(), "stock")
    assert ours == stock
    assert "'FAIL'" in ours.trials[0]
    assert ("('retry_history', [0])" in ours.trials[1]) == (retry != "no more")


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda study: pickle.loads(pickle.dumps(study))], ids=["copy", "pickle"]
)
def test_a_copy_has_no_executor_until_it_is_given_one(copied, narrow, tmp_path):
    study = hydra_tune_optuna.create_study(storage=f"sqlite:///{tmp_path}/study.db", executor=narrow)
    study.optimize(build, n_trials=1)

    twin = copied(study)
    assert twin.executor is None
    assert study.executor is narrow
    assert trials_of(twin) == trials_of(study)
    with pytest.raises(HydraTuneError, match=r"has no executor; set study\.executor"):
        twin.optimize(build, n_trials=1)

    twin.executor = narrow
    twin.optimize(build, n_trials=1)
    assert len(study.trials) == 2


def test_the_progress_bar_counts_trials_and_is_closed(wide, capsys):
    study = hydra_tune_optuna.create_study(executor=wide, sampler=optuna.samplers.RandomSampler(seed=1))

    study.optimize(build, n_trials=5, show_progress_bar=True)

    shown = capsys.readouterr().err
    assert "5/5" in shown
    assert f"Best trial: {study.best_trial.number}" in shown


def test_no_trial_is_stored_with_more_than_stock_optuna_would(wide):
    study = hydra_tune_optuna.create_study(executor=wide, pruner=optuna.pruners.NopPruner())
    study.optimize(lambda trial: small_task(), n_trials=3)

    assert study.user_attrs == {}
    assert [trial.user_attrs for trial in study.trials] == [{}] * 3
    assert [trial.system_attrs for trial in study.trials] == [{}] * 3


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("table", "moment"),
    [
        ("trials", "after the commit"),
        ("trial_params", "in the statement"),
        ("trial_intermediate_values", "after the commit"),
        pytest.param("trials", "in the statement", marks=pytest.mark.slow),
        pytest.param("trial_params", "after the commit", marks=pytest.mark.slow),
        pytest.param("trial_intermediate_values", "in the statement", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_in_the_middle_of_a_write_leaves_no_trial_running(table, moment, wide, tmp_path):
    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/study.db")
    study = hydra_tune_optuna.create_study(storage=storage, pruner=optuna.pruners.NopPruner(), executor=wide)
    seen, pressed = [], []

    def run_and_press(cursor, sql, parameters, _context):
        if not sql.startswith(f"INSERT INTO {table} "):
            return False
        cursor.execute(sql, parameters)
        seen.append(sql)
        if len(seen) == 3 and moment == "in the statement":  # some trials are running by then
            signal.raise_signal(signal.SIGINT)
        return True

    def press_after_commit(*_):
        if len(seen) == 3 and moment == "after the commit" and not pressed:
            pressed.append(True)
            signal.raise_signal(signal.SIGINT)

    sqlalchemy.event.listen(storage.engine, "do_execute", run_and_press)
    sqlalchemy.event.listen(storage.engine, "checkin", press_after_commit)
    with pytest.raises(KeyboardInterrupt) as raised:
        study.optimize(lambda trial: small_task(trial.suggest_float("rate", 0, 0.1), epochs=1_000_000))

    # The traceback is alive here, as in a notebook, and with it all that the interrupt may have cut short.
    assert {trial.state.name for trial in study.trials} == {"FAIL"}, raised
    with storage.engine.connect() as connection:
        assert connection.scalar(sqlalchemy.text(f"SELECT count(*) FROM {table}")) == len(seen) >= 3
    study.optimize(build, n_trials=1)
    assert study.trials[-1].state.name == "COMPLETE"
    storage.remove_session()
    storage.engine.dispose()


def test_no_trial_is_taken_for_stale_just_after_the_clock_was_set(heartbeats, monkeypatch):
    storage, _ = heartbeats
    heartbeat = StudyHeartbeatSender(storage)
    assert heartbeat.tells_who_lives
    day, passed = time.time, time.monotonic
    monkeypatch.setattr(time, "time", lambda: day() + 3600)
    assert not heartbeat.tells_who_lives
    assert not heartbeat.tells_who_lives
    monkeypatch.setattr(time, "time", lambda: day() + 3600 + 121)
    monkeypatch.setattr(time, "monotonic", lambda: passed() + 121)  # two intervals, in which all that live have beaten
    assert heartbeat.tells_who_lives


@pytest.mark.parametrize(
    ("options", "waits_ms"), [({}, 60_000), ({"timeout": 7}, 7_000)], ids=["default", "the user's"]
)
def test_how_long_a_locked_database_is_waited_for(options, waits_ms, tmp_path):
    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/study.db", engine_kwargs={"connect_args": options})
    with make_pool("hydra", 1) as pool:
        for _ in range(2):
            hydra_tune_optuna.create_study(storage=storage, study_name="search", load_if_exists=True, executor=pool)
    with storage.engine.connect() as connection:
        assert connection.execute(sqlalchemy.text("PRAGMA busy_timeout")).scalar() == waits_ms
    storage.remove_session()
    storage.engine.dispose()
