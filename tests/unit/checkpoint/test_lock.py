"""A folder is one's own until one lets go of it, or dies."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from hydra_tune.checkpoint.lock import LOCK, is_locked, take_lock

HOLD = "import sys, time; from pathlib import Path; from hydra_tune.checkpoint.lock import take_lock; "
HOLD += "print(take_lock(Path(sys.argv[1])), flush=True); time.sleep(600)"


@pytest.fixture(params=["path", "descriptor"])
def folder(request, tmp_path):
    if request.param == "path":
        yield tmp_path
        return
    descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


def test_one_has_it_and_lets_go(folder, tmp_path):
    assert not is_locked(folder)
    mine = take_lock(folder)
    assert is_locked(folder)
    assert take_lock(folder) is None
    os.close(mine)
    assert not is_locked(folder)
    again = take_lock(folder)
    assert again is not None
    os.close(again)
    assert oct((tmp_path / LOCK).stat().st_mode & 0o777) == "0o600"


def test_a_killed_process_lets_go(folder, tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() != "None\n"
        assert is_locked(folder)
        assert take_lock(folder) is None
        other.send_signal(signal.SIGKILL)
    assert not is_locked(folder)
    os.close(take_lock(folder))


def test_whoever_looks_does_not_keep_others_off(folder):
    assert not is_locked(folder)
    os.close(take_lock(folder))


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").write_text("")
    (tmp_path / LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        take_lock(tmp_path)


def test_a_file_system_without_locks_costs_no_descriptors(folder, monkeypatch):
    def refused(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refused)
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    with pytest.raises(OSError, match="no locks"):
        take_lock(folder)
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208
