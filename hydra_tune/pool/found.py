"""Checkpoints that are looked for by whoever goes on with a trial: what a study needs to know before it submits."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra_tune.checkpoint.folder import CheckpointFolder, generations, load_checkpoint
from hydra_tune.checkpoint.lock import is_locked
from hydra_tune.errors import CheckpointError, HydraTuneError
from hydra_tune.train.capture import decoded

_LOGGER = logging.getLogger("hydra_tune.checkpoints")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCheckpoint:
    """A checkpoint that is whole.

    Attributes:
        path: the manifest of it, for `resume_from`.
        labels: as given to `submit`.
        history: of the reports that the trial had made, as of `Result.history`.
        epoch: the epoch it was in, from 0.
        steps: optimizer steps it had done.
        is_in_use: whether the trial is under way, here or in another process.
    """

    path: Path
    labels: Mapping[str, Any]
    history: list[dict[str, float]]
    epoch: int
    steps: int
    is_in_use: bool


def find_checkpoint(folder: Path) -> FoundCheckpoint | None:
    """The last good checkpoint in a trial's folder; None if there is none.

    Raises:
        CheckpointError: there are some, and none is whole.
    """
    if not generations(folder):
        return None
    saved = load_checkpoint(folder)
    state = decoded(saved)
    assert saved.path is not None
    return FoundCheckpoint(
        path=saved.path,
        labels=saved.labels,
        history=state["history"],
        epoch=state["place"]["epoch"],
        steps=state["progress"]["steps"],
        is_in_use=is_locked(folder),
    )


def check_checkpoint(path: Path) -> Path:
    """A path that a job may go on from, without reading what is there.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    if not (generations(path) if path.is_dir() else path.suffix == ".manifest" and path.exists()):
        raise CheckpointError(f"there is no checkpoint at {str(path)!r}; give the folder of a trial in checkpoint_dir")
    return path


def remove_checkpoint(folder: Path) -> None:
    """Remove a trial's folder with all of its checkpoints, if it is there.

    Raises:
        CheckpointError: the trial is under way.
        FileError: the system refuses.
    """
    if folder.is_dir():
        CheckpointFolder(folder).remove()


def remove_or_log(folder: Path) -> None:
    """The same for whoever does not wait."""
    try:
        remove_checkpoint(folder)
    except HydraTuneError as error:
        _LOGGER.warning("Checkpoints that are not needed any more could not be removed: %s", error)
