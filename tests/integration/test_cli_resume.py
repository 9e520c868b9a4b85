"""A sweep that is interrupted, however it is, goes on: no trial twice, none lost, and the same weights in the end."""

import json
import re
import signal
import time

import optuna
import pytest
from optuna.trial import TrialState

from tests.support.cli_project import Project

SECONDS = 120
NUM_TRIALS = 4
# Each pass takes a while in the run that is interrupted, so that it is not over before, however slow the machine is.
WAITING = """
def batches():
    time.sleep(0.2 * Path("waiting").exists())
"""


def project_in(folder):
    folder.mkdir()
    project = Project(folder)
    project.change("width: {values: [8, 16]}", "width: {values: [8, 16]}\n  epochs: {value: 8}")
    project.change("run_cap: 8", f"run_cap: {NUM_TRIALS}\nmethod: random\nname: first")
    project.change("max_concurrent: 4", "max_concurrent: 2")
    kept = f"storage: sqlite:///trials.db, keep_best: {NUM_TRIALS}, checkpoint_dir: saved"
    project.change("hydra: {", f"hydra: {{{kept}, ")
    model = folder / "model.py"
    model.write_text(
        "import time\nfrom pathlib import Path\n" + model.read_text().replace("\ndef batches():\n", WAITING)
    )
    return project


def trials_of(project):
    return optuna.load_study(study_name="first", storage=f"sqlite:///{project.folder / 'trials.db'}").trials


def outcome(project):
    found = [
        (each.number, each.state, each.params, each.values, each.intermediate_values) for each in trials_of(project)
    ]
    return found, {path.name: path.read_bytes() for path in project.folder.glob("weights/*/*.safetensors")}


def interrupt(project, number, *, at_once=2, meanwhile=lambda _process: None):
    """Run the sweep until so many trials have new checkpoints, and send a signal."""
    before = set(project.folder.glob("saved/*/*.manifest"))
    (project.folder / "waiting").touch()
    with project.fork() as process:
        deadline = time.monotonic() + SECONDS
        while len({path.parent for path in set(project.folder.glob("saved/*/*.manifest")) - before}) < at_once:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        meanwhile(process)
        process.send_signal(number)
        printed, errors = process.communicate(timeout=SECONDS)
    (project.folder / "waiting").unlink()
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number), errors
    return printed


def finish(project):
    done = project.call("--resume", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What a sweep comes to that nothing interrupts."""
    project = project_in(tmp_path_factory.mktemp("undisturbed") / "project")
    done = project.call("--json")
    assert done.returncode == 0, done.stderr
    found = outcome(project)
    assert len(found[0]) == len(found[1]) == NUM_TRIALS
    assert {trial[1] for trial in found[0]} == {TrialState.COMPLETE}
    assert len({json.dumps(trial[2]) for trial in found[0]}) == NUM_TRIALS
    return found


@pytest.mark.cases(1 / 3)
def test_sigterm_and_resume(tmp_path, whole):
    project = project_in(tmp_path / "project")
    printed = interrupt(project, signal.SIGTERM)
    states = [trial.state for trial in trials_of(project)]
    assert TrialState.RUNNING in states
    assert set(states) <= {TrialState.RUNNING, TrialState.WAITING, TrialState.COMPLETE}
    num_interrupted = sum(state != TrialState.COMPLETE for state in states)
    assert len(re.findall(r"^trial \d+  interrupted  ", printed, re.MULTILINE)) == num_interrupted
    assert "interrupted, to go on with --resume" in printed
    report = finish(project)
    assert outcome(project) == whole
    assert report["counts"] == {"completed": NUM_TRIALS, "pruned": 0, "failed": 0, "cancelled": 0, "interrupted": 0}
    assert len(report["weights"]) == NUM_TRIALS
    assert not list(project.folder.glob("saved/*/*.manifest"))


@pytest.mark.slow
def test_one_process_at_a_time_and_sigkill(tmp_path, whole):
    """A lock that a killed process has held holds nobody off."""
    project = project_in(tmp_path / "project")

    def refused(process):
        process.send_signal(signal.SIGSTOP)  # else it may be done before the second has come up
        second = project.run("--resume")
        assert second.returncode == 2
        assert f"the sweep 'first' in '{project.folder / 'saved'}' is being run by another process" in second.stderr
        assert f"({process.pid} on " in second.stderr

    interrupt(project, signal.SIGKILL, meanwhile=refused)
    finish(project)
    assert outcome(project) == whole


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", ["random", "grid", "bayes"])
def test_again_and_again(tmp_path, method):
    """Every signal in turn; one trial at a time, so that what TPE learns from does not depend on the machine."""

    def made(name):
        project = project_in(tmp_path / name)
        project.change("method: random", f"method: {method}")
        project.change(f"run_cap: {NUM_TRIALS}", "run_cap: 14")
        project.change("max_concurrent: 2", "max_concurrent: 1")
        if method == "grid":
            project.change("{distribution: log_uniform_values, min: 1e-5, max: 0.1}", "{values: [1e-4, 1e-3, 1e-2]}")
        return project

    project, undisturbed = made("interrupted"), made("whole")
    for number in (signal.SIGINT, signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
        interrupt(project, number, at_once=1)
    finish(project)
    assert undisturbed.run().returncode == 0
    assert outcome(project) == outcome(undisturbed)
    assert len(trials_of(project)) == (6 if method == "grid" else 14)


STOPS = """

num_built = 0


def stopping(**parameters):
    global num_built
    num_built += 1
    if Path("again").exists():
        raise KeyboardInterrupt
    if num_built == 3:
        os._exit(7)
    return build(**parameters | {"epochs": 10**6})
"""


def test_a_resumed_sweep_that_ends_early_lists_the_trials_it_has_not_come_to(tmp_path):
    """The first process ends with three trials under way, and the second while it builds the first of them again."""
    project = project_in(tmp_path / "project")
    model = project.folder / "model.py"
    model.write_text("import os\n" + model.read_text() + STOPS)
    project.change("model:build", "model:stopping")
    project.change("max_concurrent: 2", "max_concurrent: 3")
    assert project.run("--no-isolate").returncode == 7
    assert [trial.state for trial in trials_of(project)] == [TrialState.RUNNING] * 3
    (project.folder / "again").touch()
    done = project.call("--resume", "--json")
    assert done.returncode == 130, done.stderr
    states = [(trial["number"], trial["state"]) for trial in json.loads(done.stdout)["trials"]]
    assert states == [(number, "interrupted") for number in range(3)]
