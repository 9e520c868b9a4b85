"""The folder for a pool's spilled blocks: created in `spill_dir`, private, removed at the end, swept after a crash.

`ExecutorSettings` (`pool/runtime/settings.py`) checks `spill_dir` when an executor is made, and creates the folder when
the pool starts; `SpillDisk` (`disk.py`) opens and removes the files in the folder, and closes the folder.

Note: ownership. A pool creates a folder of mode 0700 and holds a lock on the file `lock` in the folder for its whole
life. The kernel releases the lock at the end of the process, however the process ends. A folder with such a name, of
this user and without a held lock was therefore left by a crash. Of such a folder, only the lock and files with names given by
this module are removed, and the folder itself only once empty. Creating and sweeping exclude each other by a lock on
`spill_dir` itself, so that no process sweeps a folder just being created.
"""

import contextlib
import fcntl
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path

from hydra_tune.checkpoint.lock import LOCK, is_locked, take_lock
from hydra_tune.errors import ConfigError
from hydra_tune.paths import check_reachable, option_path
from hydra_tune.quantities import format_bytes

_FOLDER = re.compile(r"hydra-tune-[0-9]+-[0-9a-f]{32}")
_FILE = re.compile(r"block-[0-9]+\.bin")
_LEAST_FREE_BYTES = 64 * 2**20


def file_name(number: int) -> str:
    """Return the name of the file of the block with this number."""
    return f"block-{number}.bin"


def check_spill_dir(path: object) -> Path:
    """Return the folder for spilling as an absolute path.

    Raises:
        ConfigError: the path is not a folder, is a symlink, cannot be written by this user, can be tampered with by
            other users, or is on a full file system.
    """
    # Not Path.resolve, which would follow the symlink that is refused here.
    folder = Path(os.path.abspath(option_path(path, "spill_dir")))  # noqa: PTH100
    check_reachable(folder, "spill_dir")
    if folder.is_symlink():
        raise ConfigError(f"spill_dir {str(folder)!r} is a symlink; give its target, {str(folder.resolve())!r}")
    if not folder.exists():
        raise ConfigError(f"spill_dir {str(folder)!r} does not exist; create the folder, or give an existing one")
    if not folder.is_dir():
        raise ConfigError(f"spill_dir {str(folder)!r} is not a folder; give the path of a folder")
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(
            f"spill_dir {str(folder)!r} cannot be written by this user; give a folder that you may write to"
        )
    mode = folder.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise ConfigError(
            f"spill_dir {str(folder)!r} is writable by all users, who could replace spilled files (mode "
            f"{stat.S_IMODE(mode):04o}); give a folder of your own, or set its sticky bit"
        )
    free = shutil.disk_usage(folder).free
    if free < _LEAST_FREE_BYTES:
        raise ConfigError(
            f"spill_dir {str(folder)!r} is on a file system with {format_bytes(free)} free, but needs at least "
            f"{format_bytes(_LEAST_FREE_BYTES)}; free some space, or give a folder on another file system"
        )
    return folder


class SpillFolder:
    """A private folder of this process in `spill_dir`; folders left by crashed processes are removed first.

    Attributes:
        descriptor: open descriptor of the folder; files are opened relative to the descriptor, so that a folder moved
            to the path is not followed.

    Raises:
        ConfigError: the folder cannot be created.
    """

    def __init__(self, spill_dir: Path) -> None:
        self._parent = spill_dir
        self.path = spill_dir / f"hydra-tune-{os.getpid()}-{uuid.uuid4().hex}"
        try:
            # Between `mkdir` and `take_lock`, another process would take the folder for a leftover of a crash and
            # remove the folder.
            with _alone_in(spill_dir):
                _sweep(spill_dir)
                self.path.mkdir(mode=0o700)
                self.descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    lock = take_lock(self.descriptor)
                except OSError:  # a file system without locks
                    os.close(self.descriptor)
                    shutil.rmtree(self.path, ignore_errors=True)
                    raise
        except OSError as error:
            raise ConfigError(
                f"cannot create a folder in spill_dir {str(spill_dir)!r}: {error}; give another spill_dir"
            ) from error
        assert lock is not None, "nobody else knows the folder yet"
        self._lock = lock

    def open(self, name: str, flags: int) -> int:
        """Open a file of the folder, with mode 0600 if new."""
        # O_NOFOLLOW: a symlink planted under the file's name must not redirect a write.
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.descriptor)

    def remove(self, name: str) -> None:
        """Remove a file of the folder, if present."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    @property
    def free_bytes(self) -> int:
        """Free bytes on the folder's file system."""
        file_system = os.fstatvfs(self.descriptor)
        return file_system.f_bavail * file_system.f_frsize

    def close(self) -> None:
        """Remove the folder and all files with names given by this module."""
        with contextlib.suppress(OSError), _alone_in(self._parent):
            _empty(self.descriptor)
            self.path.rmdir()
        os.close(self._lock)
        os.close(self.descriptor)


@contextlib.contextmanager
def _alone_in(spill_dir: Path) -> Iterator[None]:
    """Context in which no other process of hydra-tune creates or sweeps folders in `spill_dir`."""
    descriptor = os.open(spill_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # closing also releases the lock


def _sweep(spill_dir: Path) -> None:
    for entry in os.scandir(spill_dir):
        if _FOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            with contextlib.suppress(OSError):  # gone meanwhile, or not ours to remove: left in place
                # Folders of other users are never touched, whatever their names.
                if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                    _remove_if_stale(Path(entry.path))


def _remove_if_stale(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if is_locked(descriptor):
            return  # the process is alive; a folder without a lock file was left by a crash as the folder was made or emptied
        _empty(descriptor)
    finally:
        os.close(descriptor)
    folder.rmdir()


def _empty(folder: int) -> None:
    names = [name for name in os.listdir(folder) if _FILE.fullmatch(name)]
    for name in (*names, LOCK):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
