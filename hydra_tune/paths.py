"""Paths as users give them.

Options that name a file or folder become absolute here before any look at the file system: the event log
(`observe/event_log/writer.py`), `checkpoint_dir` (`pool/checkpointing/writer.py`, and `cli/run/sweep_run.py` and
`cli/dry_run/checking.py` for a sweep file), `spill_dir` (`memory/host/spill_dir.py`), and `weights_dir` of a study
(`integrations/hydra_tune_optuna/weights.py`). So do the folders of `HydraExecutor.submit` and `save_to` (`executor.py`), and
the files of `Result.save` (`train/trained.py`) and `load_module` (`train/checkpoint/weights.py`).
"""

import os
from pathlib import Path


def absolute_path(path: str | os.PathLike[str]) -> Path:
    """Return an absolute path, with a leading tilde as the home folder; symlinks and `..` stay as they are."""
    # Unlike `Path.expanduser`, leaves `~name` as it is where there is no such user.
    return Path(os.path.expanduser(path)).absolute()  # noqa: PTH111
