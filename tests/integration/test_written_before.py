"""What an earlier version has left on disk is gone on with: the numbers are those of trials that nothing has interrupted.

The comparison allows for rounding, because another machine may have written the files. `tests/ray` has the test of Ray's
checkpoints.
"""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from optuna.trial import TrialState

import hydra_tune_optuna as optuna
from hydra_tune import HydraExecutor
from hydra_tune.observe.event_log.reader import read_log
from hydra_tune.observe.event_log.run_figures import run_figures
from hydra_tune.observe.trace.chrome_trace import trace_events
from tests.fixtures.written_before import trials
from tests.support import ray_tasks
from tests.support.cli_project import Project

pytestmark = pytest.mark.timeout(120)
CLOSE = {"rtol": 1e-3, "atol": 1e-5}

of_this_torch = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."),
    reason="another version of torch than the checkpoint's is refused by name",
)


@pytest.fixture
def written(tmp_path):
    """Copies a folder of what was written before; private ones are private again, which a checkout does not keep."""

    def copied(name: str) -> Path:
        folder = shutil.copytree(trials.HERE / name, tmp_path / name)
        for path in folder.rglob("*"):
            path.chmod(0o700 if path.is_dir() else 0o600)
        return folder

    return copied


def losses(result) -> list[float]:
    assert result.error is None
    return [entry["train_loss"] for entry in result.history]


def assert_alike(result, expected) -> None:
    assert [entry["step"] for entry in result.history] == [entry["step"] for entry in expected.history]
    assert losses(result) == pytest.approx(losses(expected), rel=CLOSE["rtol"])
    torch.testing.assert_close(dict(result.state_dict()), dict(expected.state_dict()), **CLOSE)


@of_this_torch
def test_a_killed_pools_checkpoint(written):
    with HydraExecutor(devices="cpu:1", checkpoint_dir=written("pool") / "saved") as pool:
        found = pool.find_checkpoint("trial")
        assert 0 < found.steps < trials.STEPS
        result = pool.submit(trials.task_of(), "trial", resume_from=found.path).result()
        went_on = pool.stats().units_run
        expected = pool.submit(trials.task_of(), "whole").result()
        assert 0 < went_on < pool.stats().units_run - went_on
    assert len(result.history) == trials.REPORTS
    assert_alike(result, expected)


def test_an_event_log(written):
    folder = written("event_log")
    log = read_log(folder / "run.jsonl")
    figures = json.loads((folder / "figures.json").read_text())
    assert json.loads(json.dumps(asdict(run_figures(log)))) == figures
    assert figures["trials"] == {"completed": len(trials.LOGGED)}
    assert sum(event["ph"] == "X" for event in trace_events(log)) >= figures["units_run"] > 0


def outcome(study: optuna.Study) -> list:
    return [(trial.number, trial.state, trial.params, sorted(trial.intermediate_values)) for trial in study.trials]


def values(study: optuna.Study) -> list[float]:
    return [value for trial in study.trials for value in (trial.value, *trial.intermediate_values.values())]


@pytest.mark.cases(1 / 3)
@of_this_torch
def test_a_killed_study(written, tmp_path):
    folder = written("study")
    with HydraExecutor(devices="cpu:2", checkpoint_dir=folder / "saved") as pool:
        study = optuna.load_study(study_name="killed", storage=trials.storage(folder), executor=pool)
        left = [trial.number for trial in study.trials if trial.state == TrialState.RUNNING]
        assert left == [0, 1]
        assert all(pool.find_checkpoint(f"killed/{number}").steps for number in left)
        study.optimize(trials.from_trial, n_trials=len(trials.RATES) - len(left))
    with HydraExecutor(devices="cpu:2", checkpoint_dir=tmp_path / "saved") as pool:
        whole = trials.begin_study(tmp_path, pool)
        whole.optimize(trials.from_trial, n_trials=len(trials.RATES))
    assert outcome(study) == outcome(whole)
    assert {trial.state for trial in study.trials} == {TrialState.COMPLETE}
    assert values(study) == pytest.approx(values(whole), rel=CLOSE["rtol"])
    assert not list(folder.glob("saved/*/*.manifest"))


@pytest.mark.cases(1 / 3)
@of_this_torch
def test_a_killed_sweep(written, tmp_path):
    def swept(folder: Path, *arguments: str):
        project = Project(folder)
        for name in ("model.py", "space.yaml"):
            shutil.copy(trials.HERE / "project" / name, folder / name)
        done = project.call("--json", *arguments)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), optuna.load_study(
            study_name="first", storage=f"sqlite:///{folder / 'trials.db'}"
        )

    (tmp_path / "whole").mkdir()
    report, study = swept(written("sweep"), "--resume")
    expected, whole = swept(tmp_path / "whole")
    assert report["counts"] == expected["counts"]
    assert 0 < report["units_run"] < expected["units_run"]
    assert outcome(study) == outcome(whole)
    assert values(study) == pytest.approx(values(whole), rel=CLOSE["rtol"])
    assert len(list((tmp_path / "sweep").glob("weights/*/*.safetensors"))) == len(study.trials)


@of_this_torch
def test_a_checkpoint_of_rays_is_one_of_a_pools(written):
    with HydraExecutor(devices="cpu:2") as pool:
        (manifest,) = written("ray").glob("checkpoint/trial/*.manifest")
        result = pool.submit(ray_tasks.build(trials.RAY_CONFIG), "trial", resume_from=manifest).result()
        expected = pool.submit(ray_tasks.build(trials.RAY_CONFIG), "whole").result()
    assert len(result.history) == trials.RAY_CONFIG["epochs"]
    assert_alike(result, expected)
