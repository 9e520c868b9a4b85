"""A waiting trial of a shared database goes to one process, even where two look at the trial at the same moment."""

import threading
from concurrent.futures import ThreadPoolExecutor

import optuna
import pytest
from optuna.storages import RDBStorage
from optuna.trial import TrialState

from hydra_tune_optuna import optuna_internals

PATIENCE_SECONDS = 60


@pytest.fixture
def studies(tmp_path):
    """One study, as two processes see it."""
    url = f"sqlite:///{tmp_path / 'study.db'}"
    optuna.create_study(storage=RDBStorage(url), study_name="shared").enqueue_trial({"x": 0.5})
    return [
        optuna.load_study(study_name="shared", storage=kind(url)) for kind in (RDBStorage, optuna.storages.get_storage)
    ]


def test_two_that_have_read_the_same_state_do_not_both_run_the_trial(studies, monkeypatch):
    """Each waits, between reading a state and writing another, for the other to have read."""
    both, check = threading.Barrier(2), RDBStorage.check_trial_is_updatable

    def checked(storage, trial_id, state):
        check(storage, trial_id, state)
        if state == TrialState.WAITING and waiting.pop(threading.get_ident(), False):
            both.wait(PATIENCE_SECONDS)

    def asked(study):
        listed = study._storage.get_all_trials(study._study_id, deepcopy=False, states=(TrialState.WAITING,))
        both.wait(PATIENCE_SECONDS)  # both have listed the trial
        waiting[threading.get_ident()] = True
        return optuna_internals._run_waiting(study._storage, listed[0]._trial_id)

    waiting = {}
    monkeypatch.setattr(RDBStorage, "check_trial_is_updatable", checked)
    with ThreadPoolExecutor(2) as threads:
        taken = list(threads.map(asked, studies))
    assert sorted(taken) == [False, True]
    (trial,) = studies[0].get_trials()
    assert trial.state == TrialState.RUNNING
    assert trial.datetime_start is not None


def test_asking_takes_the_waiting_trial_and_then_makes_new_ones(studies):
    first, second = (optuna_internals.ask(study, mark="asked") for study in studies)
    assert (first.number, second.number) == (0, 1)
    assert first.suggest_float("x", 0, 1) == 0.5
    assert studies[0].trials[0].datetime_start <= studies[0].trials[1].datetime_start
    assert optuna_internals.tell(studies[0], first, value=1.0, state=None)[0] == TrialState.COMPLETE


def test_taking_a_waiting_trial_ends_older_marks_of_the_kind_and_no_others(studies):
    study, (waiting,) = studies[0], studies[0].get_trials(deepcopy=False)
    for key in ("kind:old", "kind:own", "other:old"):
        optuna_internals.note(study, waiting, key, value=True)
    taken = optuna_internals.stored(study, optuna_internals.ask(study, mark="kind:own"))
    assert taken.system_attrs.items() >= {"kind:old": False, "kind:own": True, "other:old": True}.items()
    assert taken.state == TrialState.RUNNING
