"""The state of a run from its log: a living writer, a closed log, and what a sweep notes about its trials."""

import math

import pytest

from hydra_tune import HydraExecutor
from hydra_tune.errors import ConfigError
from hydra_tune.observe.event_log import writer
from hydra_tune.observe.event_log.reader import read_log
from hydra_tune.observe.event_log.run_figures import run_figures
from hydra_tune.observe.event_log.run_state import read_run_state
from tests.unit.observe.event_log.test_writer import content, made, wait_until
from tests.unit.pool.tasks import short


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def test_a_log_is_alive_until_it_is_closed(path):
    log = made(path)
    log.job("0:trial 0", "submitted", priority=0)
    wait_until(lambda: b"submitted" in content(path))
    state = read_run_state(path)
    assert (state.is_alive, state.is_ended, state.sweep) == (True, False, {})
    log.close()
    state = read_run_state(path)
    assert (state.is_alive, state.is_ended) == (False, True)
    assert [(view.number, view.state) for view in state.trials.values()] == [(0, "queued")]


def test_a_log_that_could_not_go_on_is_alive_as_long_as_its_run(path, monkeypatch):
    monkeypatch.setattr(writer, "_MOST_BYTES", 400)
    log = made(path)
    log.job("0:trial 0", "submitted", priority=0)
    wait_until(lambda: b"submitted" in content(path))
    log.job("0:trial 0", "report", step=0, metrics={"x" * 400: 1.0}, waits=False)
    wait_until(lambda: not log._room)
    assert read_run_state(path).is_alive
    log.close()
    state = read_run_state(path)
    assert (state.is_alive, state.is_ended) == (False, False)


def test_a_sweep_knows_its_trials_better_than_the_pool(path):
    """A fused trial is over for the pool before it has begun, as its group's carrier trains it."""
    log = made(path)
    log.sweep(what="opened", metric="val_loss", goal="minimize", study="first", storage=None, planned=2)
    log.job("0:trial 7", "submitted", priority=0)
    log.sweep(what="built", number=7, params={"lr": 0.5, "name": "nan"})
    log.job("0:trial 7", "report", step=3, metrics={"val_loss": float("nan"), "train_loss": 2.0}, waits=True)
    log.job("0:trial 7", "over", status="cancelled", metrics={}, error=None)
    log.sweep(what="ended", number=7, state="completed", value=0.25, params={"lr": 0.5, "name": "nan"}, error=None)
    log.job("2:trial 8", "running")
    log.job("2:trial 8", "over", status="cancelled", metrics={}, error=None)
    log.job("1:other", "submitted", priority=0)
    log.unit("cpu:0", "0:trial 7", "forward", 0, 1, 2, 3, is_failed=False)
    log.close()
    state = read_run_state(path)
    assert (state.sweep["study"], state.sweep["planned"]) == ("first", 2)
    trial, fused, other = state.trials.values()
    assert (fused.number, fused.state) == (8, "running")
    assert (trial.number, trial.state, trial.value, trial.step) == (7, "completed", 0.25, 3)
    assert trial.params == {"lr": 0.5, "name": "nan"}
    assert math.isnan(trial.metrics["val_loss"])
    assert (other.number, other.name, other.state) == (2, "other", "queued")
    assert len(read_log(path).units) == 1, "the notes of a sweep are none of a trace's business"


def test_jobs_without_names_are_counted_one_by_one(path):
    with HydraExecutor("cpu:1", event_log=path) as pool:
        results = pool.run([short(), short(epochs=1)])
    assert [result.status for result in results] == ["completed", "completed"]
    views = read_run_state(path).trials
    assert {name: view.state for name, view in views.items()} == {"job 0": "completed", "job 1": "completed"}


def test_jobs_of_one_name_are_counted_one_by_one(path):
    with HydraExecutor("cpu:1", event_log=path) as pool:
        jobs = [pool.submit(short(epochs=epochs), name="a") for epochs in (2, 1)]
        ends = [(job.result().status, len(job.result().history) - 1) for job in jobs]
    views = read_run_state(path).trials
    assert list(views) == ["a", "a (job 1)"]
    assert [(view.state, view.step) for view in views.values()] == ends == [("completed", 1), ("completed", 0)]


def test_a_trial_that_begins_again_is_one_trial(path):
    log = made(path)
    log.job("0:trial 7", "submitted", priority=0)
    for key, again in (("0:trial 7", "0:trial 7~1"), ("0:trial 7~1", "0:trial 7~2")):
        log.job(key, "begins again", error="LoaderWorkerError: killed")
        log.job(again, "submitted", priority=0)
    log.job("1:trial 7~1", "submitted", priority=0)
    log.unit("cpu:0", "0:trial 7~2", "forward", 0, 1, 2, 3, is_failed=False)
    log.job("0:trial 7~2", "over", status="completed", metrics={}, error=None, units_saved=0)
    log.close()
    states = {name: view.state for name, view in read_run_state(path).trials.items()}
    assert states == {"trial 7": "completed", "trial 7~1": "queued"}
    assert run_figures(read_log(path)).trials == {"completed": 1, "unknown": 1}


def test_a_fused_trial_that_begins_again_under_its_key_is_one_trial_and_its_carriers_are_none(path):
    log = made(path)
    log.job("0:a", "submitted", priority=0)
    for carrier, status in (("carrier 0:a", "failed"), ("carrier 1:a", "completed")):
        log.job(carrier, "submitted", priority=0)
        log.job("0:a", "running")
        log.unit("cpu:0", carrier, "forward", 0, 1, 2, 3, is_failed=False)
        log.job(carrier, "over", status=status, metrics={}, error=None, units_saved=0)
        if status == "failed":
            log.job("0:a", "begins again", error="DeviceLostError: lost")
    log.job("0:a", "over", status="completed", metrics={}, error=None, units_saved=0)
    log.close()
    assert {name: view.state for name, view in read_run_state(path).trials.items()} == {"a": "completed"}
    assert run_figures(read_log(path)).trials == {"completed": 1}


def test_other_files_are_no_runs(path):
    for text in ("", "text\n", "[1]\n", '{"a": 1}\n', '{"hydra_tune_event_log":1}\n'):
        path.write_text(text)
        assert read_run_state(path) is None
    with pytest.raises(ConfigError, match="cannot read"):
        read_run_state(path.parent)
