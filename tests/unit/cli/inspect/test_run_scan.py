"""Runs are found where they are, told apart, and left as they are; SQLite files are real."""

import sqlite3
from datetime import UTC, datetime, timedelta

import optuna
import pytest
from rich.console import Console

from hydra_tune.checkpoint.sweep_folder import sweep_path
from hydra_tune.cli.inspect import run_scan
from hydra_tune.cli.inspect.run_output import print_status
from hydra_tune.cli.inspect.run_scan import absolute_storage, find_run, find_runs, runs_at
from hydra_tune.cli.inspect.sweep_run_record import phase_of
from hydra_tune.errors import ConfigError
from hydra_tune.observe.event_log.run_state import RunState
from hydra_tune.observe.live.snapshot import TrialView
from hydra_tune_optuna.storage_opening import check_file, has_tables
from tests.unit.observe.event_log.test_writer import made


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def study(name, storage="sqlite:///trials.db", num_trials=2, **options):
    created = optuna.create_study(study_name=name, storage=storage, **options)
    count = len(created.directions)
    created.optimize(lambda trial: (trial.suggest_float("x", 0, 1),) * count, n_trials=num_trials)
    return created


def log_of(path, **facts):
    log = made(path)
    facts = {"name": "first", "study": "first", "is_named": True, "checkpoint_dir": None, "metric": "loss", **facts}
    log.sweep(what="opened", goal="minimize", file="space.yaml", command="hydra-tune sweep space.yaml", **facts)
    log.job("0:trial 0", "submitted", priority=0)
    log.close()


def test_a_database_of_another_program_is_left_alone(folder):
    with sqlite3.connect("other.db") as connection:
        connection.execute("create table studies (x)")
    connection.close()
    (folder / "text.db").write_text("no database")
    (folder / "compose.yaml").write_text("services: {}\n")
    before = (folder / "other.db").read_bytes()
    assert find_runs(folder) == ([], [])
    assert (folder / "other.db").read_bytes() == before


def test_a_study_and_its_log_are_one_run(folder):
    study("first")
    log_of(folder / "runs" / "a.jsonl", storage="sqlite:///trials.db", folder=str(folder), planned=2)
    log_of(folder / "runs" / "b.jsonl", storage=None, folder=str(folder), planned=2)
    runs, notes = find_runs(folder)
    assert notes == []
    assert {(run.phase, run.storage is None, len(run.logs), run.metric) for run in runs} == {
        ("finished", False, 1, "loss"),
        ("interrupted", True, 1, "loss"),
    }
    assert find_run("first", "sqlite:///trials.db").phase == "finished"
    with pytest.raises(ConfigError, match="there are 2 runs 'first' in this folder"):
        find_run("first", None)
    assert "was kept in memory" in find_run("runs/b.jsonl", None).next_step


def test_the_log_of_a_deleted_study_is_not_taken_for_the_new_ones(folder, monkeypatch):
    log_of(folder / "old.jsonl", storage="sqlite:///trials.db", folder=str(folder), planned=5)
    old = (folder / "old.jsonl").read_text()
    year_ago = (datetime.now(UTC) - timedelta(days=365)).isoformat()
    started = old.partition('"started_at":"')[2].partition('"')[0]
    (folder / "old.jsonl").write_text(old.replace(started, year_ago))
    study("first")
    (run,) = find_runs(folder)[0]
    assert (run.phase, run.logs, run.planned) == ("idle", (), None)


def test_a_storage_with_a_password_is_known_by_its_log_alone(folder):
    log_of(folder / "a.jsonl", storage="postgresql://me:***@nowhere/db", folder=str(folder), planned=3)
    runs, notes = find_runs(folder)
    assert [(run.name, run.phase) for run in runs] == [("first", "interrupted")]
    assert notes == []


@pytest.mark.parametrize("kind", ["sqlite:///", "sqlite+pysqlite:///", "journal:", "journal://"])
def test_a_storage_in_a_file_is_not_made_by_a_reader(folder, kind, monkeypatch):
    monkeypatch.chdir(folder)
    assert absolute_storage(f"{kind}a.db?x=1", folder) == f"{kind}{folder.resolve()}/a.db?x=1"
    with pytest.raises(ConfigError, match="cannot be opened: there is no file 'missing'"):
        check_file(f"{kind}missing?x=1")
    assert not has_tables(f"{kind}missing")
    assert list(folder.iterdir()) == []


def test_several_objectives_have_a_front_and_no_best_trial(folder):
    created = study("two", directions=["minimize", "maximize"], num_trials=3)
    run = find_run("two", None)
    assert sorted(run.best) == sorted(trial.number for trial in created.best_trials)
    assert run.ranked[0].metrics.keys() == {"value_0", "value_1"}


def test_among_equal_trials_the_best_is_the_studys_own_whose_weights_are_kept():
    created = optuna.create_study(study_name="equal", storage="sqlite:///trials.db")
    first, second = created.ask(), created.ask()
    for trial in (second, first):
        created.tell(trial, 1.0)
    assert find_run("equal", None).best == (created.best_trial.number,)


def test_a_storage_that_cannot_be_read_is_named_and_the_others_are_shown(folder):
    study("first")
    with sqlite3.connect("broken.db") as connection:
        for name in ("studies", "trials", "version_info"):
            connection.execute(f"create table {name} (x)")
    connection.close()
    runs, notes = find_runs(folder)
    assert [run.name for run in runs] == ["first"]
    assert len(notes) == 1
    assert "broken.db' has no study" in notes[0]
    with pytest.raises(ConfigError, match="there is no file"):
        find_runs(folder, "sqlite:///nowhere.db")
    with pytest.raises(ConfigError, match=r"'nowhere\.db' is no URL of a storage; did you mean 'sqlite:"):
        find_runs(folder, "nowhere.db")
    assert not (folder / "nowhere.db").exists()


@pytest.mark.parametrize(
    ("states", "log", "planned", "has_folder", "phase"),
    [
        (["completed"], {"is_ended": False}, 2, False, "killed"),
        (["completed", "failed"], {"is_ended": False}, 2, False, "finished"),
        (["completed", "running"], {"is_ended": True}, 2, True, "interrupted"),
        (["completed"], {"is_ended": True}, None, False, "finished"),
        (["running"], None, 2, True, "interrupted"),
        (["running"], None, 2, False, "unclear"),
        (["completed"], None, None, False, "idle"),
    ],
)
def test_the_state_of_a_run_that_no_process_has(states, log, planned, has_folder, phase, folder):
    trials = [TrialView(number=number, state=state) for number, state in enumerate(states)]
    state = None if log is None else RunState(path=folder, started_at=datetime.now(UTC), is_alive=False, **log)
    assert phase_of(trials, state, planned=planned, is_alive=False, has_folder=has_folder) == phase
    assert phase_of(trials, state, planned=planned, is_alive=True, has_folder=has_folder) == "running"


@pytest.mark.cases(1)
@pytest.mark.parametrize(("epochs", "told"), [(40, "epoch 6/40"), (None, "step 5")])
def test_a_report_is_told_by_its_epoch_where_it_is_an_epochs(folder, capsys, epochs, told):
    created = optuna.create_study(study_name="first", storage="sqlite:///trials.db")
    created.ask().report(0.5, 5)
    log = made(folder / "a.jsonl")
    log.sweep(
        what="opened", study="first", storage="sqlite:///trials.db", folder=str(folder), file="a.yaml", goal="minimize"
    )
    log.sweep(what="built", number=0, params={}, epochs=epochs)
    log.job("0:trial 0", "submitted", priority=0)
    log.close()
    print_status(Console(width=200), find_runs(folder)[0])
    assert capsys.readouterr().out.splitlines()[2] == f"  trial 0  interrupted  value 0.5  last report: {told}"


def test_a_report_that_only_the_log_has_is_shown_whole(folder):
    """A process that is ended may have logged a report before the storage has heard of the report."""
    created = optuna.create_study(study_name="first", storage="sqlite:///trials.db")
    created.ask().report(0.5, 3)
    log = made(folder / "a.jsonl")
    facts = {
        "study": "first",
        "storage": "sqlite:///trials.db",
        "folder": str(folder),
        "file": "a",
        "metric": "val_loss",
    }
    log.sweep(what="opened", goal="minimize", **facts)
    log.job("0:trial 0", "report", step=4, metrics={"val_loss": 0.25})
    log.close()
    (trial,) = find_run("first", None).trials
    assert (trial.step, trial.value, trial.metrics) == (4, 0.25, {"val_loss": 0.25})


def test_a_failed_trial_is_told_with_its_error(folder, capsys):
    created = study("first")
    created.tell(created.ask(), state=optuna.trial.TrialState.FAIL)
    print_status(Console(width=200), find_runs(folder)[0])
    assert "  trial 2  failed" in capsys.readouterr().out.splitlines()


@pytest.mark.cases(1)
@pytest.mark.parametrize("place", [".", "first", "trials.db"])
def test_a_run_is_found_by_folder_name_and_file(folder, place):
    study("first")
    (run,), notes = runs_at(place, None)
    assert (run.name, notes) == ("first", [])
    assert find_run(place, None).name == "first"


@pytest.mark.cases(1 / 3)
def test_a_sweep_file_without_a_name_is_of_no_study_with_a_name(folder):
    study("other")
    nameless = study(None)
    (folder / "space.yaml").write_text(
        "task: a:b\nmetric: {name: acc}\nrun_cap: 9\nhydra: {storage: 'sqlite:///trials.db'}\n"
    )
    runs = {run.name: run for run in find_runs(folder)[0]}
    other, own = runs["other"], runs[nameless.study_name]
    assert (other.metric, other.planned, other.file) == (None, None, None)
    assert (own.metric, own.planned, own.file) == ("acc", 9, str(folder / "space.yaml"))


@pytest.mark.parametrize("reports", [False, True])
def test_a_recovery_of_weights_leaves_the_metrics_of_all_trials(folder, reports):
    """The second run builds the task of trial 1 once more, and its job is the first of the log."""
    study("first")
    facts = {"study": "first", "storage": "sqlite:///trials.db", "folder": str(folder), "file": "a", "metric": "loss"}
    for path in ("a.jsonl", "b.jsonl"):
        log = made(folder / path)
        log.sweep(what="opened", goal="minimize", **facts)
        if path == "a.jsonl":
            for number in range(2):
                log.job(f"0:trial {number}", "report", step=0, metrics={"train_loss": float(number)})
        else:
            log.job("0:weights of trial 1", "submitted", priority=0)
            if reports:
                log.job("0:weights of trial 1", "report", step=1, metrics={"train_loss": 9.0})
            log.sweep(what="ended", number=1, state="completed", value=0.5, params={}, error=None)
        log.close()
    assert [trial.metrics for trial in find_run("first", None).trials] == [{"train_loss": 0.0}, {"train_loss": 1.0}]


def _refuse(lock):
    raise PermissionError(13, "Permission denied", str(lock))


def test_the_checkpoints_of_a_sweep_without_a_log_lie_in_the_folder_of_the_sweep(folder, monkeypatch):
    """The command looks from elsewhere, and a trial was under way when its process was killed."""
    place, elsewhere = folder / "sweep", folder / "elsewhere"
    elsewhere.mkdir()
    sweep_path(place / "checkpoints", "first").mkdir(parents=True)
    (place / "space.yaml").write_text(
        "name: first\ntask: a:b\nmetric: {name: loss}\nrun_cap: 2\n"
        "hydra: {storage: 'sqlite:///trials.db', checkpoint_dir: checkpoints}\n"
    )
    optuna.create_study(study_name="first", storage=f"sqlite:///{place}/trials.db").ask()
    monkeypatch.chdir(elsewhere)
    (run,) = find_runs(place)[0]
    assert run.phase == "interrupted"
    # A lock of another user's, as root may open all.
    with monkeypatch.context() as patch:
        patch.setattr(run_scan, "is_locked", _refuse)
        assert find_runs(place)[0][0].phase == "interrupted"
    # Begun by `hydra-tune sweep sweep/space.yaml`, the sweep has its checkpoints in the working folder.
    (place / "checkpoints").rename(elsewhere / "checkpoints")
    (run,) = find_runs(place)[0]
    assert run.phase == "interrupted"
