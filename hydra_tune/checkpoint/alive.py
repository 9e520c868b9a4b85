"""Life signs in a shared folder: each process has a separate file there, locked as long as the process lives.

The system releases a lock however a process ends, so an existing file without a lock belongs to a dead process. A
process that ends in order removes the file, unless work is left for another process to continue. The module knows
nothing of the work. `StudyResumer` (`integrations/hydra_tune_optuna/search/resume_study.py`) makes the file and looks
for dead processes when a search with a `checkpoint_dir` begins, and closes the file when the search ends.
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
    """A file as a sign of a living process.

    Args:
        folder: folder for the files; created if missing.

    Attributes:
        name: name of the file, unique for all time.

    Raises:
        FileError: the file cannot be created.
    """

    def __init__(self, folder: Path) -> None:
        self.name = uuid.uuid4().hex
        self._folder = folder
        make_private_folder(folder)
        self._lock = _opened(folder / self.name, os.O_CREAT | os.O_EXCL)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:  # a file system without locks; an unlocked file would count as a dead process
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
            # Last: closing releases the lock, and an unlocked file that is still there would count as a dead process.
            os.close(lock)


def has_died(folder: Path, name: str) -> bool:
    """Whether the file's process is known to be dead; False for a missing file, which may belong to another folder.

    Raises:
        FileError: the file cannot be opened, or the file system has no locks.
    """
    try:
        lock = _opened(folder / name, 0)
    except FileNotFoundError:
        return False
    try:
        # Free: the system has released the lock, because its process has ended. The test's own lock ends with `close`.
        return try_lock(lock)
    except OSError as error:
        raise file_error("lock", folder / name, error) from error
    finally:
        os.close(lock)


def forget(folder: Path, name: str) -> None:
    """Remove the file of a dead process once nothing of its work is left.

    Raises:
        FileError: the file cannot be removed.
    """
    remove_file(folder / name)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the folder's exclusive lock inside the context; other callers wait, in any process.

    Raises:
        FileError: the folder cannot be written to.
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
