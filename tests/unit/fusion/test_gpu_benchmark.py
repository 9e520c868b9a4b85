"""The benchmarks for GPUs run, here on the CPU."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.slow
def test_it_runs_to_its_end():
    command = [sys.executable, str(BENCHMARKS / "gpu_fusion.py"), "--device", "cpu", "--quick", "cnn"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    row = done.stdout.splitlines()[-1].split()
    assert row[:2] == ["cnn", "2"]
    assert all(float(number) > 0 for number in row[2:5])


@pytest.mark.slow
def test_plans_are_compared_to_the_end():
    wanted = ["dlrm", "--count", "2", "--demand", "1.5", "--warm-up", "1", "--steps", "2"]
    command = [sys.executable, str(BENCHMARKS / "mutwo.py"), *wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (chosen,) = (line for line in done.stdout.splitlines() if "(chosen)" in line)
    predicted, measured, ratio = map(float, chosen.split("(chosen)")[1].split()[:3])
    assert min(predicted, measured, ratio) > 0
