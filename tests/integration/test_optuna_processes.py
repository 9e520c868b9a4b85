"""Real processes: several on one study, one that is killed, and what becomes of a pool when its process ends."""

import os
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest

import hydra_tune_optuna
from tests.contract.optuna_drivers import RetryStale, build, make_pool, when_stale

ROOT = Path(__file__).parents[2]

PRELUDE = """
import sys, threading, warnings
import optuna
import hydra_tune_optuna
from hydra_tune import HydraExecutor
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from tests.contract.optuna_drivers import build, small_task

def pool():
    return HydraExecutor(devices="cpu:1", device_memory="64MiB", max_concurrent=2)

def states(study):
    return [trial.state.name for trial in study.trials]
"""


def start(program, *arguments):
    path = os.pathsep.join([str(ROOT), str(ROOT / "integrations")])
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PRELUDE + program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process):
    """The process's exit code, and what it said, when it has ended by itself."""
    try:
        out, err = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"the process does not end: {out} {err}")
    return process.returncode, out, err


# Several processes on one study

SEARCH = """
storage, number = sys.argv[1], int(sys.argv[2])

def noting(trial):
    trial.set_user_attr("process", number)
    return build(trial)

if storage.endswith(".log"):
    storage = JournalStorage(JournalFileBackend(storage))
with pool() as executor:
    study = hydra_tune_optuna.load_study(
        study_name="search",
        storage=storage,
        sampler=optuna.samplers.TPESampler(seed=number, n_startup_trials=3),
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1),
        executor=executor,
    )
    print("ready", flush=True)
    sys.stdin.readline()
    study.optimize(noting, n_trials=12)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_several_processes_search_one_study(kind, tmp_path):
    if kind == "sqlite":
        storage = url = f"sqlite:///{tmp_path}/study.db"
    else:
        url = f"{tmp_path}/study.log"
        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(url))
    study = optuna.create_study(study_name="search", storage=storage)
    processes = [start(SEARCH, url, number) for number in (1, 2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        code, _, err = ended(process)
        assert code == 0, err

    trials = study.trials
    assert [trial.number for trial in trials] == list(range(24))
    assert {trial.state.name for trial in trials} == {"COMPLETE", "PRUNED"}
    took_part = [trial.user_attrs["process"] for trial in trials]
    assert (took_part.count(1), took_part.count(2)) == (12, 12)
    for trial in trials:
        assert trial.value == trial.intermediate_values[trial.last_step]


ENDLESS = """
warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)

def endless(trial):
    build(trial)
    if trial.number == 1:
        print("ready", flush=True)
    return small_task(epochs=1_000_000)

storage = RDBStorage(sys.argv[1], heartbeat_interval=1, grace_period=2)
hydra_tune_optuna.load_study(study_name="search", storage=storage, executor=pool()).optimize(endless)
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("kind", ["plain", "hydra"])
def test_the_trials_of_a_killed_process_are_failed_and_run_again(kind, tmp_path):
    url = f"sqlite:///{tmp_path}/study.db"
    retry = RetryStale(max_retry=1)
    storage = optuna.storages.RDBStorage(url, heartbeat_interval=1, grace_period=2, **when_stale(retry))
    with make_pool(kind, 2) as pool:
        study = hydra_tune_optuna.create_study(
            study_name="search", storage=storage, pruner=optuna.pruners.NopPruner(), executor=pool
        )
        process = start(ENDLESS, url)
        assert process.stdout.readline() == "ready\n"
        time.sleep(3)  # until both have beaten: Optuna takes no trial for dead that never has
        process.kill()
        process.communicate()
        assert [trial.state.name for trial in study.trials] == ["RUNNING"] * 2

        time.sleep(4)  # beyond the time of grace
        study.optimize(build, n_trials=4)

    dead, others = study.trials[:2], study.trials[2:]
    assert [trial.state.name for trial in dead] == ["FAIL"] * 2
    assert {trial.state.name for trial in others} == {"COMPLETE"}
    again = {
        retry.retried_trial_number(trial): trial.params for trial in others if "failed_trial" in trial.system_attrs
    }
    assert again == {trial.number: trial.params for trial in dead}
    storage.remove_session()
    storage.engine.dispose()


# A pool whose process ends

LEFT_OPEN = """
executor = pool()
studies = [hydra_tune_optuna.create_study(executor=executor) for _ in range(4)]
for study in studies[:2]:
    study.optimize(build, n_trials=3)
threads = [threading.Thread(target=study.optimize, args=(build,), kwargs={"n_trials": 3}) for study in studies[2:]]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(*[states(study) for study in studies])
"""


@pytest.mark.cases(1 / 3)
def test_a_pool_without_with_serves_many_studies_and_may_be_left_open():
    code, out, err = ended(start(LEFT_OPEN))

    assert (code, out) == (0, " ".join(["['COMPLETE', 'COMPLETE', 'COMPLETE']"] * 4) + "\n"), err
    assert "Traceback" not in err


FORGOTTEN = """
def search():
    executor = pool()
    study = hydra_tune_optuna.create_study(executor=executor)
    study.optimize(build, n_trials=3)
    return study.best_value

values = {search() for _ in range(3)}
sys.exit(3)
"""


@pytest.mark.slow
def test_pools_that_were_forgotten_let_the_process_end_with_its_own_code():
    code, _, err = ended(start(FORGOTTEN))

    assert code == 3, err
    assert "Traceback" not in err


RAISING = """
study = hydra_tune_optuna.create_study(executor=pool())
def objective(trial):
    if trial.number == 3:
        raise ZeroDivisionError("of the objective")
    return small_task(epochs=10)
study.optimize(objective)
"""


@pytest.mark.slow
def test_an_uncaught_error_ends_the_process_as_it_would_without_a_pool():
    code, _, err = ended(start(RAISING))

    assert code == 1
    assert err.rstrip().endswith("ZeroDivisionError: of the objective")
    assert "Exception ignored" not in err


STILL_SEARCHING = """
running = threading.Event()
def endless(trial):
    if trial.number == 1:
        running.set()
    return small_task(epochs=1_000_000)
study = hydra_tune_optuna.create_study(executor=pool())
threading.Thread(target=study.optimize, args=(endless,), daemon=True).start()
running.wait()
"""


@pytest.mark.slow
def test_a_process_ends_while_a_thread_still_searches():
    code, _, err = ended(start(STILL_SEARCHING))

    assert code == 0, err
