"""Processes that are killed at any moment: every trial ends with the weights of one that nothing has hit."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("ray")

from ray import tune

import hydra_tune_ray
from hydra_tune_ray.pools import pools_of
from tests.ray.searches import DEVICES, EACH, RATES, build, empty_pools, same, searched, trained_by_itself

pytestmark = [pytest.mark.slow, pytest.mark.timeout(250)]
EPOCHS = 30
SPACE = {"lr": tune.grid_search(RATES[:4]), "epochs": EPOCHS, "batches": 40}
CONFIGS = [{"lr": lr, "epochs": EPOCHS, "batches": 40} for lr in RATES[:4]]


@pytest.fixture(scope="module")
def trained(ray_cluster):
    made = hydra_tune_ray.trainable(build, lease_seconds=3.0, **DEVICES)
    yield made
    pools_of(made).close()


class Kill(tune.Callback):
    """Kills, once each, what these trials' third report comes from."""

    def __init__(self, who):
        self.who = who
        self.killed = set()

    def on_trial_result(self, iteration, trials, trial, result, **info):
        if result["training_iteration"] == 3 and len(self.killed) < 2 and trial.trial_id not in self.killed:
            self.killed.add(trial.trial_id)
            os.kill(self.who(result), signal.SIGKILL)


def check(results):
    assert results.num_errors == 0
    wanted = dict(zip((config["lr"] for config in CONFIGS), trained_by_itself(CONFIGS), strict=True))
    assert len(results) == len(wanted)
    for result in results:
        assert result.metrics["training_iteration"] == EPOCHS
        assert same(hydra_tune_ray.load_module(build, result).state_dict(), wanted[result.config["lr"]])


def test_processes_of_trials(trained, tmp_path):
    kill = Kill(lambda result: result["pid"])
    results = searched(trained, tmp_path, space=SPACE, checkpoints=EACH, failures=2, callbacks=[kill])
    assert len(kill.killed) == 2
    check(results)
    empty_pools(trained, seconds=10)


def test_a_pool(trained, tmp_path):
    (pool,) = pools_of(trained).figures()
    kill = Kill(lambda result: pool.pid)
    kill.killed.add("only one")
    results = searched(trained, tmp_path, space=SPACE, checkpoints=EACH, failures=2, callbacks=[kill])
    check(results)
    (after,) = empty_pools(trained)
    assert after.pid != pool.pid


def test_a_trial_without_checkpoints_begins_again(trained, tmp_path):
    kill = Kill(lambda result: result["pid"])
    last = tune.CheckpointConfig(checkpoint_at_end=True)
    results = searched(trained, tmp_path, space=SPACE, checkpoints=last, failures=2, callbacks=[kill])
    check(results)


def test_the_lease_ends_the_work_of_a_process_that_has_vanished(trained, tmp_path):
    class Vanishing(trained):
        def step(self):
            if self.iteration == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().step()

    tuner = tune.Tuner(
        Vanishing,
        param_space={"lr": 0.01, "epochs": 1_000_000},
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),  # nobody tells the pool
    )
    (result,) = tuner.fit()
    assert "died" in str(result.error)
    (there,) = pools_of(trained).figures()
    assert len(there.trials) == 1
    (first,) = empty_pools(trained, seconds=10)
    time.sleep(1)
    (second,) = pools_of(trained).figures()
    assert second.units_run == first.units_run


DRIVER = """
    import ray, sys
    from ray import tune
    import hydra_tune_ray
    from tests.ray.searches import DEVICES, EACH, build, searched
    from tests.ray.test_killed import SPACE

    if __name__ == "__main__":
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
        )
        searched(hydra_tune_ray.trainable(build, **DEVICES), sys.argv[1], space=SPACE, checkpoints=EACH)
"""


def test_the_driver(trained, ray_environment, tmp_path):
    program = tmp_path / "driver.py"
    program.write_text(textwrap.dedent(DRIVER))
    driver = subprocess.Popen(
        [sys.executable, str(program), str(tmp_path)],
        env={**os.environ, "RAY_ADDRESS": ""},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    try:
        deadline = time.monotonic() + 100
        while not is_under_way(tmp_path / "search"):
            assert driver.poll() is None, driver.stderr.read().decode()[-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert not any((tmp_path / "search").glob("*/checkpoint_000029")), "a trial is over already"
        family = psutil.Process(driver.pid).children(recursive=True)
    finally:
        driver.kill()
        driver.wait()
        driver.stderr.close()
    _, alive = psutil.wait_procs(family, timeout=15)
    left = [process for process in alive if not process.name().endswith("Agent")]
    for process in alive:  # Ray's agents notice later that there is nobody any more
        process.kill()
    assert not left
    tuner = tune.Tuner.restore(str(tmp_path / "search"), trained, resume_errored=True)
    check(tuner.fit())
    empty_pools(trained, seconds=40)


def is_under_way(folder):
    """Whether there is a snapshot of the search that was written after a trial's third checkpoint."""
    snapshots = [path.stat().st_mtime for path in folder.glob("experiment_state-*.json")]
    saved = [path.stat().st_mtime for path in folder.glob("*/checkpoint_000002")]
    return bool(snapshots and saved) and max(snapshots) > min(saved)
