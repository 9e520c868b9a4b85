"""A search whose process is killed goes on in another: the same trials under the same numbers, and the same values."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from optuna.trial import TrialState

import hydra_tune_optuna as optuna
from hydra_tune import HydraExecutor
from tests.support.killed_study import RATES, begin, build, storage

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 120.0


def kill_among_checkpoints(folder: Path) -> None:
    """Start a search and kill it once two trials are saved, and both have more to do."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.killed_study", str(folder)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'integrations'}"},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len({path.parent for path in folder.glob("saved/*/*.manifest")}) < 2:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def outcome(study: optuna.Study) -> list:
    return [
        (trial.number, trial.state, trial.params, trial.values, trial.intermediate_values) for trial in study.trials
    ]


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
