"""The folder to spill to: what is refused, whose files are removed, and whose are not."""

import errno
import fcntl
import os
import shutil
from types import SimpleNamespace

import pytest

from hydra_tune import HydraExecutor
from hydra_tune.errors import ConfigError
from hydra_tune.memory.host.spill_dir import SpillFolder, check_spill_dir

STALE = f"hydra-tune-1-{'a' * 32}"


def test_a_folder_of_ours_is_taken_as_it_is(tmp_path):
    assert check_spill_dir(str(tmp_path)) == check_spill_dir(tmp_path) == tmp_path


@pytest.mark.parametrize("wrong", ["", 3, True, ["a"]])
def test_what_is_no_path_is_refused(wrong):
    with pytest.raises(ConfigError, match="spill_dir must be the path of a folder"):
        HydraExecutor(devices="cpu:1", spill_dir=wrong)


def test_a_missing_folder_a_file_and_a_symlink_are_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"missing' does not exist; create the folder"):
        HydraExecutor(devices="cpu:1", spill_dir=tmp_path / "missing")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file' is not a folder"):
        check_spill_dir(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot be reached: File name too long; give another path"):
        check_spill_dir(tmp_path / ("a" * 300))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"link' is a symlink; give its target, '.*elsewhere'"):
        check_spill_dir(f"{tmp_path}/link/")


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert check_spill_dir("~") == tmp_path


def test_a_folder_that_is_not_ours_to_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=r"is writable by all users.*mode 0777"):
        check_spill_dir(tmp_path)
    tmp_path.chmod(0o1777)
    assert check_spill_dir(tmp_path) == tmp_path
    if os.geteuid():
        tmp_path.chmod(0o500)
        with pytest.raises(ConfigError, match="cannot be written by this user"):
            check_spill_dir(tmp_path)
        tmp_path.chmod(0o700)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a file system that takes no files")  # noqa: PTH112
def test_a_file_system_that_takes_no_folder_is_refused():
    with pytest.raises(ConfigError, match=r"spill_dir '/proc.*(cannot be written|0 B free)|cannot create a folder"):
        SpillFolder(check_spill_dir("/proc"))


def test_a_full_file_system_is_refused_with_the_number(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5 * 2**20))
    with pytest.raises(ConfigError, match=r"with 5\.0 MiB free, but needs at least 64\.0 MiB"):
        check_spill_dir(tmp_path)


def leave(folder, *names):
    folder.mkdir(mode=0o700)
    for name in names:
        (folder / name).write_bytes(b"left")
    return folder


def test_a_folder_whose_process_is_gone_is_removed(tmp_path):
    stale = leave(tmp_path / STALE, "lock", "block-1.bin", "block-22.bin")
    half_made = leave(tmp_path / f"hydra-tune-2-{'b' * 32}")
    folder = SpillFolder(tmp_path)
    assert not stale.exists()
    assert not half_made.exists()
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_ours_is_left_alone(tmp_path):
    stale = leave(tmp_path / STALE, "lock", "block-1.bin", "thesis.txt")
    other_name = leave(tmp_path / "hydra-tune-1-short", "lock", "block-1.bin")
    target = leave(tmp_path / "target", "lock", "block-1.bin")
    link = tmp_path / f"hydra-tune-3-{'c' * 32}"
    link.symlink_to(target)
    SpillFolder(tmp_path).close()
    assert [path.name for path in stale.iterdir()] == ["thesis.txt"]
    assert len(list(other_name.iterdir())) == len(list(target.iterdir())) == 2
    assert link.is_symlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_left_alone(tmp_path):
    stale = leave(tmp_path / STALE, "lock", "block-1.bin")
    os.chown(stale, 65534, 65534)
    SpillFolder(tmp_path).close()
    assert len(list(stale.iterdir())) == 2


def test_two_pools_share_a_folder(tmp_path):
    first, second = SpillFolder(tmp_path), SpillFolder(tmp_path)
    assert first.path.is_dir()
    second.close()
    assert first.path.is_dir()
    first.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_refused_and_left_clean(tmp_path, monkeypatch):
    flock = fcntl.flock

    def refused(descriptor, operation):
        if operation & fcntl.LOCK_NB:
            raise OSError(errno.ENOLCK, "no locks")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", refused)
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    with pytest.raises(ConfigError, match=r"cannot create a folder in spill_dir .*no locks"):
        SpillFolder(tmp_path)
    assert not list(tmp_path.iterdir())
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208
