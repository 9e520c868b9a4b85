"""Who lives, as others that share a folder see it: everyone has a file of their own there, locked as long as they live.

The system lets go of a lock however a process ends, so a file that is there and not locked is of one that has died. One that
ends in order removes its file, unless it leaves something to be gone on with. Knows nothing of what that is.
"""

import contextlib
import fcntl
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from hydra_tune.checkpoint.files import file_error, make_private_folder, remove_file
from hydra_tune.checkpoint.lock import LOCK, try_lock


class LifeSign:
    """A file that says that whoever made it lives.

    Args:
        folder: for the files; made if it is not there.

    Attributes:
        name: of the file, which no other ever has.

    Raises:
        FileError: it cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self.name = uuid.uuid4().hex
        self._folder = folder
        make_private_folder(folder)
        self._lock = _opened(folder / self.name, os.O_CREAT | os.O_EXCL)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self, *, leaves: bool) -> None:
        """It is over. May be called again.

        Args:
            leaves: whether something is left that another may go on with.

        Raises:
            FileError: the file cannot be removed.
        """
        lock, self._lock = self._lock, -1
        if lock < 0:
            return
        try:
            if not leaves:
                remove_file(self._folder / self.name)
        finally:
            os.close(lock)


def has_died(folder: Path, name: str) -> bool:
    """Whether who had this file is known to have died; False also where there is no such file, for it may be of another folder.

    Raises:
        FileError: the file cannot be read.
    """
    try:
        lock = _opened(folder / name, 0)
    except FileNotFoundError:
        return False
    try:
        return try_lock(lock)
    except OSError as error:
        raise file_error("lock", folder / name, error) from error
    finally:
        os.close(lock)


def forget(folder: Path, name: str) -> None:
    """One that has died has left nothing any more.

    Raises:
        FileError: the file cannot be removed.
    """
    remove_file(folder / name)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Nobody else of this folder is in such a block meanwhile, in any process.

    Raises:
        FileError: the folder cannot be written to.
    """
    lock = _opened(folder / LOCK, os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _opened(path: Path, flags: int) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise file_error("open", path, error) from error
