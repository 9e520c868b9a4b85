"""Processes that are killed at any moment: every trial ends with the weights of one that nothing has hit."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("ray")

import ray
from ray import tune

import hydra_tune_ray
from hydra_tune_ray.messages import BeginRequest
from hydra_tune_ray.node.actors import NodePoolSpec, find_actor, start_pool
from hydra_tune_ray.node.nodes import device_nodes
from hydra_tune_ray.pools import pools_of
from tests.ray.searches import DEVICES, EACH, RATES, build, empty_pools, in_actor, same, searched, trained_by_itself

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


class Stopping(tune.Callback):
    """Stops a process once, at a third report, for longer than it takes to tell that it does not answer."""

    def __init__(self, pid):
        self.pid = pid
        self.has_stopped = False

    def on_trial_result(self, iteration, trials, trial, result, **info):
        if result["training_iteration"] == 3 and not self.has_stopped:
            self.has_stopped = True
            os.kill(self.pid, signal.SIGSTOP)
            time.sleep(45)
            os.kill(self.pid, signal.SIGCONT)


def test_a_directory_that_does_not_answer(ray_cluster, tmp_path):
    """As on a machine that has no time for it: the pool goes on with all trials, and nothing is tried again."""
    made = hydra_tune_ray.trainable(build, **DEVICES)
    (before,) = pools_of(made).figures()
    stopping = Stopping(in_actor(pools_of(made).directory, lambda directory: os.getpid()))
    last = tune.CheckpointConfig(checkpoint_at_end=True)
    check(searched(made, tmp_path, space=SPACE, checkpoints=last, callbacks=[stopping]))
    assert stopping.has_stopped
    (after,) = empty_pools(made)
    assert after.pid == before.pid
    pools_of(made).close()


def slowly(config):
    time.sleep(6)
    return build(config)


def test_a_build_may_take_longer_than_a_lease(trained, tmp_path):
    made = hydra_tune_ray.trainable(slowly, pools=pools_of(trained), lease_seconds=2.0)
    (result,) = searched(made, tmp_path, space={"lr": 0.01, "epochs": 2})
    assert result.error is None
    assert result.metrics["training_iteration"] == 2


def held_up(config):
    begun, goes_on = config["flags"]
    if begun:
        Path(begun).touch()
        until(Path(goes_on).exists)
    return build({"lr": 0.01, "epochs": 1000, "batches": 40})


def test_a_trial_that_ends_while_it_is_built_leaves_no_files(trained, tmp_path):
    """The files of the checkpoint that the trial was to resume from."""
    pool = find_actor(pools_of(trained).figures()[0].name)
    ask = lambda method, *arguments: ray.get(pool.call.remote(method, *arguments), timeout=60)  # noqa: E731
    request = BeginRequest(
        trial_id="trial", key="first", name="a", build=ray.cloudpickle.dumps(held_up), config={"flags": ("", "")}
    )
    ask("begin", request)
    ask("next", "first", 0)
    files = in_actor(pool, lambda actor: actor._pool._training.read_saved(actor._pool._trials.get("first").job))
    ask("end", "first")
    flags = [str(tmp_path / name) for name in ("begun", "goes on")]
    beginning = pool.call.remote("begin", replace(request, key="second", config={"flags": flags}, files=files))
    until(Path(flags[0]).exists)
    ask("end", "second")
    Path(flags[1]).touch()
    ray.get(beginning, timeout=60)
    assert in_actor(pool, lambda actor: [path.name for path in actor._pool._training._scratch.iterdir()]) == []


def test_a_pool_that_nobody_knows_ends(ray_cluster):
    """As when Ray starts a pool again whose driver has died."""
    (node,) = device_nodes(DEVICES)
    start_pool(NodePoolSpec(name="lonely", directory="nobody", node=node, options=DEVICES))
    until(lambda: not is_there("lonely"))


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_there(actor):
    try:
        find_actor(actor)
    except ValueError:
        return False
    return True
