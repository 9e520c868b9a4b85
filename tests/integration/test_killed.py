"""Processes are killed at any moment, and started again until one ends: its weights are those of one that was never killed."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hydra_tune import HydraExecutor
from hydra_tune.checkpoint.tensors import load_tensors
from tests.parity.exact import differences
from tests.support.killed import train

ROOT = Path(__file__).parents[2]


def start(folder: Path, result: Path, epochs: int, devices: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.killed", str(folder), str(result), str(epochs), devices],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'integrations'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors


def kill_often(tmp_path: Path, *, times: int, epochs: int, latest_seconds: float) -> int:
    """Kill so often, and start once more; returns how many were killed."""
    chance = random.Random(7)
    killed = 0
    for number in range(times):
        process = start(tmp_path / "saved", tmp_path / "result", epochs, "cpu:1" if number % 2 else "cpu:2")
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n", process.stderr and process.stderr.read()
        time.sleep(chance.uniform(0.0, latest_seconds))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if process.returncode == 0:
            break
        killed += 1
    ended(start(tmp_path / "saved", tmp_path / "result", epochs, "cpu:2"))
    return killed


def assert_like_never_killed(tmp_path: Path, epochs: int) -> None:
    with HydraExecutor(devices="cpu:1", num_shards=1) as pool:
        expected = train(pool, epochs)
    assert list(differences(expected, load_tensors(tmp_path / "result")[0])) == []


def test_killed_and_gone_on_with(tmp_path):
    epochs = 10
    assert kill_often(tmp_path, times=1, epochs=epochs, latest_seconds=4.0) > 0
    assert_like_never_killed(tmp_path, epochs)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_at_fifty_moments(tmp_path):
    epochs = 100
    assert kill_often(tmp_path, times=50, epochs=epochs, latest_seconds=6.0) == 50
    assert_like_never_killed(tmp_path, epochs)
