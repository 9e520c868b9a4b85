"""The private names of Optuna that the integration uses: present, of the shape it relies on, and used nowhere else."""

import inspect
import pkgutil
import re
import sqlite3
from contextlib import closing
from functools import partial
from importlib.metadata import version
from pathlib import Path

import optuna
import pytest
from optuna.progress_bar import _ProgressBar
from optuna.samplers import _brute_force
from optuna.storages import _heartbeat
from optuna.study import _optimize, _tell

import hydra_tune_optuna
from hydra_tune.errors import ConfigError
from hydra_tune_optuna import optuna_internals, storage_opening
from hydra_tune_optuna.study_reader import OptunaStudyReader

PACKAGE = Path(hydra_tune_optuna.__file__).parent


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_optuna_is_of_a_pinned_major_version():
    assert version("optuna").split(".")[0] in {"4", "5"}


def test_telling_and_logging_take_what_they_are_given():
    assert parameters(_tell._tell_with_warning) == [
        "study",
        "trial",
        "value_or_values",
        "state",
        "skip_if_finished",
        "suppress_warning",
    ]
    assert parameters(_optimize._log_failed_trial) == [
        "trial_number",
        "trial_params",
        "message",
        "exc_info",
        "value_or_values",
    ]
    assert _optimize._logger.name == "optuna.study._optimize"
    assert parameters(optuna.Study._log_completed_trial) == ["self", "values", "number", "params"]
    assert parameters(_ProgressBar.__init__) == ["self", "is_valid", "n_trials", "timeout"]
    assert parameters(_ProgressBar.update) == ["self", "elapsed_seconds", "study"]
    assert parameters(_ProgressBar.close) == ["self"]


def test_a_study_has_its_storage_its_flag_and_its_mark_of_optimizing():
    study = optuna.create_study()
    trial = study.ask()

    assert study._storage.get_trial(trial._trial_id).number == 0
    assert study._study_id in [summary._study_id for summary in study._storage.get_all_studies()]
    assert study._thread_local.in_optimize_loop is False
    with optuna_internals.optimizing(study):
        assert study._thread_local.in_optimize_loop is True
        assert not optuna_internals.stop_requested(study)
        study.stop()
        assert study._stop_flag is True
        assert optuna_internals.stop_requested(study)
    assert study._thread_local.in_optimize_loop is False


def test_a_trial_draws_every_parameter_by_one_method():
    assert parameters(optuna.Trial._suggest) == ["self", "name", "distribution"]


def test_a_heartbeat_has_an_interval_and_beats_for_a_trial():
    assert parameters(_heartbeat.BaseHeartbeat.record_heartbeat) == ["self", "trial_id"]
    assert parameters(_heartbeat.BaseHeartbeat.get_heartbeat_interval) == ["self"]
    assert optuna_internals.heartbeat_of(optuna.storages.InMemoryStorage()) is None


def test_exhaustive_samplers_show_what_is_left():
    assert parameters(optuna.samplers.GridSampler._get_unvisited_grid_ids) == ["self", "study"]
    assert parameters(optuna.samplers.BruteForceSampler._populate_tree) == ["tree", "trials", "params"]
    assert parameters(_brute_force._TreeNode.count_unexpanded) == ["self", "exclude_running"]

    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"x": [1, 2]}))
    assert not optuna_internals.nothing_new_to_sample(study)
    study.ask()
    assert not optuna_internals.nothing_new_to_sample(study)
    study.ask()
    assert optuna_internals.nothing_new_to_sample(study)


def test_no_other_module_touches_a_private_name_of_optuna():
    pattern = re.compile(r"(import|from optuna\S*) _[a-z]|optuna\.\w*\._|(study|trial|sampler|storage|pruner)\._[a-z]")
    offending = [
        f"{path.name}:{number}: {line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "optuna_internals.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line.replace("self._", ""))
    ]

    assert offending == []


def test_everything_of_optuna_is_there_under_its_own_name():
    own = {"create_study", "load_study", "study"}

    for name in set(optuna.__all__) - own:
        assert getattr(hydra_tune_optuna, name) is getattr(optuna, name), name
    for name in set(optuna.study.__all__) - own:
        assert getattr(hydra_tune_optuna.study, name) is getattr(optuna.study, name), name
    assert set(optuna.__all__) <= set(hydra_tune_optuna.__all__)
    assert set(optuna.study.__all__) <= set(hydra_tune_optuna.study.__all__)
    for module in (hydra_tune_optuna, hydra_tune_optuna.study):
        assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert hydra_tune_optuna.study.create_study is hydra_tune_optuna.create_study
    assert hydra_tune_optuna.study.load_study is hydra_tune_optuna.load_study


def test_no_module_of_the_package_hides_one_of_optuna():
    """Python sets a module, once imported, as an attribute of its package."""
    modules = {module.name for module in pkgutil.iter_modules(hydra_tune_optuna.__path__)}
    assert modules & set(dir(optuna)) == {"study"}


def test_a_reader_leaves_a_database_alone_until_all_of_its_tables_are_there(tmp_path):
    """A search that has just begun creates them; with a second program that does, one of the two fails."""
    path = tmp_path / "study.db"
    optuna.create_study(study_name="first", storage=f"sqlite:///{path}")
    (record,) = OptunaStudyReader().read(f"sqlite:///{path}")
    assert record.name == "first"
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("DELETE FROM alembic_version")  # the row that Optuna writes last
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="Optuna's tables are not there, or not yet"):
        OptunaStudyReader().read(f"sqlite:///{path}")
    assert path.read_bytes() == before


def test_a_reader_makes_no_tables_in_an_empty_database_of_a_server(tmp_path, monkeypatch):
    """A file stands for the server, and nothing takes the URL for that of a file."""
    monkeypatch.setattr(storage_opening, "_file", lambda url: None)
    path = tmp_path / "server.db"
    path.touch()
    with pytest.raises(ConfigError, match="cannot be read: there are no tables of Optuna"):
        OptunaStudyReader().read(f"sqlite:///{path}")
    assert path.read_bytes() == b""
    optuna.create_study(study_name="first", storage=f"sqlite:///{path}")
    assert [record.name for record in OptunaStudyReader().read(f"sqlite:///{path}")] == ["first"]


def test_what_optuna_does_not_list_is_found_too():
    assert hydra_tune_optuna.progress_bar is optuna.progress_bar
    assert hydra_tune_optuna.study._optimize is optuna.study._optimize
    assert "progress_bar" in dir(hydra_tune_optuna)


def test_libraries_note_things_of_a_study_in_its_storage():
    study = optuna.create_study()
    optuna_internals.set_study_attribute(study, "hydra_tune:test", "noted")

    assert optuna_internals.study_attributes(study) == {"hydra_tune:test": "noted"}
    assert study.user_attrs == {}


@pytest.mark.parametrize("kind", ["memory", "sqlite", "journal"])
def test_a_trial_that_runs_can_wait_again_and_keeps_its_number_and_what_was_drawn(tmp_path, kind):
    storages = {
        "memory": optuna.storages.InMemoryStorage,
        "sqlite": lambda: f"sqlite:///{tmp_path / 'trials.db'}",
        "journal": lambda: optuna.storages.JournalStorage(
            optuna.storages.journal.JournalFileBackend(str(tmp_path / "trials.log"))
        ),
    }
    study = optuna.create_study(storage=storages[kind]())
    trial = study.ask()
    drawn = trial.suggest_float("x", 0.0, 1.0)
    optuna_internals.note(study, optuna_internals.stored(study, trial), "hydra_tune:test", value="noted")
    study.ask()
    (first, _) = optuna_internals.running(study)
    optuna_internals.wait_again(study, first)
    again = study.ask()

    assert again.number == 0
    assert again.suggest_float("x", 0.0, 1.0) == drawn
    assert first.system_attrs["hydra_tune:test"] == "noted"
    assert optuna_internals.frozen_id(first) == optuna_internals.trial_id(again)
    assert len(optuna_internals.running(study)) == len(study.trials) == 2


@pytest.mark.parametrize(
    "make",
    [
        optuna.samplers.RandomSampler,
        partial(optuna.samplers.TPESampler, n_startup_trials=2),
        partial(optuna.samplers.GridSampler, {"x": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], "y": [0.1]}),
    ],
)
def test_all_that_a_sampler_draws_from_is_known(make):
    """The same streams and the same trials give the same draws."""
    sampler, other = make(seed=0), make(seed=1 if "Grid" not in repr(make) else 0)
    studies = [optuna.create_study(sampler=each) for each in (sampler, other)]

    def draw(study):
        trial = study.ask()
        found = trial.suggest_float("x", 0.0, 1.0), trial.suggest_float("y", 0.0, 1.0)
        study.tell(trial, sum(found))
        return found

    for _ in range(2):
        draw(studies[0])
    studies[1].add_trials(studies[0].trials)
    for stream, source in zip(
        optuna_internals.random_streams(other), optuna_internals.random_streams(sampler), strict=True
    ):
        stream.set_state(source.get_state())
    assert [draw(studies[0]) for _ in range(2)] == [draw(studies[1]) for _ in range(2)]


def test_arguments_are_optunas_and_ours():
    for name in ("create_study", "load_study"):
        ours = inspect.signature(getattr(hydra_tune_optuna, name)).parameters
        stock = inspect.signature(getattr(optuna, name)).parameters
        assert [(p.name, p.kind, p.default) for p in stock.values()] == [
            (p.name, p.kind, p.default) for p in ours.values() if p.name not in {"executor", "keep_best", "weights_dir"}
        ]
    assert [(p.name, p.default) for p in inspect.signature(optuna.Study.optimize).parameters.values()] == [
        (p.name, p.default) for p in inspect.signature(hydra_tune_optuna.PoolStudy.optimize).parameters.values()
    ]
