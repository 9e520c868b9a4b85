"""Files to keep: private to the user, and whole or absent whatever happens to the process or the machine.

`alive.py`, `best.py`, `folder.py`, `sweep_folder.py` and `tensors.py` keep their files with these functions, and so does
`integrations/hydra_tune_optuna/search/resume_study.py` (`write_file`). `pool/checkpointing/writer.py` makes the
`checkpoint_dir` with `make_private_folder` when an executor is made, and `pool/checkpointing/lookup.py` takes `file_error`.
The module must not know models, the pool or a tuner, and must not import torch, because `hydra-tune list` looks at folders
without torch.

Note: atomic writes. The content first goes to a file beside the target, with mode 0600 and a unique name. The file is
flushed to the disk and renamed over the target, or linked to the name where nothing may be replaced, and the folder is
flushed as well. A reader of the target finds the old content or the new content. A killed process leaves the file beside
the target; `remove_leftovers` removes the file, on the same machine, once no process has the id of the writer.
"""

import contextlib
import errno
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
# A shared folder may hold files of other machines, whose process ids mean nothing here.
_MACHINE = f"{zlib.crc32(platform.node().encode()):08x}"


@contextlib.contextmanager
def replacing(path: Path, *, overwrite: bool = True) -> Iterator[BinaryIO]:
    """Open a file that becomes `path` when the block ends without an error.

    Args:
        path: target; its folder exists already.
        overwrite: whether an existing file may be replaced.

    Yields:
        The file, open for binary writing and empty.

    Raises:
        FileError: the system refuses to write, flush or rename, the name belongs to something other than a plain file,
            or `overwrite` is false and a file has the name. The content of `path` is then unchanged, and no other file
            is left; only after a failed flush of the folder, `path` has the new content.
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
                _link(temporary, path)
        except BaseException:
            # The first error is the one to report.
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        # A rename is lasting only once the folder itself is on the disk.
        _flush_folder(path.parent)
    except OSError as error:
        raise file_error("write", path, error) from error


def _link(temporary: Path, path: Path) -> None:
    """Give a file its name, unless the name is taken."""
    try:
        # Unlike a rename, a link refuses a name that is taken.
        os.link(temporary, path)
    except OSError as error:
        # Some file systems, such as FAT and network mounts, have no hard links.
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        temporary.replace(path)
    else:
        temporary.unlink()


def write_file(path: Path, content: bytes) -> None:
    """Write a file whole, as `replacing`."""
    with replacing(path) as file:
        file.write(content)


def remove_file(path: Path) -> None:
    """Remove a file, if the file exists.

    Raises:
        FileError: the system refuses, or there is no such folder.
    """
    try:
        path.unlink(missing_ok=True)
        _flush_folder(path.parent)
    except OSError as error:
        raise file_error("remove", path, error) from error


def make_private_folder(path: Path) -> None:
    """Create a folder of mode 0700, and missing parent folders; an existing folder stays unchanged.

    Raises:
        FileError: the system refuses, or the name belongs to something else.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise file_error("make the folder", path, error) from error


def remove_leftovers(folder: Path) -> None:
    """Remove half-written files of killed processes of this machine; files of living processes stay.

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
    """Return the project's error for a system error: "cannot WHAT 'path': ..."."""
    return FileError(
        f"cannot {what} {str(path)!r}: [Errno {error.errno}] {error.strerror or error}; free disk space, make the "
        f"path writable for this user, or give another path",
        path=str(path),
        errno=error.errno,
    )


def _check_target(path: Path) -> None:
    """Refuse a target other than a plain file: a rename would silently replace a device, a pipe or a link."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise FileError(
            f"cannot write {str(path)!r}: expected a plain file under that name, got "
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
    # Another user's process has the id, so the process lives.
    except PermissionError:
        return True
    return True
