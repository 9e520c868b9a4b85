"""Files to keep: private to the user, and whole or not there, whatever becomes of the process or the machine.

Note: atomic. What is written goes to a file beside the target first, of mode 0600 and under a name of its own. It is flushed
to the disk, renamed over the target, and the folder is flushed as well. Who opens the target meets the old content or the new
one. What a killed process leaves is a file that `is_temporary` knows; `remove_leftovers` removes it.
"""

import contextlib
import os
import platform
import re
import stat
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from hydra_tune.errors import FileError

_TEMPORARY = re.compile(r"\..+\.([0-9a-f]{8})-([0-9]+)-[0-9a-f]{32}\.tmp")
_MACHINE = f"{zlib.crc32(platform.node().encode()):08x}"  # a shared folder has files of others, too


@contextlib.contextmanager
def replacing(path: Path, *, overwrite: bool = True) -> Iterator[BinaryIO]:
    """A file to write to, which becomes `path` when the block ends without an error.

    Args:
        path: what will be there; its folder is there already.
        overwrite: whether a file of that name may be there, and is replaced.

    Yields:
        The file, open for binary writing and empty.

    Raises:
        FileError: the system refuses to write, flush or rename, something other than a plain file has the name, or
            `overwrite` is false and a file has it. What was at `path` is as it was, and nothing else is left.
    """
    temporary = path.parent / f".{path.name}.{_MACHINE}-{os.getpid()}-{uuid.uuid4().hex}.tmp"
    try:
        _check_target(path)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if overwrite:
                temporary.replace(path)
            else:
                os.link(temporary, path)  # unlike a rename, refuses a name that is taken
                temporary.unlink()
        except BaseException:
            with contextlib.suppress(OSError):  # the first error is the one to tell
                temporary.unlink(missing_ok=True)
            raise
        _flush_folder(path.parent)
    except OSError as error:
        raise file_error("write", path, error) from error


def write_file(path: Path, content: bytes) -> None:
    """Write a file whole; see `replacing`.

    Raises:
        FileError: the system refuses; what was at `path` is as it was.
    """
    with replacing(path) as file:
        file.write(content)


def remove_file(path: Path) -> None:
    """Remove a file, if it is there.

    Raises:
        FileError: the system refuses.
    """
    try:
        path.unlink(missing_ok=True)
        _flush_folder(path.parent)
    except OSError as error:
        raise file_error("remove", path, error) from error


def make_private_folder(path: Path) -> None:
    """Make a folder of mode 0700, and those above it that are missing; one that is there stays as it is.

    Raises:
        FileError: the system refuses, or something else has the name.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise file_error("make the folder", path, error) from error


def is_temporary(path: Path) -> bool:
    """Whether the name is one that `replacing` gives while it writes."""
    return _TEMPORARY.fullmatch(path.name) is not None


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes of this machine have left half written; files of living ones stay.

    Raises:
        FileError: the system refuses.
    """
    try:
        for path in list(folder.iterdir()):
            match = _TEMPORARY.fullmatch(path.name)
            if match is not None and match[1] == _MACHINE and not _is_alive(int(match[2])):
                path.unlink(missing_ok=True)
    except OSError as error:
        raise file_error("tidy up", folder, error) from error


def file_error(what: str, path: Path, error: OSError) -> FileError:
    """The project's error for one of the system's.

    Args:
        what: could not be done, as in "cannot WHAT 'path'".
        path: to what.
        error: what the system says.
    """
    return FileError(
        f"cannot {what} {str(path)!r}: [Errno {error.errno}] {error.strerror or error}; make room there, have it "
        f"writable by this user, or give another place",
        path=str(path),
        errno=error.errno,
    )


def _check_target(path: Path) -> None:
    """A rename would put a plain file in the place of a device, a pipe or a link, without a word."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise FileError(
            f"cannot write {str(path)!r}: a plain file was expected under that name, and it is "
            f"{'a folder' if stat.S_ISDIR(mode) else 'a link' if stat.S_ISLNK(mode) else 'a device or a pipe'}; "
            f"give another name",
            path=str(path),
            errno=None,
        )


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
