"""`hydra-tune init` replaces nothing; `hydra-tune check` says what would run, or what is wrong, and creates nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
from click.testing import CliRunner
from optuna.trial import TrialState

from hydra_tune.checkpoint.sweep_folder import SweepFolder
from hydra_tune.cli import main
from hydra_tune.cli.sweep_file.reader import read_sweep_file
from hydra_tune_optuna.sweep import to_distribution


def call(*arguments):
    return CliRunner().invoke(main, [*map(str, arguments)])


@pytest.fixture
def first(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "first"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert call("init").exit_code == 0
    yield folder
    sys.modules.pop("train", None)


@pytest.mark.parametrize("name", ["space.yaml", "train.py"])
def test_a_file_that_is_there_is_kept_and_no_other_is_written(tmp_path, name):
    (tmp_path / name).write_text("mine")
    done = call("init", tmp_path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{name} in '{tmp_path}' would be replaced")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_code_1(tmp_path):
    (tmp_path / "file").touch()
    done = call("init", tmp_path / "file" / "first")
    assert (done.exit_code, "cannot write" in done.stderr) == (1, True)


def test_what_will_run_is_told_and_nothing_is_created(first):
    done = call("check", "space.yaml", "--set", "epochs=3", "--json")
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout)
    assert plan["runs"] == "12 trials of train:build, drawn by bayes, to maximize val_accuracy"
    assert plan["parameters"] == [
        "lr: from 0.001 to 0.1, over magnitudes",
        "width: one of 16, 32, 64",
        "dropout: from 0.0 to 0.5",
        "epochs: 3",
    ]
    assert (plan["devices"], plan["study"]) == ("cpu:0, cpu:1; 4 trials in flight", "first in sqlite:///trials.db")
    assert {path.name for path in first.iterdir()} - {"__pycache__"} == {"space.yaml", "train.py"}


@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        ("space.yaml", "run_cap", "run_cup", "unknown key 'run_cup'; did you mean 'run_cap'?"),
        ("space.yaml", "train:build", "train:biuld", "has no 'biuld'; did you mean 'build'?"),
        ("space.yaml", "  width:", "  depth:", "train:build takes no argument 'depth'"),
        ("space.yaml", "val_accuracy", "val_acc ", "metric.name: metric 'val_acc' is never reported"),
        ("space.yaml", "devices: cpu:2", "devices: gpu:2", "hydra.devices: "),
        ("space.yaml", "storage: sqlite:///trials.db", "keep_best: 1", "add hydra.storage"),
        ("train.py", "    return TrainTask(", "    return dict(", "must return a TrainTask, not dict"),
        ("train.py", "    return TrainTask(", "    1 / 0\n    return TrainTask(", "train:build failed with lr="),
    ],
)
def test_what_is_wrong_is_code_2(first, file, old, new, problem):
    text = Path(file).read_text()
    assert old in text
    Path(file).write_text(text.replace(old, new))
    if "metric" in problem:  # only a task that names its values in advance can tell
        Path("train.py").write_text(Path("train.py").read_text().replace("        evaluate=evaluate,\n", ""))
    done = call("check", "space.yaml")
    assert (done.exit_code, done.stdout) == (2, "")
    assert problem in done.stderr
    # The user's own code is shown with its lines, and no code of this package.
    assert ("Traceback" in done.stderr) == ("1 / 0" in new)


def finished():
    """The study of `space.yaml` with its 12 trials, one of them failed."""
    study = optuna.create_study(study_name="first", storage="sqlite:///trials.db", direction="maximize")
    space = {name: to_distribution(domain) for name, domain in read_sweep_file(Path("space.yaml")).parameters.items()}
    for number in range(12):
        study.tell(study.ask(space), **({"values": 0.5} if number else {"state": TrialState.FAIL}))


def changed(old, new):
    text = (Path("first.yaml") if Path("first.yaml").exists() else Path("space.yaml").rename("first.yaml")).read_text()
    assert old in text
    Path("space.yaml").write_text(text.replace(old, new))


def test_a_study_that_has_its_trials_is_told(first):
    finished()
    for cap, left in ((12, 1), (20, 9)):
        changed("run_cap: 12", f"run_cap: {cap}")
        done = call("check", "space.yaml", "--json")
        assert done.exit_code == 0, done.output
        plan = json.loads(done.stdout)
        assert plan["runs"].startswith(f"{left} more trials of train:build, ")
        assert plan["study"] == "first in sqlite:///trials.db, which has 12 trials that have ended"


@pytest.mark.cases(1 / 3)
def test_no_sweep_that_the_study_or_another_process_would_not_let_begin_passes(first):
    finished()
    (first / "checkpoints").mkdir(mode=0o700)
    there = "the study 'first' in sqlite:///trials.db is there already"
    for old, new, problem in (
        ("sqlite:///", "", "is no URL of a storage; did you mean 'sqlite:///trials.db'?"),
        ("sqlite:///", "sqlite:///no/", f"there is no folder '{first}/no'; make the folder"),
        ("sqlite:///", "nonsense://me:secret@", "hydra.storage: 'nonsense://me:***@trials.db' cannot be opened: "),
        ("epochs: {value: 12}", "epochs: {value: 3}", f"parameters.epochs: {there}, with "),
        ("goal: maximize", "goal: minimize", f"metric.goal: {there}, and its goal is maximize"),
    ):
        changed(old, new)
        for command in (["check"], ["sweep", "--no-log"]):
            done = call(*command, "space.yaml")
            assert (done.exit_code, done.stdout, problem in done.stderr) == (2, "", True), (command, done.output)
    changed("", "")
    assert list((first / "checkpoints").iterdir()) == []
    with SweepFolder(first / "checkpoints", "first"):
        done = call("check", "space.yaml")
    assert (done.exit_code, done.stdout) == (2, "")
    assert (
        f"the sweep 'first' in '{first}/checkpoints' is being run by another process ({os.getpid()} on " in done.stderr
    )


@pytest.mark.parametrize("made", [False, True])
def test_the_storage_of_a_first_run_is_not_made(first, made):
    if made:  # as another program leaves an empty file
        (first / "trials.db").touch()
    before = sorted(first.iterdir())
    assert call("check", "space.yaml").exit_code == 0
    assert {*first.iterdir()} - {first / "__pycache__"} == {*before}
    assert not made or (first / "trials.db").read_bytes() == b""


def test_neither_help_nor_answers_import_torch(first):
    code = (
        "import sys\nfrom hydra_tune.cli import main\n"
        "for arguments in (['--help'], ['init', 'new'], ['list'], ['status'], ['show', '--help'], ['list', '--storage', 'sqlite:///x.db']):\n"
        "    try:\n        main(arguments)\n"
        "    except SystemExit as end:\n        print(end.code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ends = [line for line in done.stdout.splitlines() if line.endswith(("True", "False"))]
    assert ends == ["0 False"] * 5 + ["2 False"]
