"""Paths as users give them.

Options that name a file or folder become absolute here before any look at the file system: the event log
(`observe/event_log/writer.py`), `checkpoint_dir` (`pool/checkpointing/writer.py`, and `cli/run/sweep_run.py` and
`cli/dry_run/checking.py` for a sweep file), `spill_dir` (`memory/host/spill_dir.py`), and `weights_dir` of a study
(`integrations/hydra_tune_optuna/weights.py`). So do the folders of `HydraExecutor.submit` and `save_to` (`executor.py`), and
the files of `Result.save` (`train/trained.py`) and `load_module` (`train/checkpoint/weights.py`). The module must not import
torch, so that `hydra-tune list` answers at once.
"""

import os
from contextlib import suppress
from pathlib import Path

from hydra_tune.errors import ConfigError


def absolute_path(path: str | os.PathLike[str]) -> Path:
    """Return an absolute path, with a leading tilde as the home folder; symlinks and `..` stay as they are."""
    # Unlike `Path.expanduser`, leaves `~name` as it is where there is no such user.
    return Path(os.path.expanduser(path)).absolute()  # noqa: PTH111


def option_path(path: object, what: str, kind: str = "a folder") -> Path:
    """Return the absolute path that an option gives.

    Args:
        path: value of the option.
        what: name of the option, for the message.
        kind: the kind of place, for the message.

    Raises:
        ConfigError: no path.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ConfigError(f"{what} must be the path of {kind}, not {path!r}")
    return absolute_path(path)


def check_reachable(path: Path, what: str) -> None:
    """Refuse a path that this user may not follow, or that no file can have; the file or folder may be missing.

    Args:
        path: an absolute path.
        what: name of the option, for the message.

    Raises:
        ConfigError: as said.
    """
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
    except (OSError, ValueError) as error:  # a ValueError for a null byte
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{what} {str(path)!r} cannot be reached: {why}; give another path") from error
