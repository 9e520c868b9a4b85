"""`benchmarks/hydra_workloads.py` trains the paper's workloads each way, and the pool to the bits of a plain loop."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("workload", ["bert", "vit"])
def test_every_way_trains_all_trials(workload):
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'integrations'}", "OMP_NUM_THREADS": "1"}
    arms = "plain;task parallel;model parallel;GPipe;FSDP2;hydra-tune"
    command = [sys.executable, str(ROOT / "benchmarks" / "hydra_workloads.py"), "--quick", "--steps", "1"]
    done = subprocess.run(
        [*command, "--workloads", workload, "--arms", arms],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    # The script itself compares the final weights of the pool's trials with the plain loop's, and fails if bits differ.
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("| ")]
    assert rows[1:] == arms.split(";")
