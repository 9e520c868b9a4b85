"""Detached pools outlive the program that has started them, are there for others, and end when nobody wants them."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("ray")

import hydra_tune_ray
from tests.ray.searches import DEVICES, RATES, build, empty_pools, expected, losses, searched
from tests.ray.test_killed import is_there

pytestmark = [pytest.mark.slow, pytest.mark.timeout(250)]
IDLE_SECONDS = 45.0
SHARED = {"name": "shared", "detached": True, "idle_seconds": IDLE_SECONDS, **DEVICES}

STARTING = """
import sys

import ray
from ray._private import services

import hydra_tune_ray
from tests.ray.test_detached import SHARED

services.resolve_ip_for_localhost = lambda host: host  # Ray takes the machine's own address for 127.0.0.1
ray.init(address=sys.argv[1], log_to_driver=False, _node_ip_address="127.0.0.1")
(pool,) = hydra_tune_ray.start_pools(**SHARED).figures()
print(pool.pid)
"""


def test_pools_that_another_program_has_started(ray_cluster, tmp_path):
    address = ray_cluster.get_runtime_context().gcs_address
    run = subprocess.run(
        [sys.executable, "-c", STARTING, address],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "RAY_ADDRESS": ""},
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 0, run.stderr[-2000:]
    pid = int(run.stdout.split()[-1])

    pools = hydra_tune_ray.start_pools(**SHARED)
    (pool,) = pools.figures()
    assert pool.pid == pid
    trained = hydra_tune_ray.trainable(build, pools=pools)
    configs = [{"lr": lr, "epochs": 3} for lr in RATES[:2]]
    results = searched(trained, tmp_path, space={"lr": {"grid_search": RATES[:2]}, "epochs": 3})
    assert [losses(result) for result in results] == expected(configs)
    (after,) = empty_pools(trained)
    assert after.pid == pid

    deadline = time.monotonic() + IDLE_SECONDS + 60
    while is_there("pools-shared") or is_there(pool.name) or psutil.pid_exists(pid):
        assert time.monotonic() < deadline
        time.sleep(0.5)
