"""Training from Python needs torch and what looks at the machine; not what reads sweep files, searches or draws.

So a machine with a GPU and torch, on which nothing can be installed, runs the benchmarks and the tests for GPUs from a copy of
the repository.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

WITHOUT = """
import sys

names = ("click", "yaml", "pydantic", "optuna", "ray", "sklearn", "ortools", "matplotlib", "cmaes", "transformers", "lightning")
for name in names:
    sys.modules[name] = None  # is not there, to whoever imports it
"""

PROGRAM = """
import random

import numpy
import torch

def streams():
    return repr((random.getstate(), numpy.random.get_state(), torch.get_rng_state().tolist()))

random.seed(7), numpy.random.seed(7), torch.manual_seed(7)
before = streams()
from hydra_tune import HydraExecutor, TrainTask, train_plain

task = TrainTask(
    model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)),
    optimizer=torch.optim.Adam,
    loss=torch.nn.functional.mse_loss,
    train=lambda: [(torch.ones(2, 4), torch.zeros(2, 1))],
)
with HydraExecutor(devices="cpu:1", device_memory="1MiB", host_memory="1GiB", num_shards=2) as pool:
    (result,) = pool.run([task], on_error="return")
if result.error is not None:
    raise result.error
assert result.num_shards == 2
assert streams() == before, "neither the imports nor the pool may draw from the script's own random streams"
assert result.metrics == train_plain(task).metrics
print("trained")
"""

FOR_GPUS = """
import runpy
from pathlib import Path

import pytest

root = Path(sys.argv[1])
sys.path[:0] = [str(root / "benchmarks"), str(root)]
found = [*root.glob("benchmarks/gpu_*.py"), *root.glob("benchmarks/mutwo*.py"), *root.glob("tests/gpu/*.py")]
for path in found:
    try:
        runpy.run_path(str(path), run_name="imported")
    except pytest.skip.Exception:
        assert path.parent.name == "gpu"
print(*sorted(path.name for path in found))
"""


@pytest.fixture(scope="module")
def done():
    """One after the other in one process: to load torch takes seconds."""
    command = [sys.executable, "-c", WITHOUT + PROGRAM + FOR_GPUS, str(ROOT)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.cases(1 / 3)
def test_a_pool_trains_without_them(done):
    assert done.stdout.startswith("trained\n"), done.stderr


def test_what_is_for_gpus_is_imported_without_them(done):
    assert done.returncode == 0, done.stderr
    found = done.stdout.split()
    assert {
        "gpu_fusion.py",
        "gpu_spill.py",
        "mutwo.py",
        "test_cuda.py",
        "test_planned_groups.py",
        "test_planned_pairs.py",
    } <= set(found)
