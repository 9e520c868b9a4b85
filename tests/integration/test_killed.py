"""A process is killed, and another goes on: the weights of one that was never killed. `tests/faults` kills more often."""

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
from tests.support.killed import WITH_BASE, train

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


@pytest.mark.slow
def test_killed_and_gone_on_with(tmp_path):
    epochs = 10
    process = start(tmp_path / "saved", tmp_path / "result", epochs, "cpu:2")
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n", process.stderr and process.stderr.read()
    time.sleep(random.Random(7).uniform(0.0, 4.0))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    ended(start(tmp_path / "saved", tmp_path / "result", epochs, "cpu:2"))
    with HydraExecutor(devices="cpu:1", num_shards=1) as pool:
        expected = train(pool, epochs, names=WITH_BASE)
    assert list(differences(expected, load_tensors(tmp_path / "result")[0])) == []
