"""Training from Python needs torch and what looks at the machine; not what reads sweep files, searches or draws."""

import subprocess
import sys

PROGRAM = """
import sys

for name in ("click", "yaml", "pydantic", "optuna", "ray", "sklearn", "ortools", "matplotlib"):
    sys.modules[name] = None  # is not there, to whoever imports it

import torch
from hydra_tune import HydraExecutor, TrainTask, train_plain

task = TrainTask(
    model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)),
    optimizer=torch.optim.Adam,
    loss=torch.nn.functional.mse_loss,
    train=lambda: [(torch.ones(2, 4), torch.zeros(2, 1))],
)
with HydraExecutor(devices="cpu:1", device_memory="1MiB", host_memory="1GiB", num_shards=2) as pool:
    (result,) = pool.run([task])
if result.error is not None:
    raise result.error
assert result.num_shards == 2
assert result.metrics == train_plain(task).metrics
"""


def test_a_pool_trains_without_them():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
