"""Files to keep: whole or not there, private, and loud when they cannot be written."""

import errno
import os
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hydra_tune.checkpoint.files import make_private_folder, remove_leftovers, replacing, write_file
from hydra_tune.errors import FileError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_written_whole_private_and_alone(tmp_path: Path):
    write_file(tmp_path / "a", b"one")
    write_file(tmp_path / "a", b"two")
    assert (tmp_path / "a").read_bytes() == b"two"
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
    assert names(tmp_path) == ["a"]


def test_what_was_there_stays_when_the_writer_fails(tmp_path: Path):
    write_file(tmp_path / "a", b"old")
    with pytest.raises(TypeError), replacing(tmp_path / "a") as file:
        file.writelines([b"new", "no bytes"])  # type: ignore[list-item]
    assert (tmp_path / "a").read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_a_full_disk_names_path_and_errno_and_leaves_what_was_there(tmp_path: Path):
    """A limit on the size of files stands for the disk: the system itself refuses the write."""
    code = """
        import resource, signal, sys
        from pathlib import Path
        from hydra_tune.checkpoint.files import write_file
        from hydra_tune.errors import FileError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            write_file(Path(sys.argv[1]), bytes(5000))
        except FileError as error:
            print(error.errno, error.path, error)
    """
    write_file(tmp_path / "a", b"old")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "a")], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"{errno.EFBIG} {tmp_path / 'a'} cannot write {str(tmp_path / 'a')!r}")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_a_name_that_is_taken_can_be_refused(tmp_path: Path):
    write_file(tmp_path / "a", b"old")
    with pytest.raises(FileError, match="exists") as caught, replacing(tmp_path / "a", overwrite=False) as file:
        file.write(b"new")
    assert caught.value.errno == errno.EEXIST
    assert (tmp_path / "a").read_bytes() == b"old"
    with replacing(tmp_path / "b", overwrite=False) as file:
        file.write(b"new")
    assert names(tmp_path) == ["a", "b"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP])
def test_a_new_file_needs_no_hard_links(tmp_path: Path, monkeypatch, number):
    """FAT and several network mounts have none."""

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    test_a_name_that_is_taken_can_be_refused(tmp_path)


def test_nothing_but_a_plain_file_is_replaced(tmp_path: Path):
    """A rename would put a file in the place of a pipe or of a device such as /dev/null."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "folder").mkdir()
    for name, what in (("pipe", "a device or a pipe"), ("link", "a link"), ("folder", "a folder")):
        with pytest.raises(FileError, match=f"got {what}"):
            write_file(tmp_path / name, b"")
    assert names(tmp_path) == ["folder", "link", "pipe"]
    assert stat.S_ISFIFO((tmp_path / "pipe").lstat().st_mode)


def test_a_missing_folder_is_told(tmp_path: Path):
    with pytest.raises(FileError, match="No such file") as caught:
        write_file(tmp_path / "nowhere" / "a", b"")
    assert caught.value.errno == errno.ENOENT


def test_what_a_killed_process_leaves_is_known_and_removed(tmp_path: Path):
    code = """
        import os, signal, sys
        from pathlib import Path
        from hydra_tune.checkpoint.files import replacing
        with replacing(Path(sys.argv[1])) as file:
            file.write(b"half")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    """
    write_file(tmp_path / "a", b"old")
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "a")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "a").read_bytes() == b"old"
    assert [path.suffix for path in tmp_path.iterdir() if path.name != "a"] == [".tmp"]
    with replacing(tmp_path / "b") as file:  # of a living process: it stays
        remove_leftovers(tmp_path)
        file.write(b"whole")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"old", "b": b"whole"}


def test_a_private_folder_is_made_once(tmp_path: Path):
    folder = tmp_path / "some" / "where"
    make_private_folder(folder)
    make_private_folder(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FileError, match="cannot make the folder"):
        make_private_folder(tmp_path / "file")
