"""A search whose process is killed goes on in another: the same trials under the same numbers, and the same values."""

import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from optuna.trial import TrialState

import hydra_tune_optuna as optuna
from hydra_tune import HydraExecutor
from hydra_tune.checkpoint.folder import load_checkpoint
from hydra_tune.errors import CheckpointError
from hydra_tune_optuna.search.resume_study import StudyResumer
from hydra_tune_optuna.search.shutdown import leave
from hydra_tune_optuna.weights import StudyWeights
from tests.contract.optuna_drivers import optuna_log
from tests.support.forked import Forked
from tests.support.killed import described
from tests.support.killed_study import RATES, begin, build, main, saved_trials, storage

PATIENCE_SECONDS = 120.0
short = partial(build, epochs=1)


def kill_among_checkpoints(folder: Path) -> None:
    """Start a search and kill it once two trials are saved, and both have more to do."""
    with Forked(main, folder) as process:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while saved_trials(folder) < 2:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate()


def outcome(study: optuna.Study) -> list:
    return [
        (trial.number, trial.state, trial.params, trial.values, trial.intermediate_values) for trial in study.trials
    ]


@pytest.mark.cases(1 / 3)
@pytest.mark.timeout(300)
def test_a_killed_search_ends_as_one_that_never_was(tmp_path):
    (tmp_path / "killed").mkdir()
    (tmp_path / "whole").mkdir()
    kill_among_checkpoints(tmp_path / "killed")
    with HydraExecutor(devices="cpu:1", checkpoint_dir=tmp_path / "killed" / "saved") as pool:
        study = optuna.load_study(study_name="killed", storage=storage(tmp_path / "killed"), executor=pool)
        left = [trial.number for trial in study.trials if trial.state == TrialState.RUNNING]
        assert left
        steps = [pool.find_checkpoint(f"killed/{number}").steps for number in left]
        assert all(steps)
        asked = sum(trial.state == TrialState.WAITING for trial in study.trials)
        units = pool.stats().units_run
        study.optimize(build, n_trials=asked)
        assert pool.stats().units_run > units
        found = outcome(study)
    assert not list((tmp_path / "killed" / "saved").glob("*/*.manifest"))  # of trials that have been told
    with HydraExecutor(devices="cpu:2") as pool:
        study = begin(tmp_path / "whole", pool)
        study.optimize(build, n_trials=len(RATES))
        assert found == outcome(study)
    assert [trial[1] for trial in found] == [TrialState.COMPLETE] * len(RATES)


@pytest.mark.cases(1 / 3)
def test_a_search_does_not_take_what_another_one_runs_or_has_left(tmp_path):
    """Of a study of the same name that was deleted, and of a trial that is under way elsewhere."""
    with HydraExecutor(devices="cpu:1", checkpoint_dir=tmp_path / "saved") as pool:
        study = begin(tmp_path, pool)
        trial = study.ask()
        task = build(trial)
        job = pool.submit(
            task, saved_as="killed/0", labels={"study": "killed", "trial": 0, "params": {}, "started": None}
        )
        job.checkpoint(PATIENCE_SECONDS)
        study.optimize(build, n_trials=1)  # the checkpoint is in use, and another trial's
        assert study.trials[0].state == TrialState.RUNNING
        assert study.trials[1].state == TrialState.COMPLETE
        job.cancel()
        job.result(PATIENCE_SECONDS)
        study.optimize(build, n_trials=1)
        assert [trial.state for trial in study.trials[:3]] == [
            TrialState.RUNNING,
            TrialState.COMPLETE,
            TrialState.COMPLETE,
        ]


def never(frozen) -> bool:
    return False


def test_a_trial_without_a_checkpoint_begins_anew_once_its_search_has_died(tmp_path):
    """One that had waited, and one that had not; as long as the search lives, they are its."""
    rates = []

    def noting(trial):
        task = short(trial)
        rates.append((trial.number, trial.params["lr"]))
        return task

    with HydraExecutor(devices="cpu:1", checkpoint_dir=tmp_path / "saved") as pool:
        study = optuna.create_study(storage=storage(tmp_path), study_name="killed", executor=pool)
        study.enqueue_trial({"lr": RATES[0]})
        search = StudyResumer(study, pool)
        assert search.begin(never) == []
        assert [search.ask().number for _ in range(2)] == [0, 1]
        study.optimize(noting, n_trials=0)
        assert [trial.state for trial in study.trials] == [TrialState.RUNNING] * 2
        search.close(leaves=True)
        study.optimize(noting, n_trials=1)
        assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 3
    assert [number for number, _ in rates] == [0, 1, 2]
    assert rates[0][1] == RATES[0]
    assert [path.name for path in (tmp_path / "saved" / ".searches").iterdir() if path.suffix != ".json"] == ["lock"]


@pytest.mark.cases(1 / 3)
def test_a_study_of_the_same_name_in_another_storage_removes_no_checkpoint(tmp_path):
    """Neither does a copy of the study; the study itself goes on, also from another place, and may be made anew."""

    def study_in(storage, *, is_there=False):
        make = optuna.load_study if is_there else optuna.create_study
        return make(storage=f"sqlite:///{tmp_path / storage}.db", study_name="killed", executor=pool)

    with HydraExecutor(devices="cpu:1", checkpoint_dir=tmp_path / "saved") as pool:
        study = study_in("one")
        search = StudyResumer(study, pool)
        search.begin(never)
        trial = search.ask()
        job = pool.submit(build(trial), **search.submit_options(trial, None)[0])
        job.checkpoint(PATIENCE_SECONDS)
        job.cancel()
        job.result(PATIENCE_SECONDS)
        search.close(leaves=True)
        saved = pool.find_checkpoint("killed/0")
        refused = r"checkpoints of another study 'killed', in \S+one\.db, and this study is in \S+{}; give one"
        with pytest.raises(CheckpointError, match=refused.format(r"two\.db")):
            study_in("two").optimize(short, n_trials=1)
        assert study_in("two", is_there=True).trials == []
        shutil.copy(tmp_path / "one.db", tmp_path / "three.db")
        with pytest.raises(CheckpointError, match=refused.format(r"three\.db")):
            study_in("three", is_there=True).optimize(short, n_trials=1)
        with pytest.raises(CheckpointError, match="this study is in memory"):
            optuna.create_study(study_name="killed", executor=pool).optimize(short, n_trials=1)
        assert pool.find_checkpoint("killed/0") == saved is not None
        for _ in range(2):  # in memory, studies of one name follow each other, and leave no note
            optuna.create_study(study_name="brief", executor=pool).optimize(short, n_trials=1)
        (tmp_path / "one.db").rename(tmp_path / "moved.db")
        moved = study_in("moved", is_there=True)
        moved.optimize(build, n_trials=0)
        assert [trial.state for trial in moved.trials] == [TrialState.COMPLETE]
        optuna.delete_study(study_name="killed", storage=f"sqlite:///{tmp_path}/moved.db")
        again = study_in("moved")
        again.optimize(short, n_trials=1)
        assert [trial.state for trial in again.trials] == [TrialState.COMPLETE]
    assert {path.name for path in (tmp_path / "saved" / ".searches").iterdir()} == {"lock", "killed.json"}


def test_only_one_search_takes_what_another_has_left(tmp_path):
    with HydraExecutor(devices="cpu:1", checkpoint_dir=tmp_path / "saved") as pool:
        study = optuna.create_study(storage=storage(tmp_path), study_name="killed", executor=pool)
        dead, first, second = (StudyResumer(study, pool) for _ in range(3))
        dead.begin(never)
        number = dead.ask().number
        dead.close(leaves=True)
        assert [left.frozen.number for left in first.begin(never)] == [number]
        assert second.begin(never) == []
        first.close(leaves=True)
        assert [left.frozen.number for left in StudyResumer(study, pool).begin(never)] == [number]


def test_a_trial_that_one_search_put_back_and_a_killed_one_took_is_found(tmp_path):
    """The first search has ended in order, and its name is known nowhere."""
    with HydraExecutor(devices="cpu:1", checkpoint_dir=tmp_path / "saved") as pool:
        study = optuna.create_study(storage=storage(tmp_path), study_name="killed", executor=pool)
        interrupted, killed, last = (StudyResumer(study, pool) for _ in range(3))
        interrupted.begin(never)
        assert leave(study, interrupted, [], [interrupted.ask()]) == []
        interrupted.close(leaves=False)
        killed.begin(never)
        number = killed.ask().number
        killed.close(leaves=True)
        assert [left.frozen.number for left in last.begin(never)] == [number] == [0]


def test_trials_of_plain_optuna_are_left_alone(tmp_path):
    with HydraExecutor(devices="cpu:1", checkpoint_dir=tmp_path / "saved") as pool:
        study = optuna.create_study(storage=storage(tmp_path), study_name="killed", executor=pool)
        study.ask()
        study.optimize(short, n_trials=1)
        assert [trial.state for trial in study.trials] == [TrialState.RUNNING, TrialState.COMPLETE]


def test_weights_of_a_trial_that_was_told_before_they_were_written(tmp_path, monkeypatch):
    options = {
        "storage": storage(tmp_path),
        "study_name": "killed",
        "keep_best": 1,
        "weights_dir": tmp_path / "weights",
    }
    with HydraExecutor(devices="cpu:1", checkpoint_dir=tmp_path / "saved") as pool:
        study = optuna.create_study(**options, executor=pool)
        with monkeypatch.context() as killed:
            killed.setattr(StudyWeights, "completed", lambda *arguments: None)
            killed.setattr(StudyResumer, "forget", lambda *arguments: None)
            study.optimize(build, n_trials=1)
        assert optuna.kept_weights(study) == {}
        steps = pool.find_checkpoint("killed/0").steps
        expected = load_checkpoint(pool.find_checkpoint("killed/0").path).tensors
        with monkeypatch.context() as killed:  # a second time, before they were written again
            killed.setattr(StudyWeights, "completed", lambda *arguments: None)
            killed.setattr(StudyResumer, "forget", lambda *arguments: None)
            study.optimize(build, n_trials=0)
        assert optuna.kept_weights(study) == {}
        study.optimize(build, n_trials=0)
        assert pool.find_checkpoint("killed/0") is None
        assert len(study.trials) == 1
        found = study.load_module(0).state_dict()
    assert steps == 48
    assert all(torch.equal(tensor, expected[f"model.{name}"]) for name, tensor in found.items())


def test_a_cancelled_recovery_of_weights_is_named_as_such(tmp_path, monkeypatch):
    with HydraExecutor(devices="cpu:1", max_concurrent=1, checkpoint_dir=tmp_path / "saved") as pool:
        study = optuna.create_study(
            storage=storage(tmp_path), keep_best=1, weights_dir=tmp_path / "weights", executor=pool
        )
        with monkeypatch.context() as killed:
            killed.setattr(StudyWeights, "completed", lambda *arguments: None)
            killed.setattr(StudyResumer, "forget", lambda *arguments: None)
            study.optimize(short, n_trials=1)
        pool.submit(described(7, 100_000), name="in the only place")
        submit = pool.submit

        def cancelled(*arguments, **options):
            job = submit(*arguments, **options)
            job.cancel()
            return job

        monkeypatch.setattr(pool, "submit", cancelled)
        with optuna_log() as log:
            study.optimize(short, n_trials=0)
    assert [line.partition(":")[2] for line in log if "are not kept" in line] == [
        " The weights of trial 0 are not kept: its recovery was cancelled"
    ]
