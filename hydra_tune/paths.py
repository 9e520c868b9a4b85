"""Paths as users give them."""

import os
from pathlib import Path


def absolute_path(path: str | os.PathLike[str]) -> Path:
    """Return an absolute path, with a leading tilde as the home folder; symlinks and `..` stay as they are."""
    # Unlike `Path.expanduser`, leaves `~name` as it is where there is no such user.
    return Path(os.path.expanduser(path)).absolute()  # noqa: PTH111
