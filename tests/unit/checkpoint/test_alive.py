"""Who of those that share a folder lives: seen by a file that is locked, and nobody else's word."""

import subprocess
import sys

import pytest

from hydra_tune.checkpoint.alive import LivenessFile, alone, forget, has_died


def test_one_lives_until_it_says_otherwise_or_cannot(tmp_path):
    one, other = LivenessFile(tmp_path / "signs"), LivenessFile(tmp_path / "signs")
    assert not has_died(tmp_path / "signs", one.name)
    one.close(leaves=True)
    assert has_died(tmp_path / "signs", one.name)
    assert not has_died(tmp_path / "signs", other.name)
    other.close(leaves=False)
    other.close(leaves=True)
    assert [path.name for path in (tmp_path / "signs").iterdir()] == [one.name]
    forget(tmp_path / "signs", one.name)
    assert not list((tmp_path / "signs").iterdir())


def test_of_another_folder_nothing_is_known(tmp_path):
    sign = LivenessFile(tmp_path / "signs")
    sign.close(leaves=True)
    assert not has_died(tmp_path / "others", sign.name)


KILLED = """
import os, signal, sys
from pathlib import Path
from hydra_tune.checkpoint.alive import LivenessFile, alone
sign = LivenessFile(Path(sys.argv[1]))
with alone(Path(sys.argv[1])):
    print(sign.name, flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.timeout(120)
def test_one_that_is_killed_has_died_and_is_in_nobodys_way(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    assert name
    assert not has_died(tmp_path, name)
    process.communicate("die\n")
    assert has_died(tmp_path, name)
    with alone(tmp_path):
        pass
