"""The lock of a folder, which the system lets go of when the process that holds it ends, however it ends.

It is `flock` on the file `lock` in the folder, so there is nothing stale to be told from what is in use: what a dead process
has locked is free. A process that was forked from the holder's holds it as well, as long as it lives.
"""

import fcntl
import os
import time
from pathlib import Path

LOCK = "lock"
"""The file's name in the folder."""

_ATTEMPTS, _PAUSE_SECONDS = 5, 0.01


def take_lock(folder: Path | int) -> int | None:
    """Have a folder to oneself, in this process, too.

    Args:
        folder: its path, or its descriptor.

    Returns:
        What is to be closed, by `os.close`, when others may have the folder; None if another has it.

    Raises:
        OSError: the lock's file cannot be made.
    """
    descriptor = _opened(folder, os.O_RDWR | os.O_CREAT)
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE_SECONDS)  # whoever asks `is_locked` has it for a moment
        if try_lock(descriptor):
            return descriptor
    os.close(descriptor)
    return None


def is_locked(folder: Path | int) -> bool:
    """Whether somebody has a folder, here or in another process; a folder without a lock's file nobody has.

    Args:
        folder: its path, or its descriptor.

    Raises:
        OSError: the lock's file is there and cannot be opened.
    """
    try:
        descriptor = _opened(folder, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)


def _opened(folder: Path | int, flags: int) -> int:
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC
    if isinstance(folder, int):
        return os.open(LOCK, flags, 0o600, dir_fd=folder)
    return os.open(folder / LOCK, flags, 0o600)


def try_lock(descriptor: int) -> bool:
    """Lock an open file, if nobody has it; whether that is done.

    Raises:
        OSError: the system has no locks there.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
