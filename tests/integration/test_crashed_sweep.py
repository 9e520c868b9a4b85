"""One trial of a sweep ends its process, and the others end as in a plain loop; and the process is killed from outside."""

import json
import os
import re
import signal
import time
from contextlib import contextmanager

import optuna
import psutil
import pytest
from optuna.trial import TrialState

from hydra_tune import train_plain
from hydra_tune.checkpoint.tensors import load_tensors
from tests.parity.exact import differences
from tests.support.cli_project import Project
from tests.support.crashing import BAD, NUM_TRIALS, task_of
from tests.support.losable import MESSAGE

SECONDS = 200
SPACE = """
task: tests.support.crashing:task_of
metric: {{name: val_loss}}
method: grid
seed: 0
name: first
parameters:
  number: {{values: [0, 1, 2, 3, 4, 5, 6, 7]}}
  way: {{value: {way}}}
hydra: {{devices: "cpu:{devices}", device_memory: 4MiB, max_concurrent: 3, storage: "sqlite:///trials.db", keep_best: 8,
  checkpoint_dir: saved}}
"""
LOSABLE = """
from tests.support.crashing import task_of
from tests.support.losable import always_losable

always_losable()
"""


@pytest.fixture(scope="module")
def plain():
    """What each trial's weights come to in a plain loop."""
    return [train_plain(task_of(number)).state_dict() for number in range(NUM_TRIALS)]


def project_in(folder, way, devices=1):
    project = Project(folder)
    project.write(SPACE.format(way=way, devices=devices))
    return project


def study_of(project):
    return optuna.load_study(study_name="first", storage=f"sqlite:///{project.folder / 'trials.db'}")


def trials_of(project):
    return {trial.params["number"]: trial for trial in study_of(project).trials}


def assert_as_plain(project, plain, report, numbers):
    trials = trials_of(project)
    assert sorted(trials) == list(range(NUM_TRIALS))
    assert len(report["weights"]) == len(numbers)
    for number in numbers:
        assert trials[number].state == TrialState.COMPLETE
        (path,) = project.folder.glob(f"weights/*/*{trials[number].number}.safetensors")
        assert list(differences(plain[number], load_tensors(path)[0])) == []


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize(
    ("way", "how", "devices"),
    [
        ("fault", "SIGSEGV; it was in string_at (", 2),
        ("exit", "exit code 0, out of order", 1),
        ("lose", f"the loss of its last device, cpu:0 (RuntimeError: {MESSAGE})", 1),
        pytest.param("exit", "exit code 0, out of order", 2, marks=pytest.mark.slow),
    ],
)
def test_a_trial_that_ends_the_process_twice_is_set_aside(tmp_path, plain, way, how, devices):
    project = project_in(tmp_path, way, devices)
    if way == "lose":
        project.change("tests.support.crashing:task_of", "model:task_of")
        (tmp_path / "model.py").write_text(LOSABLE)
    done = project.run("--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["counts"] == {"completed": 7, "pruned": 0, "failed": 1, "cancelled": 0, "interrupted": 0}
    bad = trials_of(project)[BAD]
    assert bad.state == TrialState.FAIL
    (failed,) = [trial for trial in report["trials"] if trial["state"] == "failed"]
    assert failed["number"] == bad.number
    assert (
        f"trial {bad.number} has ended the pool's process 2 times while it ran, the last time by {how}"
        in failed["error"]
    )
    assert f"was ended by {how.partition(';')[0]}" in report["warnings"][0]
    assert f"while trial {bad.number} was at work" in report["warnings"][-1]
    assert report["warnings"][-1].endswith("as before; it is set aside")
    assert [line for line in done.stderr.splitlines() if line.startswith("warning: the pool's process")] == [
        f"warning: {text}" for text in report["warnings"]
    ]
    assert_as_plain(project, plain, report, set(range(NUM_TRIALS)) - {BAD})


@contextmanager
def waiting(project, *arguments):
    """A sweep that waits in a trial, and the process that its supervisor has begun."""
    with project.fork("--json", *arguments) as process:
        deadline = time.monotonic() + SECONDS
        while not (project.folder / "there").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (child,) = psutil.Process(process.pid).children()
        yield process, child


@pytest.mark.cases(1 / 3)
def test_a_process_that_is_killed_from_outside_is_begun_again(tmp_path, plain):
    project = project_in(tmp_path, "wait")
    with waiting(project) as (process, child):
        child.kill()
        (project.folder / "go").touch()
        printed, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    report = json.loads(printed)
    assert report["counts"]["completed"] == NUM_TRIALS
    (text,) = report["warnings"]
    assert text.startswith(
        "the pool's process was ended by SIGKILL (sent by somebody, or by the system where memory has run out)"
    )
    assert re.search(rf"\btrial {trials_of(project)[BAD].number}\b", text)  # others may be at work as well
    assert_as_plain(project, plain, report, set(range(NUM_TRIALS)))


@pytest.mark.cases(1 / 3)
def test_no_process_outlives_its_supervisor(tmp_path, plain):
    project = project_in(tmp_path, "wait")
    with waiting(project) as (process, child):
        process.send_signal(signal.SIGKILL)
        child.wait(SECONDS)
        assert process.communicate(timeout=SECONDS)[0] == ""
    (project.folder / "go").touch()
    done = project.run("--json", "--resume")
    assert done.returncode == 0, done.stderr
    assert_as_plain(project, plain, json.loads(done.stdout), set(range(NUM_TRIALS)))


@pytest.mark.cases(1 / 3)
def test_a_signal_to_all_processes_is_one_signal(tmp_path):
    project = project_in(tmp_path, "wait")
    with waiting(project, "--stop-seconds", "600") as (process, _):
        os.killpg(process.pid, signal.SIGTERM)
        (project.folder / "go").touch()
        printed, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 143, errors
    assert json.loads(printed)["status"] == "interrupted"
    assert errors.count("SIGTERM: the sweep ends when") == 1
    assert "at once by" not in errors


def test_a_process_that_crashes_before_any_trial_is_not_begun_for_ever(tmp_path):
    project = project_in(tmp_path, "none")
    project.change("tests.support.crashing:task_of", "model:task_of")
    (project.folder / "model.py").write_text("import os\nos._exit(7)\n")
    done = project.run()
    assert done.returncode == 1
    how = "exit code 7, out of order (os._exit, or a library's exit)"
    said = f"warning: the pool's process was ended by {how}, while no trial was at work\n"
    assert done.stderr.count(said) == 2
    assert "the process is not restarted, because it crashes whichever trials are set aside" in done.stderr


@pytest.mark.cases(1 / 3)
def test_no_isolate_leaves_the_sweep_in_the_process_of_the_command(tmp_path):
    project = project_in(tmp_path, "exit")
    assert project.run("--no-isolate").returncode == 0  # what the trial has given os._exit
    # The exit may come between a trial's entry in the study and that of its parameters.
    assert TrialState.RUNNING in {trial.state for trial in study_of(project).trials}


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (
            ", checkpoint_dir: saved",
            "",
            "trials go on from their checkpoints after a crash, and this sweep has none; add checkpoint_dir",
        ),
        (
            "checkpoint_dir: saved",
            "checkpoint_dir: saved, fusion: auto",
            "crash together, so the trial at fault is unknown; give --fusion off",
        ),
    ],
)
def test_isolate_says_what_it_needs(tmp_path, old, new, why):
    project = project_in(tmp_path, "none")
    project.write((project.folder / "space.yaml").read_text().replace(",\n  checkpoint_dir", ", checkpoint_dir"))
    project.change(old, new)
    done = project.run("--isolate")
    assert done.returncode == 2
    assert done.stderr.startswith("--isolate: ")
    assert why in done.stderr
    assert not (project.folder / "trials.db").exists()


@pytest.mark.cases(1 / 3)
def test_trials_that_have_failed_in_this_run_are_not_replaced(tmp_path):
    """Every trial ends the process: each is set aside in its turn, and there are as many as the file says."""
    project = project_in(tmp_path, "fault")
    project.change("method: grid", "method: random\nrun_cap: 3")
    project.change("values: [0, 1, 2, 3, 4, 5, 6, 7]", f"values: [{BAD}]")
    done = project.run("--json")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["counts"] == {"completed": 0, "pruned": 0, "failed": 3, "cancelled": 0, "interrupted": 0}
    assert len(report["warnings"]) == 6
