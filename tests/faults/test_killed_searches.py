"""Searches are killed fifty times, while they ask, report and tell too: no trial is lost, doubled or left running.

Each of ten sequences kills five times and then lets a process end: the study is that of a search that never was killed.
"""

import random
import sqlite3
import time
from contextlib import closing
from itertools import cycle, islice

import optuna
import pytest
from optuna.trial import TrialState

from hydra_tune.checkpoint.tensors import load_tensors
from hydra_tune_optuna.weights import kept_weights
from tests.parity.exact import differences
from tests.support.faults import ended, start
from tests.support.killed_search import ENQUEUED, NUM_TRIALS, STUDY, begin, search, search_in_step, storage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_REPORTS = 7 * NUM_TRIALS
EARLY_REPORTS = NUM_REPORTS // 4  # killed by then, a search still comes to all moments below
RDB = "optuna.storages._rdb.storage:RDBStorage."
RESUMER = "hydra_tune_optuna.search.resume_study:StudyResumer."
FORGET = RESUMER + "forget"
REMOVE = "hydra_tune.checkpoint.folder:CheckpointFolder.remove"

# Where, when, and at which of so many calls at most. Each is sure to come after those before it in its sequence, however the
# threads take turns: a claim, for example, follows a kill that leaves a trial running.
MOMENTS = (
    (RDB + "_create_new_trial", "before", 1),
    (RDB + "set_trial_state_values", "before", 3),  # a trial that waited runs, or one is told
    ("hydra_tune_optuna.optuna_internals:tell", "before", 1),
    (RDB + "set_trial_state_values", "after", 3),
    (RDB + "_create_new_trial", "after", 1),
    (RDB + "set_trial_intermediate_value", "before", 6),
    ("hydra_tune_optuna.optuna_internals:tell", "after", 1),
    ("hydra_tune.pool.runtime.worker:run_unit", "after", 60),
    ("hydra_tune.executor:HydraExecutor.submit", "before", 2),
    ("sqlalchemy.orm.session:Session.commit", "before", 20),
    (RDB + "set_trial_intermediate_value", "after", 6),
    (RDB + "set_trial_system_attr", "after", 2),  # a trial that was left is claimed, and its old claim goes
    ("hydra_tune.executor:HydraExecutor.submit", "after", 2),
    ("sqlalchemy.orm.session:Session.commit", "after", 20),
    (FORGET, "before", 1),
    (REMOVE, "before", 1),
    (RDB + "_set_trial_param", "after", 3),
    (RESUMER + "_claim", "after", 1),
    (RESUMER + "begin", "after", 1),
)
IN_STEP = (FORGET, REMOVE)  # when they come is up to other threads, for which the search then has to wait
SEQUENCES = 10


def moments_of(sequence: int, chance: random.Random) -> list[str | None]:
    """Five; None is from outside, and where the others do not say."""
    chosen = islice(cycle(MOMENTS), 3 * sequence, 3 * sequence + 3)
    found: list[str | None] = [f"{where}/{when}/{chance.randint(1, calls)}" for where, when, calls in chosen]
    return [None, *found, None]


def reports_of(folder) -> int:
    """How many the storage has."""
    with closing(sqlite3.connect(folder / "study.db")) as database:
        return database.execute("SELECT COUNT(*) FROM trial_intermediate_values").fetchone()[0]


def kill_from_outside(folder, devices: str, *, chance: random.Random, errors, most: int) -> int:
    """Kill a search when its storage has some more reports, of so many at most: a drawn number; returns how it has ended.

    A search that runs away from whoever looks at the storage kills itself at the last of them, or it might end before. One
    that lacks none, because what is missing is that trials are told, kills itself when it has begun.
    """
    present = reports_of(folder)
    missing = most - present
    wanted = present + chance.randint(1, max(1, missing))
    last = f"{RDB}set_trial_intermediate_value/after/{missing}" if missing else f"{RESUMER}begin/after/1"
    process = start(search, folder, devices, errors=errors, moment=last)
    while process.is_alive() and reports_of(folder) < wanted:
        time.sleep(0.002)
    process.kill()
    return ended(process, errors)


def outcome(folder) -> list:
    study = optuna.load_study(study_name=STUDY, storage=storage(folder))
    return [
        (trial.number, trial.state, trial.params, trial.values, trial.intermediate_values) for trial in study.trials
    ]


def weights(folder) -> dict:
    study = optuna.load_study(study_name=STUDY, storage=storage(folder))
    return {number: load_tensors(path)[0] for number, path in kept_weights(study).items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A search that nobody has killed."""
    folder = tmp_path_factory.mktemp("whole")
    begin(folder)
    assert ended(start(search, folder, "cpu:1", errors=folder / "errors"), folder / "errors") == 0
    found = outcome(folder)
    assert [trial[0] for trial in found] == list(range(NUM_TRIALS))
    assert {trial[1] for trial in found} == {TrialState.COMPLETE}
    assert [trial[2]["lr"] for trial in found[: len(ENQUEUED)]] == list(ENQUEUED)
    assert reports_of(folder) == NUM_REPORTS
    return found, weights(folder)


@pytest.mark.parametrize("sequence", range(SEQUENCES))
def test_a_killed_search_ends_as_one_that_never_was(tmp_path, sequence, whole):
    chance = random.Random(100 + sequence)
    errors = tmp_path / "errors"
    begin(tmp_path)
    most = EARLY_REPORTS
    for moment in moments_of(sequence, chance):
        devices = chance.choice(("cpu:1", "cpu:2"))
        if moment is None:
            assert kill_from_outside(tmp_path, devices, chance=chance, errors=errors, most=most) == -9
            assert reports_of(tmp_path) <= most
            most = NUM_REPORTS
        else:
            run = search_in_step if moment.startswith(IN_STEP) else search
            assert ended(start(run, tmp_path, devices, errors=errors, moment=moment), errors) == -9, moment
    assert ended(start(search, tmp_path, "cpu:2", errors=errors), errors) == 0
    assert outcome(tmp_path) == whole[0]
    assert list(differences(whole[1], weights(tmp_path))) == []
    assert not list((tmp_path / "saved").glob("*/*.manifest"))  # of trials that have been told
