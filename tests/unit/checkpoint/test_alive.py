"""Who of those that share a folder lives: seen by a file that is locked, and nobody else's word."""

import errno
import fcntl
import os
import subprocess
import sys

import pytest

from hydra_tune.checkpoint.alive import LivenessFile, alone, forget, has_died
from hydra_tune.errors import FileError


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


def test_a_file_system_without_locks_is_an_error_that_leaves_nothing(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refused)
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    with pytest.raises(FileError, match=r"cannot lock .*no locks"):
        LivenessFile(tmp_path)
    assert not list(tmp_path.iterdir()), "an unlocked file would be that of a dead process"
    with pytest.raises(FileError, match=r"cannot lock .*no locks"), alone(tmp_path):
        pass
    with pytest.raises(FileError, match="cannot open"), alone(tmp_path / "missing"):
        pass
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208
