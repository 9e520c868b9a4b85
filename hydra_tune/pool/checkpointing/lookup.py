"""Search for existing checkpoints: the facts that a study needs before it resumes a trial.

`HydraExecutor` (`executor.py`) finds and removes checkpoints here when a driver asks by name, such as
`integrations/hydra_tune_optuna/search/resume_study.py`, and checks the path when a job is submitted with `resume_from`
or `warm_start`. The caller waits for pending writes first (`PoolCheckpointWriter.flush`); the functions here do not. For an
isolated pool, the program checks the path without waiting. `remove_or_log` runs on the writer's thread, behind the pending
writes of the trial. The module must not write checkpoints or know the format.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra_tune.checkpoint.files import file_error
from hydra_tune.checkpoint.folder import CheckpointFolder, generations, load_checkpoint
from hydra_tune.checkpoint.lock import is_locked
from hydra_tune.errors import CheckpointError, HydraTuneError
from hydra_tune.train.checkpoint.trial_checkpoint import decoded

_LOGGER = logging.getLogger("hydra_tune.checkpoints")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary:
    """A whole checkpoint.

    Attributes:
        path: the checkpoint's manifest, for `resume_from`.
        labels: as given to `submit`.
        history: metrics of the trial's reports so far, as of `Result.history`.
        epoch: the trial's epoch, from 0.
        steps: optimizer steps done.
        is_in_use: whether a trial of this process or another holds the folder.
    """

    path: Path
    labels: Mapping[str, Any]
    history: list[dict[str, float]]
    epoch: int
    steps: int
    is_in_use: bool


def find_checkpoint(folder: Path) -> CheckpointSummary | None:
    """Return the last whole checkpoint in a trial's folder; None if the folder has no checkpoints.

    Raises:
        CheckpointError: the folder has checkpoints, but none is whole.
    """
    if not generations(folder):
        return None
    content = load_checkpoint(folder)
    state = decoded(content)
    assert content.path is not None
    return CheckpointSummary(
        path=content.path,
        labels=content.labels,
        history=state["history"],
        epoch=state["place"]["epoch"],
        steps=state["progress"]["steps"],
        is_in_use=is_locked(folder),
    )


def check_checkpoint(path: Path) -> Path:
    """Check a path to resume from, without reading the checkpoint.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    if not (generations(path) if path.is_dir() else path.suffix == ".manifest" and path.exists()):
        raise CheckpointError(f"there is no checkpoint at {str(path)!r}; give the folder of a trial in checkpoint_dir")
    return path


def remove_checkpoint(folder: Path) -> None:
    """Remove a trial's folder with all checkpoints, if the folder exists.

    Raises:
        CheckpointError: the trial is running.
        FileError: the system refuses.
    """
    try:
        is_there = folder.is_dir()
    except OSError as error:
        raise file_error("remove", folder, error) from error
    if is_there:
        CheckpointFolder(folder).remove()


def remove_or_log(folder: Path) -> None:
    """Remove a trial's folder like `remove_checkpoint`, but log errors instead of raising."""
    try:
        remove_checkpoint(folder)
    except HydraTuneError as error:
        _LOGGER.warning("Checkpoints that are no longer needed could not be removed: %s", error)
