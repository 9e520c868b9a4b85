"""Paths as users give them.

Checks of options such as `event_log` (`observe/event_log/writer.py`) and `checkpoint_dir`
(`pool/checkpointing/writer.py`) make the user's path absolute here, before they look at the file system.
"""

import os
from pathlib import Path


def absolute_path(path: str | os.PathLike[str]) -> Path:
    """Return an absolute path, with a leading tilde as the home folder; symlinks and `..` stay as they are."""
    # Unlike `Path.expanduser`, leaves `~name` as it is where there is no such user.
    return Path(os.path.expanduser(path)).absolute()  # noqa: PTH111
