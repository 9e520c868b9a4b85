"""A search that a signal ends goes on in another pool: the same trials under the same numbers, and the same values."""

import signal
import threading
from contextlib import contextmanager

import pytest
from optuna.storages import RDBStorage
from optuna.trial import TrialState

import hydra_tune_optuna as optuna
from hydra_tune import HydraExecutor
from hydra_tune.interrupts import Terminated
from tests.support.killed_study import RATES, begin, build, storage

ERRORS = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Terminated}


def outcome(study):
    return [
        (trial.number, trial.state, trial.params, trial.values, trial.intermediate_values) for trial in study.trials
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    with HydraExecutor(devices="cpu:2") as pool:
        study = begin(folder, pool)
        study.optimize(build, n_trials=len(RATES))
        return outcome(study)


@pytest.fixture
def stopping(monkeypatch):
    """Has the signal come at the first report of trial 1; trial 2 has been asked for, and has not begun."""

    def stop(number, study, objective=build):
        def report(trial, value, step, real=optuna.Trial.report):
            real(trial, value, step)
            if trial.number == 1:
                signal.raise_signal(number)

        monkeypatch.setattr("hydra_tune_optuna.optuna_internals._InterruptSafeTrial.report", report)
        try:
            study.optimize(objective, n_trials=len(RATES))
        finally:
            monkeypatch.undo()

    return stop


def interrupted(folder, stop, number, **options):
    """A search that a signal has ended, and its trials; no unit begins before trial 2 has been asked for."""
    is_asked = threading.Event()

    def objective(trial):
        if trial.number == len(RATES) - 1:
            is_asked.set()
        return build(trial)

    @contextmanager
    def held():
        assert is_asked.wait(60)
        yield

    with HydraExecutor(devices="cpu:1", max_concurrent=3, stop_seconds=60, instrument=held, **options) as pool:
        study = begin(folder, pool)
        with pytest.raises(ERRORS[number]):
            stop(number, study, objective)
    return study


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_with_checkpoints_all_trials_go_on(tmp_path, stopping, number, undisturbed):
    study = interrupted(tmp_path, stopping, number, checkpoint_dir=tmp_path / "saved")
    before = [trial.state for trial in study.trials]
    assert set(before[1:]) <= {TrialState.RUNNING, TrialState.WAITING}
    assert before[1] == TrialState.RUNNING  # trial 0 may be over by then
    with HydraExecutor(devices="cpu:2", checkpoint_dir=tmp_path / "saved") as pool:
        found = pool.find_checkpoint("killed/1")
        # The report is answered before the signal is passed on, so the trial may have trained up to its next report.
        assert found.steps in (5, 10)
        assert not found.is_in_use
        study = optuna.load_study(study_name="killed", storage=storage(tmp_path), executor=pool)
        study.optimize(build, n_trials=before.count(TrialState.WAITING))
        assert outcome(study) == undisturbed
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * len(RATES)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_without_checkpoints_all_trials_have_failed(tmp_path, stopping, number):
    study = interrupted(tmp_path, stopping, number)
    states = [trial.state for trial in study.trials]
    assert states[1:] == [TrialState.FAIL] * (len(RATES) - 1)
    assert states[0] in (TrialState.FAIL, TrialState.COMPLETE), "it may be over before trial 1 reports"


def test_the_same_pool_goes_on_with_a_study_that_nothing_keeps(tmp_path, stopping):
    """A notebook: Ctrl-C, and the cell is run again."""
    with HydraExecutor(devices="cpu:1", max_concurrent=3, checkpoint_dir=tmp_path) as pool:
        study = optuna.create_study(executor=pool)
        for rate in RATES:
            study.enqueue_trial({"lr": rate})
        with pytest.raises(KeyboardInterrupt):
            stopping(signal.SIGINT, study)
        waiting = sum(trial.state == TrialState.WAITING for trial in study.trials)
        study.optimize(build, n_trials=waiting)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * len(RATES)


def test_a_trial_that_ends_while_others_are_saved_has_ended(tmp_path, monkeypatch, undisturbed):
    """And its callback is called: what has ended is never run again."""
    last, heard = max(undisturbed[0][4]), []
    with HydraExecutor(devices="cpu:1", max_concurrent=2, checkpoint_dir=tmp_path / "saved") as pool:
        study = begin(tmp_path, pool)
        real = pool.suspend

        def suspend(jobs):
            assert next(job for job in jobs if job.name == "trial 0").result().status == "completed"
            real(jobs)

        def report(trial, value, step, real=optuna.Trial.report):
            real(trial, value, step)
            if (trial.number, step) == (0, last):
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(pool, "suspend", suspend)
        monkeypatch.setattr("hydra_tune_optuna.optuna_internals._InterruptSafeTrial.report", report)
        with pytest.raises(KeyboardInterrupt):
            study.optimize(build, n_trials=2, callbacks=[lambda _study, trial: heard.append(trial.number)])
    assert 0 in heard
    assert sorted(heard) == [trial.number for trial in study.trials if trial.state == TrialState.COMPLETE]
    assert outcome(study)[0] == undisturbed[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_trials_that_wait_to_be_gone_on_with_are_not_taken_for_dead(tmp_path, stopping):
    """One at a time: the others' heartbeats are old by then, and another process may look."""
    url = storage(tmp_path)
    kept = RDBStorage(url, heartbeat_interval=1, grace_period=2)
    study = interrupted(tmp_path, stopping, signal.SIGINT, checkpoint_dir=tmp_path / "saved")
    left = [trial.number for trial in study.trials if trial.state == TrialState.RUNNING]
    beaten = []
    record = kept.record_heartbeat
    kept.record_heartbeat = lambda trial_id: (beaten.append(kept.get_trial(trial_id).number), record(trial_id))
    with HydraExecutor(devices="cpu:1", max_concurrent=1, checkpoint_dir=tmp_path / "saved") as pool:
        study = optuna.load_study(study_name="killed", storage=kept, executor=pool)

        def first(trial):
            while not set(left) <= set(beaten):
                pass
            return build(trial)

        study.optimize(first, n_trials=len(RATES) - len(left))
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * len(RATES)
