"""Weights of a sweep: kept by `hydra-tune sweep`, named at its end, and written by `hydra-tune best` and `export`."""

import errno
import json
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from click.testing import CliRunner
from matplotlib import image

from hydra_tune import load_module
from hydra_tune.checkpoint.tensors import load_tensors
from hydra_tune.cli.root import main
from hydra_tune.cli.sweep_file.domains import FloatDomain
from hydra_tune.train.loop.reference_loop import train_plain
from hydra_tune_optuna import optuna_internals
from hydra_tune_optuna.sweep import _record, suggest
from tests.support.cli_project import Project


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep of 4 trials that has kept 2, and what it said."""
    project = Project(tmp_path_factory.mktemp("best"))
    project.change("max_concurrent: 4", "max_concurrent: 2, keep_best: 2, storage: 'sqlite:///trials.db', study: first")
    project.change("run_cap: 8", "run_cap: 4")
    done = project.call("--json", "--no-log")
    assert done.returncode == 0, done.stderr
    return project, json.loads(done.stdout)


@pytest.fixture
def best(swept, monkeypatch):
    monkeypatch.chdir(swept[0].folder)
    return lambda *arguments: CliRunner().invoke(main, ["best", *map(str, arguments)])


@pytest.mark.cases(1 / 3)
def test_the_sweep_names_the_files_and_best_writes_the_first(swept, best, tmp_path, monkeypatch):
    project, report = swept
    ranked = sorted(report["trials"], key=lambda trial: trial["value"])
    assert [int(number) for number in report["weights"]] == [trial["number"] for trial in ranked[:2]]
    assert len(list((project.folder / "weights").rglob("*.safetensors"))) == 2
    done = best("space.yaml", "--out", tmp_path / "best.safetensors", "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert (said["trial"], said["value"], said["params"]) == tuple(
        ranked[0][key] for key in ("number", "value", "params")
    )
    assert said["weights"] == report["weights"][str(said["trial"])]
    tensors, metadata = load_tensors(tmp_path / "best.safetensors")
    assert (metadata["study"], metadata["trial"]) == ("first", str(said["trial"]))
    assert stat.S_IMODE((tmp_path / "best.safetensors").stat().st_mode) == 0o600
    monkeypatch.syspath_prepend(project.folder)
    import model  # noqa: PLC0415 - the project's

    task = model.build(**said["params"])
    expected = train_plain(task).state_dict()
    found = load_module(task, tmp_path / "best.safetensors").state_dict()
    assert all(found[name].equal(tensor) and tensors[name].equal(tensor) for name, tensor in expected.items())


def test_a_trial_by_number_from_a_study_by_name(swept, best, tmp_path):
    second = list(swept[1]["weights"])[1]
    done = best("first", "--storage", "sqlite:///trials.db", "--trial", second, "--out", tmp_path / "it")
    assert done.exit_code == 0, done.output
    assert done.output.startswith(f"trial {second} of first, completed, val_loss ")
    assert done.output.endswith(f"weights: {tmp_path / 'it'}\n")


@pytest.mark.parametrize("run", [["first"], ["trials.db"], []])
def test_the_run_is_found_as_by_show(best, tmp_path, run):
    done = best(*run, "--out", tmp_path / "it")
    assert done.exit_code == 0, done.output
    assert done.output == f"{best(*run).output}weights: {tmp_path / 'it'}\n"


def test_what_cannot_be_had_is_said_and_nothing_is_written(swept, best, tmp_path):
    out = tmp_path / "out"
    dropped = next(trial["number"] for trial in swept[1]["trials"] if str(trial["number"]) not in swept[1]["weights"])
    url = f"sqlite:///{tmp_path}/two.db"
    for name in ("one", "two"):
        optuna.create_study(storage=url, study_name=name)
    (tmp_path / "random.yaml").write_text("task: model:build\nmetric: {name: val_loss}\n")
    cases = [
        (1, ["space.yaml", "--trial", dropped], "raise keep_best, or take one of these"),
        (
            2,
            ["one", "--storage", url],
            "run 'one' has no best trial: no trial has completed; give one of its trials with",
        ),
        (2, ["space.yaml", "--trial", 99], "run 'first' has no trial 99; it has 4, from 0 on"),
        (
            2,
            ["nothing.yaml"],
            "give a folder, a sweep file, an event log",
        ),
        (2, ["first", "--storage", "sqlite:///nowhere.db"], "nowhere.db'"),
        (2, ["first", "--storage", "journal:nowhere.log"], "nowhere.log'"),
        (2, ["first", "--storage", "nonsense://x?password=y"], "'nonsense://x?password=***' cannot be read: "),
        (2, ["third", "--storage", url], "there is no run 'third' in"),
        (2, [tmp_path / "random.yaml", "--storage", url], "there are 2 runs in"),
        (2, [tmp_path / "random.yaml"], "the sweep has no hydra.storage"),
    ]
    for code, arguments, message in cases:
        done = best(*arguments, "--out", out)
        assert (done.exit_code, message in done.stderr) == (code, True), (arguments, done.output)
    assert not out.exists()
    assert not (swept[0].folder / "nowhere.db").exists()


@pytest.mark.cases(1 / 3)
def test_export_writes_trials_pictures_and_the_best_weights(swept, best, tmp_path):
    folder = tmp_path / "results" / "of-first"
    done = exported("space.yaml", "--out", folder)
    assert (done.exit_code, done.output) == (0, f"export: {folder}\n")
    assert sorted(path.name for path in folder.iterdir()) == ["best.safetensors", "plots.png", "run.json", "trials.csv"]
    shown = CliRunner().invoke(main, ["show", "first", "--csv"])
    assert (folder / "trials.csv").read_text() == shown.output
    assert json.loads((folder / "run.json").read_text()) == json.loads(
        CliRunner().invoke(main, ["show", "first", "--json"]).stdout
    )
    assert best("--out", tmp_path / "alone.safetensors").exit_code == 0
    tensors, metadata = load_tensors(folder / "best.safetensors")
    expected, same = load_tensors(tmp_path / "alone.safetensors")
    assert metadata == same
    assert tensors.keys() == expected.keys()
    assert all(tensors[name].equal(tensor) for name, tensor in expected.items())
    assert image.imread(folder / "plots.png").ndim == 3

    refused = exported("first", "--out", folder)
    assert (refused.exit_code, "has files; give another --out, or --force" in refused.stderr) == (2, True)
    (folder / "trials.csv").write_text("")
    assert exported("first", "--out", folder, "--force").exit_code == 0
    assert (folder / "trials.csv").read_text() == shown.output


def test_export_names_what_a_run_does_not_have(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    optuna.create_study(study_name="stock", storage="sqlite:///stock.db").optimize(lambda trial: 1.0, n_trials=2)
    (tmp_path / "file").write_text("")
    unwritten = exported("stock", "--out", "file/results")
    assert (unwritten.exit_code, "cannot write into file/results" in unwritten.stderr) == (1, True)
    done = exported("stock", "--out", "results")
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == ["run.json", "trials.csv"]
    lines = done.stderr.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["no plots.png", "no best.safetensors"]
    assert "has nothing to draw" in lines[0]


def test_export_by_force_leaves_no_file_of_another_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    optuna.create_study(study_name="stock", storage="sqlite:///stock.db").optimize(lambda trial: 1.0, n_trials=2)
    folder = tmp_path / "results"
    folder.mkdir()
    for name in ("plots.png", "best.safetensors", "trials.csv", "notes.txt"):
        (folder / name).write_text("of another run")
    done = exported("stock", "--out", folder, "--force")
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in folder.iterdir()) == ["notes.txt", "run.json", "trials.csv"]
    assert (folder / "notes.txt").read_text() == "of another run"


def test_export_into_a_folder_that_cannot_be_read_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    optuna.create_study(study_name="stock", storage="sqlite:///stock.db")
    (tmp_path / "results").mkdir()
    listed = Path.iterdir

    def refused(path):
        if path.name == "results":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", refused)
    done = exported("stock", "--out", "results")
    assert (done.exit_code, done.stderr) == (1, "cannot read results: Permission denied; give another --out\n")
    monkeypatch.undo()
    assert list((tmp_path / "results").iterdir()) == []


@pytest.mark.cases(1 / 3)
def test_export_names_the_command_that_has_the_options_for_other_weights(swept, best, tmp_path):
    optuna.create_study(
        study_name="pareto", storage=f"sqlite:///{tmp_path}/two.db", directions=["minimize", "minimize"]
    )
    study = optuna.load_study(study_name="pareto", storage=f"sqlite:///{tmp_path}/two.db")
    study.optimize(lambda trial: (trial.number, 1 - trial.number), n_trials=2)
    done = exported("pareto", "--storage", f"sqlite:///{tmp_path}/two.db", "--out", tmp_path / "front")
    assert (done.exit_code, "give one of 0, 1 with hydra-tune best --trial N\n" in done.stderr) == (0, True)
    (swept[0].folder / "weights").rename(tmp_path / "moved")
    try:
        done = exported("first", "--out", tmp_path / "results")
        assert best("first", "--weights-dir", tmp_path / "moved", "--out", tmp_path / "it").exit_code == 0
    finally:
        (tmp_path / "moved").rename(swept[0].folder / "weights")
    assert done.exit_code == 0, done.output
    assert "moved, use hydra-tune best --trial N --weights-dir DIR --out FILE\n" in done.stderr


def exported(*arguments):
    return CliRunner().invoke(main, ["export", *map(str, arguments)])


def test_weights_that_do_not_give_the_value_are_refused(tmp_path, monkeypatch):
    project = Project(tmp_path)
    model = tmp_path / "model.py"
    # The value of the first epoch, as all later ones diverge.
    model.write_text(model.read_text().replace("epochs=epochs,", "epochs=epochs, result='best',"))
    project.change("lr: {distribution: log_uniform_values, min: 1e-5, max: 0.1}", "lr: {value: 1.0}")
    project.change("max_concurrent: 4", "keep_best: 1, storage: 'sqlite:///trials.db', study: first")
    done = project.call("--json", "--no-log", "--run-cap", "1")
    assert done.returncode == 0, done.stderr
    (weights,) = json.loads(done.stdout)["weights"].values()
    monkeypatch.chdir(tmp_path)
    refused = CliRunner().invoke(main, ["best", "--out", "out"])
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "the value of trial 0 is that of its report " in refused.stderr
    assert f"with hydra_tune.load_module(task, '{weights}')" in refused.stderr
    assert not (tmp_path / "out").exists()


def test_a_file_is_replaced_only_by_force(best, tmp_path):
    out = tmp_path / "out"
    out.write_text("mine")
    done = best("space.yaml", "--out", out)
    assert done.exit_code == 2
    assert "is there already; give another --out, or --force to replace it" in done.stderr
    assert out.read_text() == "mine"
    assert best("space.yaml", "--out", out, "--force").exit_code == 0
    assert load_tensors(out)[1]["study"] == "first"
    assert best("space.yaml", "--out", tmp_path).exit_code == 2
    assert best("space.yaml", "--out", tmp_path / "no" / "out").exit_code == 2


def test_help_needs_no_torch():
    code = "import sys; from hydra_tune.cli.root import main; main(['best', '-h'], standalone_mode=False)"
    code += "; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_parameters_are_told_as_the_task_was_given_them(tmp_path, monkeypatch):
    """The study of values with a `q` and a logarithm has them as they were drawn, and not yet rounded."""
    project = Project(tmp_path)
    project.change("log_uniform_values, min: 1e-5, max: 0.1", "q_log_uniform_values, min: 0.01, max: 0.1, q: 0.01")
    project.change("max_concurrent: 4", "keep_best: 1, storage: 'sqlite:///trials.db', study: first")
    done = project.call("--json", "--no-log", "--run-cap", "1")
    assert done.returncode == 0, done.stderr
    given = json.loads(done.stdout)["best"]["params"]
    monkeypatch.chdir(tmp_path)
    (trial,) = optuna.load_study(study_name="first", storage="sqlite:///trials.db").trials
    assert trial.params["lr"] != given["lr"] == round(trial.params["lr"], 2)
    found = CliRunner().invoke(main, ["best", "space.yaml", "--out", "out", "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["params"] == given
    # The values of trials that have run are theirs, whatever the next trials will draw.
    project.change("min: 0.01, max: 0.1, q: 0.01", "min: 0.2, max: 0.6, q: 0.2")
    assert json.loads(CliRunner().invoke(main, ["best", "first", "--json"]).stdout)["params"] == given
    again = project.call("--json", "--no-log", "--run-cap", "1")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["best"]["params"] == given


def test_a_trial_that_goes_on_keeps_the_value_that_its_task_was_given():
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    trial = study.ask({"lr": optuna.distributions.FloatDistribution(0.01, 0.1, log=True)})
    drawn = FloatDomain(low=0.01, high=0.1, log=True, multiple=0.01)
    given = suggest(trial, "lr", drawn)
    (running,) = optuna_internals.running(study)
    again = optuna_internals.take_up(study, running)
    assert suggest(again, "lr", replace(drawn, multiple=0.05)) == suggest(again, "lr", drawn) == given
    assert trial.params["lr"] != given
    study.tell(trial, 1.0)
    told = optuna_internals.as_running(study, study.trials[0])
    assert suggest(told, "lr", replace(drawn, multiple=0.05)) == given
    study.add_trial(optuna.trial.create_trial(value=1.0, params=trial.params, distributions=trial.distributions))
    without = optuna_internals.as_running(study, study.trials[1])
    assert suggest(without, "lr", drawn) == given


def test_parameters_of_another_program_are_shown_as_its_study_has_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    study = optuna.create_study(study_name="other", storage="sqlite:///trials.db")
    study.optimize(lambda trial: trial.suggest_float("lr", 0.01, 1.0), n_trials=1)
    project = Project(tmp_path)
    project.change("log_uniform_values, min: 1e-5, max: 0.1", "q_log_uniform_values, min: 0.1, max: 0.2, q: 0.1")
    project.change("max_concurrent: 4", "storage: 'sqlite:///trials.db', study: other")
    assert json.loads(CliRunner().invoke(main, ["best", "other", "--json"]).stdout)["params"] == study.best_params


@pytest.mark.filterwarnings("ignore:`constraints_func` has been deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("count", [1, 2])
def test_a_trial_that_violates_its_constraints_is_not_named_best(count, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sampler = optuna.samplers.TPESampler(constraints_func=lambda trial: (1.0 - trial.number,))
    options = {"storage": "sqlite:///c.db", "directions": ["minimize"] * count, "sampler": sampler}
    study = optuna.create_study(study_name="c", **options)
    study.optimize(lambda trial: (float(trial.number),) * count, n_trials=1)
    refused = CliRunner().invoke(main, ["best", "c"])
    expected = "run 'c' has no best trial: no completed trial fulfils the constraints; give one of its trials with"
    assert (refused.exit_code, expected in refused.stderr) == (2, True)
    assert json.loads(CliRunner().invoke(main, ["show", "c", "--json"]).stdout)["best"] == []
    study.optimize(lambda trial: (float(trial.number),) * count, n_trials=1)
    assert json.loads(CliRunner().invoke(main, ["best", "c", "--json"]).stdout)["trial"] == 1
    study.optimize(lambda trial: (float(trial.number),) * count, n_trials=1)
    if count == 1:
        assert [_record(trial).is_feasible for trial in study.trials] == [False, True, True]
        shown = json.loads(CliRunner().invoke(main, ["show", "c", "--json"]).stdout)
        assert [trial["number"] for trial in shown["trials"]] == [1, 2, 0]
