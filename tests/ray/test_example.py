"""examples/ray, as it is run; but for Ray being told to stay on the loopback interface."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
ON_LOOPBACK = """
import functools, runpy, sys
import ray
from ray._private import services
if __name__ == "__main__":
    services.resolve_ip_for_localhost = lambda host: host
    ray.init = functools.partial(ray.init, _node_ip_address="127.0.0.1", object_store_memory=100 * 2**20, num_cpus=2)
    sys.argv = sys.argv[1:]
    sys.path.insert(0, sys.argv[0].rpartition("/")[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_digits_under_asha(ray_environment, tmp_path):
    program = tmp_path / "on_loopback.py"
    program.write_text(ON_LOOPBACK)
    example = ROOT / "examples/ray/sweep.py"
    run = subprocess.run(
        [sys.executable, program, example, "--trials=2", "--epochs=2", f"--storage={tmp_path}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "best val_acc 0." in run.stdout
    assert len(list((tmp_path / "digits").glob("build_*/checkpoint_*"))) == 2
