"""A sweep's folder is one process's at a time, stays within checkpoint_dir, and keeps what is noted whole."""

import errno
import os

import pytest

from hydra_tune.checkpoint.sweep_folder import SweepFolder
from hydra_tune.errors import CheckpointError, FileError


def test_it_is_the_same_when_it_is_opened_again(tmp_path):
    with SweepFolder(tmp_path, "first") as folder:
        assert folder.noted("sampler") is None
        folder.note("sampler", {"at": [1, 2.5, None]})
        identity = folder.identity
    with SweepFolder(tmp_path, "first") as folder, SweepFolder(tmp_path, "second") as other:
        assert folder.noted("sampler") == {"at": [1, 2.5, None]}
        assert folder.identity == identity != other.identity
        assert oct(folder.path.stat().st_mode & 0o777) == "0o700"
        assert {oct(path.stat().st_mode & 0o777) for path in folder.path.iterdir()} == {"0o600"}


def test_nobody_else_has_it_meanwhile(tmp_path):
    told = rf"the sweep 'first' in .* by another process \({os.getpid()} on "
    with SweepFolder(tmp_path, "first"), pytest.raises(CheckpointError, match=told):
        SweepFolder(tmp_path, "first")
    SweepFolder(tmp_path, "first").close()


@pytest.mark.parametrize("study", ["../up", "/etc", "..", ".", "a/../../b", "", "~", "a\0b", "x" * 300, "con\nlog"])
def test_no_name_leads_out_of_the_folder(tmp_path, study):
    root = tmp_path / "saved"
    root.mkdir()
    with SweepFolder(root, study) as folder:
        assert folder.path.parent == root
        assert folder.path.resolve().parent == root.resolve()
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_links_are_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    with SweepFolder(tmp_path, "first") as folder:
        path = folder.path
        (path / "sampler.json").symlink_to("/etc/hostname")
        with pytest.raises(Exception, match="cannot read"):
            folder.noted("sampler")
    (tmp_path / "second~sweep").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is a link"):
        SweepFolder(tmp_path, "second")


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_damage_is_said(tmp_path, text):
    with SweepFolder(tmp_path, "first") as folder:
        (folder.path / "sampler.json").write_bytes(text)
        with pytest.raises(CheckpointError, match=r"sampler.json' is damaged: .*; remove it"):
            folder.noted("sampler")


def test_a_full_disk_does_not_keep_the_lock(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", full)
        with pytest.raises(FileError, match="no space left"):
            SweepFolder(tmp_path, "first")
    SweepFolder(tmp_path, "first").close()
