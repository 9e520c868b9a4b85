"""`hydra-tune sweep` as a person runs it: a folder, real training in a real pool; where it matters, a process."""

import itertools
import json
import re
import subprocess
from types import SimpleNamespace

import optuna
import pytest
from optuna.trial import TrialState

from hydra_tune.simulate.recorded.recording import read_recording
from hydra_tune.simulate.recorded.replay import replay
from tests.support.cli_project import Project


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def trials_of(folder, name="first"):
    return optuna.load_study(study_name=name, storage=f"sqlite:///{folder / 'trials.db'}").trials


def test_lines_table_and_totals_at_80_columns(project):
    done = project.call()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len([line for line in lines if re.match(r"trial \d+  completed  val_loss \S+  epoch 4/4  lr=", line)]) == 8
    table = lines[lines.index("") + 1 :]
    assert table[0].split() == ["rank", "trial", "val_loss", "epochs", "shards", "state", "parameters"]
    assert max(map(len, table)) <= 80
    values = [float(line.split()[2]) for line in table[1:9]]
    assert values == sorted(values)
    assert any(line.startswith(f"best: trial {table[1].split()[1]}, val_loss ") for line in table)
    assert [line.split()[0] for line in table if line.startswith("cpu:")] == ["cpu:0", "cpu:1"]
    assert any(re.fullmatch(r"units run: [1-9]\d*", line) for line in table)
    assert any(line.startswith("units saved by pruning: 0") for line in table)


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize(("target", "code"), [("/dev/full", 1), ("&-", 0)])
def test_a_sweep_goes_on_where_its_lines_cannot_be_written(project, target, code):
    model = project.folder / "model.py"
    # What a task itself prints fails its trial there, as in any program.
    model.write_text(model.read_text().replace('print("building")', "pass"))
    project.change("hydra: {", "hydra: {storage: 'sqlite:///trials.db', study: first, ")
    shell = ["sh", "-c", f'exec "$@" >{target}', "sh", *project.command()]
    done = subprocess.run(
        shell, cwd=project.folder, env=project.environment(), stderr=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert [trial.state for trial in trials_of(project.folder)] == [TrialState.COMPLETE] * 8


def test_json_is_alone_on_standard_output_and_has_it_all(project):
    project.change("seed: 0", "seed: 0\nearly_terminate: {type: successive_halving, min_iter: 1, eta: 2}")
    done = project.run("--json", "--max-concurrent", "2")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert done.stderr.count("building") == 8
    assert report["status"] == "completed"
    assert report["counts"]["completed"] + report["counts"]["pruned"] == 8
    assert report["counts"]["pruned"] >= 1
    completed = [trial for trial in report["trials"] if trial["state"] == "completed"]
    assert report["best"] == min(completed, key=lambda trial: trial["value"])
    assert set(report["best"]["params"]) == {"lr", "width"}
    pruned = [trial for trial in report["trials"] if trial["state"] == "pruned"]
    assert all(trial["epoch"] < 4 and trial["units_saved"] > 0 for trial in pruned)
    assert report["units_saved"] == sum(trial["units_saved"] for trial in pruned)
    assert report["units_run"] == sum(device["units"] for device in report["devices"].values()) > 0
    for device in report["devices"].values():
        assert 0 < device["peak_bytes"] <= device["budget_bytes"] == 4 << 20
        assert 0 < device["busy_share"] <= 1


@pytest.mark.slow
def test_a_timeline_is_written_and_can_be_played_again(project):
    project.change('devices: "cpu:2"', 'num_shards: 1, devices: "cpu:2"')  # a burst of own code is one unit there
    done = project.run("--json", "--run-cap", "3", "--timeline", "run.json")
    assert done.returncode == 0, done.stderr
    recording = read_recording(project.folder / "run.json")
    assert sum(len(turn.units) for turn in recording.turns) == json.loads(done.stdout)["units_run"]
    played = replay(recording)
    assert sorted(order[:2] for order in played.simulated_orders) == sorted(o[:2] for o in played.recorded_orders)
    nowhere = project.run("--run-cap", "1", "--timeline", "no/run.json")
    assert nowhere.returncode == 1
    assert "cannot write no/run.json: No such file or directory" in nowhere.stderr
    assert not nowhere.stdout, "found out before anything is trained"


@pytest.mark.slow
def test_a_seeded_sweep_at_width_1_is_the_same_again(project):
    reports = [json.loads(project.call("--json", "--max-concurrent", "1", "--run-cap", "3").stdout) for _ in range(2)]
    first, second = ([(trial["params"], trial["value"]) for trial in report["trials"]] for report in reports)
    assert first == second


def test_a_grid_trains_every_point_once(project):
    project.change("run_cap: 8", "method: grid")
    project.change("{distribution: log_uniform_values, min: 1e-5, max: 0.1}", "{values: [0.001, 0.01, 0.1]}")
    report = json.loads(project.call("--json").stdout)
    points = sorted((trial["params"]["lr"], trial["params"]["width"]) for trial in report["trials"])
    assert points == [(lr, width) for lr in (0.001, 0.01, 0.1) for width in (8, 16)]


def test_a_function_that_draws_its_own_parameters(project):
    project.write("task: model:from_trial\nmetric: {name: train_loss}\nhydra: {devices: 'cpu:1'}\n")
    report = json.loads(project.call("--json", "--run-cap", "2").stdout)
    assert [sorted(trial["params"]) for trial in report["trials"]] == [["lr", "width"]] * 2
    assert report["metric"]["name"] == "train_loss"


CHOOSES = """

def choosing(trial):
    activation = trial.suggest_categorical("act", [nn.ReLU])
    return build(0.01, width=len(trial.suggest_categorical("like", [(activation(),) * 8])))
"""


@pytest.mark.filterwarnings("ignore:Choices for a categorical distribution should be:UserWarning")
def test_parameters_that_are_no_values_of_json_are_told_as_texts(project):
    model = project.folder / "model.py"
    model.write_text(model.read_text() + CHOOSES)
    project.write("task: model:choosing\nmetric: {name: val_loss}\nrun_cap: 1\nhydra: {devices: 'cpu:1'}\n")
    done = project.call("--json")
    assert done.returncode == 0, done.stderr
    expected = {"act": "<class 'torch.nn.modules.activation.ReLU'>", "like": ["ReLU()"] * 8}
    assert json.loads(done.stdout)["best"]["params"] == expected


@pytest.mark.slow
def test_a_study_in_a_storage_goes_on_where_it_was(project):
    project.change("hydra: {", "name: first\nhydra: {storage: sqlite:///trials.db, ")
    assert project.run("--run-cap", "2").returncode == 0
    done = project.run("--run-cap", "3", "--json")
    report = json.loads(done.stdout)
    assert [trial["earlier"] for trial in report["trials"]] == [True, True, False]
    assert len(trials_of(project.folder)) == 3
    again = project.run("--run-cap", "3")
    assert again.returncode == 0
    assert "building" not in again.stdout
    project.change("{name: val_loss}", "{name: val_loss, goal: maximize}")
    refused = project.run("--run-cap", "4")
    assert refused.returncode == 2
    assert "space.yaml:2:32: metric.goal: the study 'first'" in refused.stderr
    assert len(trials_of(project.folder)) == 3


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("run_cap: 8", "run_cup: 8", "space.yaml:3:1: unknown key 'run_cup'; did you mean 'run_cap'?"),
        ("model:build", "model:biuld", "space.yaml:1:7: task: module 'model' has no 'biuld'; did you mean 'build'?"),
        ('"cpu:2"', '"gpu:2"', "hydra.devices: "),
        (
            'devices: "cpu:2"',
            "fusion: on, fusion_compile: nosuch",
            "space.yaml:8:67: hydra.fusion_compile: fusion_compile ",
        ),
    ],
)
def test_bad_input_is_code_2_before_anything_is_created(project, old, new, problem):
    project.change("hydra: {", "hydra: {storage: sqlite:///trials.db, ")
    project.change(old, new)
    before = project.files()
    done = project.call()
    assert done.returncode == 2
    assert problem in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert project.files() == before


def test_a_study_of_several_objectives_is_refused(project):
    storage = f"sqlite:///{project.folder / 'trials.db'}"
    optuna.create_study(study_name="first", storage=storage, directions=["minimize", "maximize"])
    project.change("hydra: {", "hydra: {storage: sqlite:///trials.db, study: first, ")
    done = project.call()
    assert done.returncode == 2
    assert "metric.goal: the study 'first' in sqlite:///trials.db is there already" in done.stderr
    assert "its goal is minimize and maximize, not minimize; give another hydra.study" in done.stderr
    assert trials_of(project.folder) == []


def test_other_choices_than_those_of_the_study_are_refused_before_any_trial(project):
    storage = f"sqlite:///{project.folder / 'trials.db'}"
    study = optuna.create_study(study_name="first", storage=storage)
    study.optimize(lambda trial: trial.suggest_categorical("epochs", [2]) + trial.suggest_float("lr", 0, 1), n_trials=1)
    project.change("hydra: {", "hydra: {storage: sqlite:///trials.db, study: first, ")
    project.change("parameters:", "parameters:\n  epochs: {value: 3}")
    done = project.call()
    assert done.returncode == 2
    assert "parameters.epochs: the study 'first' in sqlite:///trials.db is there already, with" in done.stderr
    assert "CategoricalDistribution(choices=(2,)) for epochs" in done.stderr
    assert len(trials_of(project.folder)) == 1


def test_a_sweep_whose_trials_all_fail_ends_soon_with_code_1_and_the_traceback(project):
    project.write("task: model:broken\nmetric: {name: val_loss}\nrun_cap: 50\nparameters: {lr: {min: 0.1, max: 0.2}}\n")
    done = project.call("--devices", "cpu:2")
    assert done.returncode == 1
    assert "RuntimeError: no such model (model.py:" in done.stdout
    assert "the sweep ended early: the first 5 trials have all failed" in done.stdout
    assert "no trial completed" in done.stdout
    assert 'raise RuntimeError("no such model")' in done.stderr
    assert done.stdout.count("building") <= 10


def test_a_metric_that_is_never_reported_is_told_with_its_place(project):
    project.change("{name: val_loss}", "{name: val_acc}")
    done = project.call()
    assert done.returncode == 1
    assert "space.yaml:2:16: metric.name: metric 'val_acc' is never reported" in done.stdout


def test_one_failing_trial_does_not_end_the_sweep(project):
    project.change("{values: [8, 16]}", "{values: [8, 16, -1]}")
    project.change("run_cap: 8", "run_cap: 8\nmethod: random")
    done = project.call("--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0
    failed = [trial for trial in report["trials"] if trial["state"] == "failed"]
    assert {trial["params"]["width"] for trial in failed} == {-1}
    assert all("RuntimeError: " in trial["error"] for trial in failed)
    assert report["counts"]["completed"] + len(failed) == 8
    assert failed


@pytest.mark.cases(1 / 3)
def test_the_timeout_starts_no_more_trials(project, monkeypatch):
    """It is over after fifty looks at the clock."""
    looks = itertools.count()
    monkeypatch.setattr("hydra_tune_optuna.search.driver.time", SimpleNamespace(monotonic=lambda: 0.02 * next(looks)))
    project.change("run_cap: 8", "run_cap: 100000")
    project.change("hydra: {", "hydra: {storage: sqlite:///trials.db, study: first, ")
    done = project.call("--timeout", "1")
    assert done.returncode == 0, done.stderr
    trials = trials_of(project.folder)
    assert 0 < len(trials) < 100000
    assert all(trial.state == TrialState.COMPLETE for trial in trials)


def test_a_pruner_that_cannot_work_so_wide_is_told_at_once_and_at_the_end(project):
    project.change("seed: 0", "seed: 0\nearly_terminate: {type: median, n_startup_trials: 1}")
    done = project.call("--max-concurrent", "8", "--admission", "eager")
    assert done.returncode == 0, done.stderr
    told = re.findall(r"^warning: MedianPruner may prune few or none of 8 trials", done.stdout, re.MULTILINE)
    assert len(told) == 2
    assert "hydra.admission: staggered" in done.stdout


def test_by_default_it_is_staggered_and_the_summary_says_what_was_saved(project):
    project.change("seed: 0", "seed: 0\nearly_terminate: {type: median, n_startup_trials: 1}")
    project.change("run_cap: 8", "run_cap: 12")
    done = project.call("--max-concurrent", "12")
    assert done.returncode == 0, done.stderr
    assert (
        len(re.findall(r"^The oldest trials go first \(staggered\): MedianPruner compares", done.stdout, re.MULTILINE))
        == 1
    )
    assert "warning" not in done.stdout
    assert re.search(r"^units saved by pruning: [1-9]\d* \([1-9]\d*% of what was planned\)$", done.stdout, re.MULTILINE)
