"""The lock of a folder; the system releases the lock when the holder ends, however the process ends.

The lock is `flock` on the file `lock` in the folder, so no lock is ever stale: the lock of a dead process is free. A
process that was forked from the holder holds the lock as well, as long as it lives. `CheckpointFolder` (`folder.py`),
`SweepFolder` (`sweep_folder.py`) and `SpillFolder` (`memory/host/spill_dir.py`) take the lock when they open their
folder, and hold the lock until `close`. `check_free` (`sweep_folder.py`), `pool/checkpointing/lookup.py`,
`pool/checkpointing/writer.py` and `cli/inspect/run_scan.py` only ask (`is_locked`), and `SpillFolder` asks about the
folders of others; `alive.py` tries the lock of a file of its own (`try_lock`). The module must not import torch, because
`hydra-tune list` asks for locks without torch.
"""

import fcntl
import os
import time
from pathlib import Path

LOCK = "lock"
"""Name of the lock file in the folder."""

_ATTEMPTS, _PAUSE_SECONDS = 5, 0.01


class LockedFolder:
    """Holds the lock of a folder until `close`."""

    _lock: int

    def close(self) -> None:
        """Release the folder for others. May be called again."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def take_lock(folder: Path | int) -> int | None:
    """Lock a folder exclusively, against other holders in this process, too.

    Args:
        folder: path of the folder, or its descriptor.

    Returns:
        A descriptor; `os.close` releases the lock. None if another holder has the lock.

    Raises:
        OSError: the lock file cannot be created, or the file system has no locks.
    """
    for attempt in range(_ATTEMPTS):
        if attempt:
            # `is_locked` in another process takes the lock for a moment.
            time.sleep(_PAUSE_SECONDS)
        # Opened at each attempt, because a holder may remove the file with the folder.
        descriptor = _opened(folder, os.O_RDWR | os.O_CREAT)
        try:
            if try_lock(descriptor) and _is_there(folder, descriptor):
                return descriptor
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
    return None


def is_locked(folder: Path | int) -> bool:
    """Whether a folder is locked, here or in another process; a folder without a lock file is not.

    Args:
        folder: path of the folder, or its descriptor.

    Raises:
        OSError: the lock file exists and cannot be opened, or the file system has no locks.
    """
    try:
        descriptor = _opened(folder, os.O_RDWR)
    except FileNotFoundError:
        return False
    # Closing the descriptor below releases the lock that the test has taken.
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)


def _opened(folder: Path | int, flags: int) -> int:
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC
    if isinstance(folder, int):
        return os.open(LOCK, flags, 0o600, dir_fd=folder)
    return os.open(folder / LOCK, flags, 0o600)


def _is_there(folder: Path | int, descriptor: int) -> bool:
    """Whether an open lock file is the folder's still: others would not meet the lock of a removed file."""
    place = (LOCK, folder) if isinstance(folder, int) else (folder / LOCK, None)
    try:
        found = os.stat(place[0], dir_fd=place[1], follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), found)


def try_lock(descriptor: int) -> bool:
    """Lock an open file if no other holder has the lock; return whether the file is locked now.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
