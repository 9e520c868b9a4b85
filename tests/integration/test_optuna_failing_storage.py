"""A study whose storage cannot be written: the search says so and ends, and goes on once there is room."""

import errno
import os
from pathlib import Path

import optuna
import pytest
import sqlalchemy

import hydra_tune_optuna
from tests.contract.optuna_drivers import build, make_pool
from tests.support.failing_writes import FailingWrites

pytestmark = [
    pytest.mark.timeout(250),
    pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning"),
    pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="says which file a descriptor is of"),
]
NUM_TRIALS = 3


@pytest.fixture(scope="module")
def pool():
    with make_pool("hydra", 2) as made:
        yield made


def noted(trial):
    trial.set_user_attr("note", "x" * 2000)
    trial.set_user_attr("more", "x" * 2000)
    return build(trial)


def search(pool, storage):
    """As many trials as are missing."""
    study = hydra_tune_optuna.create_study(
        executor=pool,
        storage=storage,
        study_name="it",
        load_if_exists=True,
        sampler=optuna.samplers.RandomSampler(seed=0),
    )
    done = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    study.optimize(noted, n_trials=NUM_TRIALS - len(done))
    return study


def journal(path):
    return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))


def check_over(study):
    states = [trial.state.name for trial in study.get_trials(deepcopy=False)]
    assert states.count("COMPLETE") == NUM_TRIALS
    assert "WAITING" not in states


def refuse_each(pool, tmp_path, monkeypatch, every):
    writes = FailingWrites(tmp_path, ending=".log")
    with writes.patched(monkeypatch):
        search(pool, journal(tmp_path / "counted.log"))
        count = len(writes.calls)
        assert count > 20
        for number in (errno.ENOSPC, errno.EIO):
            for call in range(number % every, count, every):
                path = tmp_path / f"{number}-{call}.log"
                writes.arm(call, number)
                raised = None
                try:
                    search(pool, journal(path))
                except OSError as error:
                    raised = error
                is_refused = bool(writes.refused)
                writes.arm(None, 0)
                if is_refused:
                    assert raised is not None, call
                    assert (raised.errno, raised.filename) == (number, str(path))
                    assert os.strerror(number) in str(raised)
                assert not pool._pool.jobs(), "nothing of the search runs on"
                if path.exists() or not is_refused:
                    check_over(search(pool, journal(path)))


def test_a_journal_that_cannot_be_written_here_and_there(pool, tmp_path, monkeypatch):
    refuse_each(pool, tmp_path, monkeypatch, 29)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_journal_that_cannot_be_written_at_every_call_in_turn(pool, tmp_path, monkeypatch):
    refuse_each(pool, tmp_path, monkeypatch, 1)


def database(path, pages):
    """A database that may grow to so many pages: SQLite's own full disk."""
    storage = optuna.storages.RDBStorage(f"sqlite:///{path}")

    @sqlalchemy.event.listens_for(storage.engine, "connect")
    def limit(connection, _):
        connection.execute(f"PRAGMA max_page_count = {pages}")

    storage.engine.dispose()  # connections from before
    return storage


def test_a_full_database_ends_the_search_and_more_room_lets_it_go_on(pool, tmp_path):
    path = tmp_path / "study.db"
    optuna.storages.RDBStorage(f"sqlite:///{path}").engine.dispose()
    pages = path.stat().st_size // 4096
    raised = []
    for more in range(0, 24, 2):
        storage = database(path, pages + more)
        try:
            study = search(pool, storage)
        except (optuna.exceptions.StorageInternalError, sqlalchemy.exc.OperationalError) as error:
            raised.append(f"{error} {error.__cause__}")
            assert not pool._pool.jobs()
        else:
            check_over(study)
            break
        finally:
            storage.engine.dispose()
    else:
        pytest.fail("there was never room enough")
    assert raised
    assert all("full" in text for text in raised), raised
