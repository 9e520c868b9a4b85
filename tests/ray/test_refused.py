"""What is wrong with a cluster, a pool or a task is said by name, and nothing hangs."""

import os
import re
import signal
import threading
import time

import pytest

pytest.importorskip("ray")

from ray import tune

import hydra_tune_ray
from hydra_tune.errors import ConfigError
from hydra_tune_ray.errors import PoolError
from hydra_tune_ray.pools import Pools, pools_of
from tests.ray.searches import DEVICES, build, empty_pools, searched

pytestmark = pytest.mark.timeout(280)


@pytest.fixture(scope="module")
def trained(ray_cluster):
    made = hydra_tune_ray.trainable(build, **DEVICES)
    yield made
    pools_of(made).close()


def test_a_cluster_without_such_devices(ray_cluster):
    with pytest.raises(
        ConfigError, match=r"devices='cuda', and no node .* has a GPU: its 1 nodes have 0 GPUs and 2 CPUs"
    ):
        hydra_tune_ray.trainable(build, devices="cuda")


@pytest.mark.slow
def test_an_option_that_a_pool_refuses(ray_cluster):
    with pytest.raises(ConfigError, match="policy"):
        hydra_tune_ray.trainable(build, devices="cpu:1", policy="nope")


def failing(config):
    if config["lr"] == 0.01:
        raise RuntimeError("no such data")
    return "no task"


def test_a_build_that_fails(trained, tmp_path):
    with hydra_tune_ray.start_pools(**DEVICES) as pools:
        made = hydra_tune_ray.trainable(failing, pools=pools)
        results = searched(made, tmp_path, space={"lr": tune.grid_search([0.01, 0.02])})
    first, second = (str(result.error) for result in results)
    assert "has failed in its pool" in first
    assert "RuntimeError: no such data" in first
    assert "build must return a TrainTask, not str" in second


@pytest.mark.slow
def test_pools_that_are_gone(ray_cluster, tmp_path):
    made = hydra_tune_ray.trainable(build, **DEVICES)
    callback = hydra_tune_ray.PoolCallback(made)
    pools_of(made).close()
    with pytest.raises(ConfigError, match="are gone; start them again"):
        pools_of(made)
    tuner = tune.Tuner(
        made,
        param_space={"lr": 0.01},
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0, callbacks=[callback]),
    )
    (result,) = tuner.fit()
    assert "the pools of this trial are gone" in str(result.error)


class Older:
    """A directory as an earlier release had it."""

    async def place(self, key):
        return ""


class Newer(Older):
    """And a later one."""

    async def version(self):
        return "hydra-tune 99.0 (protocol 99)"


@pytest.fixture(params=[(Older, "an earlier hydra-tune"), (Newer, r"hydra-tune 99\.0 \(protocol 99\)")])
def others(request, ray_cluster):
    """The name of pools of another version, and how that is called."""
    kind, version = request.param
    name = f"of-{kind.__name__.lower()}"
    actor = ray_cluster.remote(kind).options(name=f"pools-{name}", namespace="hydra_tune", num_cpus=0).remote()
    yield name, version
    ray_cluster.kill(actor)


@pytest.mark.slow
def test_detached_pools_of_another_version(others, tmp_path):
    name, version = others
    wrong = rf"the pools '{name}' run {version}, and this program hydra-tune .*; install the same .* or end .*{name}"
    with pytest.raises(PoolError, match=wrong):
        hydra_tune_ray.start_pools(name=name, detached=True, idle_seconds=60, **DEVICES)
    with pytest.raises(PoolError, match=wrong):
        Pools(name).figures()
    made = hydra_tune_ray.trainable(build, pools=Pools(name))  # as on a node with another version than the driver's
    tuner = tune.Tuner(made, param_space={"lr": 0.01}, run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0))
    (result,) = tuner.fit()
    assert re.search(wrong, str(result.error)), str(result.error)


@pytest.mark.slow
def test_a_pool_that_dies_fails_its_trials_and_is_started_again(trained, tmp_path):
    (before,) = pools_of(trained).figures()

    def kill():
        # A trial that comes later, or has not begun, would train to its end in the next pool.
        units = None
        while units is None or pools_of(trained).figures()[0].units_run < units + 200:
            time.sleep(0.05)
            (now,) = pools_of(trained).figures()
            units = now.units_run if units is None and len(now.trials) == 2 else units
        os.kill(before.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    space = {"lr": tune.grid_search([0.01, 0.02]), "epochs": 10_000}
    results = searched(trained, tmp_path, space=space, max_concurrent_trials=2)
    thread.join()
    for result in results:
        assert "of build_" in str(result.error)
        assert "has died" in str(result.error)
        assert "max_failures" in str(result.error)
    deadline = time.monotonic() + 60
    while not (now := pools_of(trained).figures()) or not now[0].devices:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert now[0].pid != before.pid
    (result,) = searched(trained, tmp_path, space={"lr": 0.01, "epochs": 2}, name="again")
    assert result.error is None
    empty_pools(trained)
