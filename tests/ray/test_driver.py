"""The driver is killed: a restored search ends with the weights of one that nothing has hit, and no old work goes on."""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from pickle import UnpicklingError

import cloudpickle
import psutil
import pytest

pytest.importorskip("ray")

from ray import tune

import hydra_tune_ray
from hydra_tune_ray.pools import pools_of
from tests.ray.searches import DEVICES, build, empty_pools
from tests.ray.test_killed import check, is_there

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LEASE_SECONDS = 3.0
STAYING = {"name": "staying", "detached": True, "idle_seconds": 120, **DEVICES}

DRIVER = """
    import sys

    import ray
    from ray._private import services

    import hydra_tune_ray
    from tests.ray.searches import DEVICES, EACH, build, searched
    from tests.ray.test_driver import LEASE_SECONDS, STAYING
    from tests.ray.test_killed import SPACE

    if __name__ == "__main__":
        folder, address, stays = sys.argv[1:]
        services.resolve_ip_for_localhost = lambda host: host  # Ray takes the machine's own address for 127.0.0.1
        local = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100 * 2**20}
        ray.init(
            address=address, log_to_driver=False, _node_ip_address="127.0.0.1", **(local if address == "local" else {})
        )
        where = {"pools": hydra_tune_ray.start_pools(**STAYING)} if stays == "stays" else DEVICES
        trained = hydra_tune_ray.trainable(build, lease_seconds=LEASE_SECONDS, **where)
        print(trained.pools, flush=True)
        searched(trained, folder, space=SPACE, checkpoints=EACH)
"""


class Driver:
    """Another program that searches; killed when three reports of a trial are in a snapshot of its search."""

    def __init__(self, folder, address, pools):
        self.folder = folder
        program = folder / "driver.py"
        program.write_text(textwrap.dedent(DRIVER))
        with (folder / "said").open("w") as said, (folder / "errors").open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(program), str(folder), address, pools],
                env={**os.environ, "RAY_ADDRESS": ""},
                stdout=said,
                stderr=errors,
                cwd=Path(__file__).parents[2],
            )

    def kill_under_way(self):
        """Returns the name of its pools, and the processes that it had started."""
        try:
            deadline = time.monotonic() + 150
            while not self.is_under_way():
                assert self.process.poll() is None, (self.folder / "errors").read_text()[-2000:]
                assert time.monotonic() < deadline
                time.sleep(0.1)
            family = psutil.Process(self.process.pid).children(recursive=True)
        finally:
            self.process.kill()
            self.process.wait()
        assert not any((self.folder / "search").glob("*/checkpoint_000029")), "a trial was over already"
        return (self.folder / "said").read_text().split()[0], family

    def is_under_way(self):
        """Whether there is a whole snapshot of the search that was written after a trial's third checkpoint.

        Ray copies the files of a snapshot one after the other, and in place: killed meanwhile, it leaves one cut off.
        """
        folder = self.folder / "search"
        saved = [path.stat().st_mtime for path in folder.glob("*/checkpoint_000002")]
        files = dict.fromkeys(folder.glob("experiment_state-*.json"), json.load)
        files |= dict.fromkeys(folder.glob("basic-variant-state-*.json"), cloudpickle.load)
        return (
            bool(saved)
            and len(files) == 2
            and all(path.stat().st_mtime > min(saved) and is_whole(path, load) for path, load in files.items())
        )


def is_whole(path, load):
    try:
        with path.open("rb") as file:
            load(file)
    except (EOFError, ValueError, UnpicklingError):
        return False
    return True


def restored(trained, folder):
    return tune.Tuner.restore(str(folder / "search"), trained, resume_errored=True).fit()


def test_a_cluster_that_dies_with_its_driver(ray_cluster, tmp_path):
    _, family = Driver(tmp_path, "local", "own").kill_under_way()
    _, alive = psutil.wait_procs(family, timeout=30)
    left = [process for process in alive if not process.name().endswith("Agent")]
    for process in alive:  # Ray's agents notice later that there is nobody any more
        process.kill()
    assert not left
    with hydra_tune_ray.start_pools(**DEVICES) as pools:
        trained = hydra_tune_ray.trainable(build, pools=pools)
        check(restored(trained, tmp_path))
        empty_pools(trained, seconds=10)  # the restored callback tells the pools of now, not those of before


def test_a_cluster_that_stays(ray_cluster, tmp_path):
    address = ray_cluster.get_runtime_context().gcs_address
    name, _ = Driver(tmp_path, address, "own").kill_under_way()
    deadline = time.monotonic() + LEASE_SECONDS + 15
    while is_there(f"pools-{name}") or is_there(pool_of(ray_cluster, name)):  # they end with their driver
        assert time.monotonic() < deadline
        time.sleep(0.2)
    with hydra_tune_ray.start_pools(**DEVICES) as pools:
        check(restored(hydra_tune_ray.trainable(build, pools=pools), tmp_path))


@pytest.mark.parametrize("waits", [True, False])
def test_pools_that_stay(ray_cluster, tmp_path, waits):
    address = ray_cluster.get_runtime_context().gcs_address
    Driver(tmp_path, address, "stays").kill_under_way()
    with hydra_tune_ray.start_pools(**STAYING) as pools:
        trained = hydra_tune_ray.trainable(build, pools=pools, lease_seconds=LEASE_SECONDS)
        (before,) = pools_of(trained).figures()
        assert before.trials, "the driver has died this very moment, and its trials have a lease"
        if waits:
            (first,) = empty_pools(trained, seconds=LEASE_SECONDS + 10)
            time.sleep(1)
            (second,) = pools_of(trained).figures()
            assert second.units_run == first.units_run
        results = restored(trained, tmp_path)
        (after,) = empty_pools(trained, seconds=10)
        assert after.pid == before.pid
        check(results)


def pool_of(ray, name):
    return f"pools-{name}:{ray.get_runtime_context().get_node_id()}"
