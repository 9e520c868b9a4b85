"""Paths as users give them.

Whoever takes a path from a user makes the path absolute here before any look at the file system: the event log's
writer (`observe/event_log/writer.py`), the folders of checkpoints and of spilled blocks, `hydra-tune sweep`, and
`load_module` of a study.
"""

import os
from pathlib import Path


def absolute_path(path: str | os.PathLike[str]) -> Path:
    """Return an absolute path, with a leading tilde as the home folder; symlinks and `..` stay as they are."""
    # Unlike `Path.expanduser`, leaves `~name` as it is where there is no such user.
    return Path(os.path.expanduser(path)).absolute()  # noqa: PTH111
