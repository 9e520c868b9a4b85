"""What a search shows: through Optuna's own loggers and progress bar, as loud as Optuna is told to be."""

import asyncio
import logging
import math
import re
import threading

import optuna
import pytest

import hydra_tune_optuna
from tests.contract.optuna_drivers import Driver, build, make_pool, metrics_task, record

LEVELS = {"info": optuna.logging.INFO, "warning": optuna.logging.WARNING, "error": optuna.logging.ERROR}


@pytest.fixture(scope="module", params=["plain", "hydra"])
def driver(request):
    with make_pool(request.param, width=1) as pool:
        yield Driver(pool)


@pytest.fixture
def loudness():
    before = optuna.logging.get_verbosity()
    yield
    optuna.logging.set_verbosity(before)
    optuna.logging.disable_propagation()


def mixed(trial):
    """Trials that complete, are pruned, and fail."""
    if trial.number == 1:
        raise optuna.TrialPruned("enough")
    return build(trial) if trial.number != 2 else math.nan


@pytest.mark.parametrize("level", LEVELS)
def test_a_search_is_as_loud_as_optuna_is_told_to_be(level, driver, loudness):
    optuna.logging.set_verbosity(LEVELS[level])

    seen = record(driver, mixed)

    assert seen == record(Driver(), mixed)
    assert any(" INFO: " in line for line in seen.log) == (level == "info")
    assert any(" WARNING: " in line for line in seen.log) == (level != "error")


def test_what_only_a_pool_has_to_say_is_as_loud_as_optuna_too(driver, loudness):
    assert len(record(driver, lambda trial: None).hints) == 4
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    assert record(driver, lambda trial: None).hints == []


def test_lines_reach_the_root_logger_where_optuna_propagates(driver, loudness):
    def at_the_root(driver, objective):
        lines = []
        handler = logging.Handler()
        handler.emit = lambda entry: lines.append((entry.name, entry.levelname, entry.getMessage()))
        logging.root.addHandler(handler)
        record(driver, objective)
        logging.root.removeHandler(handler)
        return lines

    assert at_the_root(driver, mixed) == []
    optuna.logging.enable_propagation()
    seen = at_the_root(driver, mixed)
    assert len(seen) >= 4
    assert seen == at_the_root(Driver(), mixed)
    assert "optuna.hydra_tune" in {name for name, _, _ in at_the_root(driver, lambda trial: None)}


def test_no_logger_of_ours_shows_lines_of_its_own():
    ours = [name for name in logging.root.manager.loggerDict if name.startswith("optuna.hydra_tune")]
    assert ours == ["optuna.hydra_tune"]
    logger = logging.getLogger(*ours)
    assert (logger.level, logger.handlers, logger.propagate) == (logging.NOTSET, [], True)


def last_bar(text):
    """The progress bar at the end, without times."""
    lines = [line.strip() for line in re.split(r"[\r\n]", text) if line.strip()]
    return re.sub(r"\[[^\[\]]*\]$", "", lines[-1]) if lines else ""


@pytest.mark.parametrize(
    "call",
    [{"n_trials": 4}, {"n_trials": 4, "timeout": 1000}, {"n_trials": 0}, {"n_trials": 4, "catch": ValueError}],
    ids=str,
)
@pytest.mark.parametrize("objectives", [1, 2])
def test_the_progress_bar_is_optunas(call, objectives, driver, capsys):
    def objective(trial):
        trial.suggest_float("x", 0, 1)
        if trial.number == 1 and "catch" in call:
            raise ValueError("caught")
        return metrics_task(0.5, 0.25) if objectives == 1 else (0.5, 0.25)

    def shown(driver):
        capsys.readouterr()
        calls = [{**call, "show_progress_bar": True}]
        record(driver, objective, calls=calls, directions=["minimize"] * objectives)
        return last_bar(capsys.readouterr().err)

    seen = shown(driver)
    assert seen == shown(Driver())
    assert ("4/4" in seen) == (call["n_trials"] > 0)


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=repr)
def test_after_an_error_the_bar_is_closed_and_lines_are_shown_as_before(error, driver):
    def objective(trial):
        if trial.number == 1:
            raise error
        return build(trial)

    logger = logging.getLogger("optuna")
    before = set(logger.handlers)
    record(driver, objective, calls=[{"n_trials": 3, "show_progress_bar": True}])
    assert set(logger.handlers) == before


def test_a_search_runs_where_an_event_loop_does(driver):
    """A cell of a notebook runs in the main thread, inside of a running event loop."""

    async def cell():
        return record(driver, build), threading.current_thread() is threading.main_thread()

    seen, is_main = asyncio.run(cell())

    assert is_main
    assert seen == record(Driver(), build)


def test_a_search_in_a_thread_leaves_the_event_loop_running(driver):
    study = hydra_tune_optuna.create_study(executor=driver.pool)
    beats = []

    async def beat():
        while True:
            beats.append(len(study.trials))
            await asyncio.sleep(0)

    async def program():
        beating = asyncio.create_task(beat())
        await asyncio.to_thread(study.optimize, build, n_trials=4)
        beating.cancel()

    asyncio.run(program())

    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 4
    assert len(set(beats)) > 1
