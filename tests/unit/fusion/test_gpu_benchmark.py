"""The benchmark for GPUs runs, here on the CPU."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "gpu_fusion.py"


@pytest.mark.slow
def test_it_runs_to_its_end():
    command = [sys.executable, str(BENCHMARK), "--device", "cpu", "--quick", "cnn"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    row = done.stdout.splitlines()[-1].split()
    assert row[:2] == ["cnn", "2"]
    assert all(float(number) > 0 for number in row[2:5])
