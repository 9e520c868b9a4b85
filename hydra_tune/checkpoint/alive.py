"""Life signs in a shared folder: each `LivenessFile` is a separate file there, locked until `close` or the process's end.

The system releases a lock however a process ends, so an existing file without a lock has lost its owner. An owner that
ends in order removes the file, unless work is left for another process to continue. A process forked from the owner
keeps the lock, too, as long as the forked process lives. The module must not know the work, nor models, the pool or a
tuner. `StudyResumer` (`integrations/hydra_tune_optuna/search/resume_study.py`) makes the file when a search with a
`checkpoint_dir` begins, claims the trials of dead searches inside `alone`, asks `has_died` about the owners, and closes the
file when the search ends.
"""

import contextlib
import fcntl
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from hydra_tune.checkpoint.files import file_error, make_private_folder, remove_file
from hydra_tune.checkpoint.lock import LOCK, try_lock


class LivenessFile:
    """A file in a folder, made if missing, as a sign of a living owner.

    Attributes:
        name: name of the file, unique for all time.

    Raises:
        FileError: the folder or the file cannot be created, or the file system has no locks.
    """

    def __init__(self, folder: Path) -> None:
        self.name = uuid.uuid4().hex
        self._folder = folder
        make_private_folder(folder)
        self._lock = _opened(folder / self.name, os.O_CREAT | os.O_EXCL)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:  # a file system without locks; an unlocked file would count as a dead owner's
            self.close(leaves=False)
            raise file_error("lock", folder / self.name, error) from error

    def close(self, *, leaves: bool) -> None:
        """End the life sign. May be called again.

        Args:
            leaves: whether work is left for another process to continue.

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
            # Last: closing releases the lock, and an unlocked file that is still there counts as a dead owner's.
            os.close(lock)


def has_died(folder: Path, name: str) -> bool:
    """Whether the file's owner is known to have ended; False for a missing file, which may belong to another folder.

    Raises:
        FileError: the file cannot be opened, or the file system has no locks.
    """
    try:
        lock = _opened(folder / name, 0)
    except FileNotFoundError:
        return False
    try:
        # Free: the owner has closed the file and left work, or its process has ended. The test's own lock ends with `close`.
        return try_lock(lock)
    except OSError as error:
        raise file_error("lock", folder / name, error) from error
    finally:
        os.close(lock)


def forget(folder: Path, name: str) -> None:
    """Remove the file of an owner that has ended, once nothing of its work is left."""
    remove_file(folder / name)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the folder's exclusive lock inside the context; other callers wait, in any process.

    Raises:
        FileError: the folder is missing, or its lock file cannot be opened or locked.
    """
    path = folder / LOCK
    try:
        lock = _opened(path, os.O_CREAT)
    except FileNotFoundError as error:
        raise file_error("open", path, error) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise file_error("lock", path, error) from error
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
