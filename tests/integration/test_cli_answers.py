"""`list`, `status`, `show`, `best` and `plot` on an empty folder, a running sweep, a killed one, a finished one, and a study by
stock Optuna: real processes, real SQLite files."""

import csv
import io
import json
import os
import re
import signal
import sqlite3
import subprocess
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import optuna
import pytest
import yaml
from click.testing import CliRunner
from matplotlib import image

from hydra_tune.cli import main
from hydra_tune_optuna import study_reader
from tests.support.cli_project import Project

SECONDS = 120


def call(*arguments):
    return CliRunner(env={"COLUMNS": "120"}).invoke(main, [*map(str, arguments)])


def runs_of(*arguments):
    """The runs as `status` tells them; checks that `list` agrees, unless a run goes on between the two."""
    done = call("status", *arguments, "--json")
    assert done.exit_code == 0, done.output
    runs = json.loads(done.stdout)["runs"]
    listed = json.loads(call("list", *arguments, "--json").stdout)["runs"]
    assert any(run["state"] == "running" for run in (*runs, *listed)) or listed == [
        {name: value for name, value in run.items() if name != "trials"} for run in runs
    ]
    return runs


@pytest.fixture
def project(tmp_path, monkeypatch):
    project = Project(tmp_path)
    project.change("hydra: {", "name: first\nhydra: {storage: 'sqlite:///trials.db', checkpoint_dir: saved, ")
    monkeypatch.chdir(tmp_path)
    return project


@contextmanager
def started(project, *arguments):
    """A sweep in a process group of its own, which lives no longer than the block."""
    with project.start(*arguments) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def until_running(process):
    """Wait until a trial of the running sweep has reported; returns the run."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None
        runs = runs_of()
        if runs and any(trial["value"] is not None for trial in runs[0]["trials"]):
            return runs[0]
        time.sleep(0.2)
    raise AssertionError("no trial has reported")


def stop_between_writes(process):
    """Stop a process group while nobody writes to its study: a process that stops within a transaction keeps SQLite's lock."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        os.killpg(process.pid, signal.SIGSTOP)
        with closing(sqlite3.connect("trials.db", timeout=0.1, isolation_level=None)) as connection:
            try:
                connection.execute("BEGIN EXCLUSIVE")
            except sqlite3.OperationalError:
                os.killpg(process.pid, signal.SIGCONT)
                time.sleep(0.01)
            else:
                return
    raise AssertionError("a transaction was under way at each stop")


def test_an_empty_folder_has_no_runs_and_says_how_to_begin(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in ("list", "status"):
        done = call(command)
        assert done.exit_code == 0
        assert done.output.startswith(f"no runs in {tmp_path}; hydra-tune init writes a sweep")
    assert runs_of() == []
    for command in (
        ["show"],
        ["show", "first"],
        ["best", "first"],
        ["plot", "first", "--out", "x.png"],
        ["export", "--out", "x"],
    ):
        done = call(*command)
        assert done.exit_code == 2, command
        assert "there is no run" in done.stderr
    assert call("list", "nowhere").exit_code == call("status", "--storage", "sqlite:///nowhere.db").exit_code == 2
    assert list(tmp_path.iterdir()) == []


def assert_shown(run):
    """`show` and `best` tell what the storage has of the finished sweep."""
    stored = optuna.load_study(study_name="first", storage="sqlite:///trials.db")
    best = stored.best_trial
    assert (run["best"][0]["number"], run["best"][0]["value"]) == (best.number, best.value)
    shown = call("show", "space.yaml", "--top", 1).output
    assert re.search(rf"^ *{best.number} .* completed +lr=.* train_loss=", shown, re.MULTILINE), shown
    assert "... and 2 more, which --top 3 shows" in shown
    lines = list(csv.DictReader(io.StringIO(call("show", "first", "--csv").stdout)))
    assert [float(line["val_loss"]) for line in lines] == sorted(trial.value for trial in stored.trials)
    assert float(lines[0]["param.lr"]) == best.params["lr"]
    assert float(lines[0]["metric.train_loss"]) > 0
    assert json.loads(call("show", run["logs"][-1], "--json").stdout)["trials"] == run["trials"]
    assert call("best", "space.yaml").output.startswith(
        f"trial {best.number} of first, completed, val_loss {best.value}\n  lr: {best.params['lr']}\n"
    )
    assert json.loads(call("best", "first", "--json").stdout)["params"] == best.params


@pytest.mark.slow
def test_a_sweep_runs_is_killed_and_finishes(project):
    """The three states of one sweep, one after the other: the command that `status` gives for a killed sweep finishes it."""
    project.change("width: {values: [8, 16]}", "width: {values: [8, 16]}\n  epochs: {value: 600}")
    project.change("run_cap: 8", "run_cap: 3")
    with started(project, "--max-concurrent", "2", "--set", "epochs=600") as process:
        until_running(process)
        # A stopped process keeps its locks, and its trials do not end while the test looks.
        stop_between_writes(process)
        (run,) = runs_of()
        assert (run["name"], run["state"], run["planned"], run["next_step"]) == ("first", "running", 3, None)
        assert "running" in run["counts"]
        text = call("status").output
        assert text.startswith("first: running (its process is at work)\n")
        assert re.search(r"^  trial \d+  running  val_loss \S+  lr=.*last report: epoch \d+/600$", text, re.MULTILINE)
        assert re.search(r"^first +running +0/3 ", call("list").output, re.MULTILINE)
        # The process and its supervisor, as a machine that goes down ends both.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=SECONDS)
    (run,) = runs_of()
    assert (run["state"], run["planned"]) == ("killed", 3)
    assert set(run["counts"]) == {"interrupted"}
    going_on = "hydra-tune sweep space.yaml --set epochs=600 --max-concurrent 2 --resume"
    assert run["next_step"] == f"to go on: {going_on}"
    assert call("best", "space.yaml").exit_code == 2

    done = project.run(*going_on.split()[3:])
    assert done.returncode == 0, done.stderr
    (run,) = runs_of()
    assert (run["state"], run["counts"], run["next_step"]) == ("finished", {"completed": 3}, None)
    assert len(run["logs"]) == 2
    assert_shown(run)
    again = project.call("--no-log", "--run-cap", "3", "--set", "epochs=600")
    assert again.returncode == 0
    assert again.stdout.endswith(
        "run_cap reached: the study has all of its 3 trials; raise it, as run_cap in space.yaml or with --run-cap\n"
    )


def test_a_sweep_in_memory_is_known_by_its_log_alone(project):
    project.write(
        (project.folder / "space.yaml")
        .read_text()
        .replace("storage: 'sqlite:///trials.db', checkpoint_dir: saved, ", "")
    )
    done = project.call("--json", "--run-cap", "3")
    (run,) = runs_of()
    assert (run["name"], run["state"], run["storage"]) == ("first", "finished", None)
    for file in ("space.yaml", run["logs"][0]):
        assert [found["trials"] for found in runs_of(file)] == [run["trials"]]
    report = json.loads(done.stdout)
    assert [trial["number"] for trial in run["trials"]] == [
        trial["number"] for trial in sorted(report["trials"], key=lambda trial: trial["value"])
    ]
    assert run["best"][0]["params"] == report["best"]["params"]
    assert json.loads(call("best", "space.yaml", "--json").stdout)["value"] == report["best"]["value"]
    refused = call("plot", "space.yaml", "--out", "x.png")
    assert (refused.exit_code, "was in memory" in refused.stderr) == (2, True)


@pytest.mark.cases(1 / 3)
def test_ctrl_c_says_what_running_trials_have_reached_and_how_to_go_on(project):
    project.change("width: {values: [8, 16]}", "width: {values: [8, 16]}\n  epochs: {value: 1000000}")
    with started(project, "--no-live") as process:
        until_running(process)
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 130, errors
    assert re.search(r"^running at the interruption: 4$", printed, re.MULTILINE)
    reached = re.findall(r"^  trial \d+  interrupted  val_loss \S+  epoch \d+/1000000  lr=", printed, re.MULTILINE)
    assert reached
    assert printed.endswith("\nto go on: hydra-tune sweep space.yaml --resume\n")
    # Epochs count from 1, as in the lines of the sweep; a report is of the epoch before that of the interruption, or of it.
    told = call("status").output
    assert len(
        re.findall(
            r"^  trial \d+  interrupted  val_loss \S+  lr=.*  last report: epoch \d+/1000000$", told, re.MULTILINE
        )
    )
    (run,) = runs_of()
    assert (run["state"], run["counts"]) == ("interrupted", {"interrupted": 4})
    assert run["next_step"] == "to go on: hydra-tune sweep space.yaml --resume"


def objective(trial):
    x = trial.suggest_float("x", 0, 1)
    for step in range(3):
        trial.report(x / (step + 1), step)
    trial.set_user_attr("twice", 2 * x)
    return x * trial.suggest_categorical("sign", [1, -1])


@pytest.mark.cases(1 / 3)
def test_a_study_by_stock_optuna_is_read_drawn_and_left_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    storage = "sqlite:///stock.db"
    study = optuna.create_study(study_name="stock", storage=storage, direction="maximize")
    study.optimize(objective, n_trials=6)
    before = (tmp_path / "stock.db").read_bytes()
    (run,) = runs_of()
    assert runs_of("--storage", storage) == runs_of("stock.db") == [run]
    optuna.create_study(study_name="other", storage=storage)
    (tmp_path / "space.yaml").write_text(
        f"task: a:b\nmetric: {{name: x}}\nname: stock\nhydra: {{storage: '{storage}'}}\n"
    )
    (found,) = runs_of("space.yaml")
    assert (found["name"], found["counts"]) == ("stock", {"completed": 6})
    optuna.delete_study(study_name="other", storage=storage)
    (tmp_path / "space.yaml").unlink()
    before = (tmp_path / "stock.db").read_bytes()
    assert (run["name"], run["state"], run["counts"], run["planned"]) == ("stock", "idle", {"completed": 6}, None)
    assert run["best"][0]["value"] == study.best_value
    assert run["best"][0]["metrics"] == {"twice": study.best_trial.user_attrs["twice"]}
    for way in (["stock"], ["stock.db"], ["stock", "--storage", storage], ["--storage", storage], []):
        shown = json.loads(call("show", *way, "--json", "--top", 2).stdout)
        assert [trial["value"] for trial in shown["trials"]] == sorted((t.value for t in study.trials), reverse=True)[
            :2
        ]
    drawn = call("plot", "stock", "--out", "stock.png")
    assert (drawn.exit_code, drawn.output) == (0, "plot: stock.png\n"), drawn.output
    assert image.imread("stock.png").shape[:2] == (3 * 500, 1100), "three pictures, one below the other"
    assert (tmp_path / "stock.db").read_bytes() == before

    study.ask()
    (run,) = runs_of()
    assert (run["state"], run["counts"]) == ("unclear", {"completed": 6, "running": 1})
    assert "no event log or lock here says whether their process lives" in run["next_step"]


@pytest.mark.cases(1 / 3)
def test_a_fixed_parameter_is_in_no_picture(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    study = optuna.create_study(study_name="stock", storage="sqlite:///stock.db")
    study.optimize(lambda trial: trial.suggest_categorical("epochs", [12]) * objective(trial), n_trials=6)
    texts = {}
    pixels = study_reader._pixels

    def drawn(plot, loaded):
        def read(loaded):
            axes = plot(loaded)
            texts[getattr(plot, "func", plot).__name__] = {
                label.get_text() for label in (*axes.get_xticklabels(), *axes.get_yticklabels())
            }
            return axes

        return pixels(read, loaded)

    monkeypatch.setattr(study_reader, "_pixels", drawn)
    assert call("plot", "stock", "--out", "x.png").output == "plot: x.png\n"
    for picture in ("plot_parallel_coordinate", "plot_param_importances"):
        assert texts[picture] & {"x", "sign", "epochs"} == {"x", "sign"}
    fixed = optuna.create_study(study_name="fixed", storage="sqlite:///fixed.db")
    fixed.optimize(lambda trial: trial.suggest_categorical("epochs", [12]), n_trials=2)
    refused = call("plot", "fixed", "--out", "x.png")
    assert (refused.exit_code, "no trial with parameters that vary has completed" in refused.stderr) == (2, True)


def test_without_plotly_a_page_is_refused_with_the_extra_to_install(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(optuna.visualization, "is_available", lambda: False)
    study = optuna.create_study(study_name="stock", storage="sqlite:///stock.db")
    nothing = call("plot", "stock", "--out", "x.png")
    assert (nothing.exit_code, "has nothing to draw" in nothing.stderr) == (2, True)
    study.optimize(objective, n_trials=1)
    refused = call("plot", "stock", "--out", "x.html")
    assert (refused.exit_code, "pip install 'hydra-tune[html]'" in refused.stderr) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["stock.db"]


@pytest.mark.parametrize(
    ("folder", "study"),
    [("first", "first"), ("digits-2", "digits-2"), ("a b", "first"), ("on", "first"), ("7", "first")],
)
def test_the_study_of_a_new_sweep_has_the_name_of_the_folder(tmp_path, monkeypatch, folder, study):
    (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / folder)
    assert call("init").exit_code == 0
    text = Path("space.yaml").read_text()
    assert yaml.safe_load(text)["name"] == study
    assert len({line.index("#") for line in text.splitlines() if line.startswith(("task:", "name:", "method:"))}) == 1


@pytest.mark.cases(1 / 3)
def test_a_new_sweep_is_checked_and_runs_as_it_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("init", "first").exit_code == 0
    monkeypatch.chdir(tmp_path / "first")
    environment = Project.environment()
    command = [*Project(tmp_path).command()[:3]]
    done = subprocess.run(
        [*command, "check", "space.yaml"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "12 trials of train:build, drawn by bayes, to maximize val_accuracy" in done.stdout
    assert sorted(path.name for path in (tmp_path / "first").glob("[!_]*")) == ["space.yaml", "train.py"]
    done = subprocess.run(
        [*command, "sweep", "space.yaml"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (run,) = runs_of()
    assert (run["state"], sum(run["counts"].values())) == ("finished", 12)
    assert run["best"][0]["value"] > 0.8
