"""Trials of a study that a dead process has left running, found by their checkpoints and gone on with.

A trial's checkpoints are found by the study's name and the trial's number, and are its own if parameters and start agree: a
study of that name may have been deleted and made again. Knows nothing of how a trial is driven.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

from optuna.logging import get_logger
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial

from hydra_tune import HydraExecutor
from hydra_tune.errors import CheckpointError, HydraTuneError
from hydra_tune.pool.found import FoundCheckpoint
from hydra_tune_optuna import private

_logger = get_logger("optuna.hydra_tune")


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A trial that can be gone on with.

    Attributes:
        frozen: as the storage has it.
        checkpoint: its last one.
    """

    frozen: FrozenTrial
    checkpoint: FoundCheckpoint


def find_left(study: Study, pool: HydraExecutor) -> list[Left]:
    """The running trials that nobody runs and that have checkpoints, by number.

    Args:
        study: whose trials.
        pool: has the checkpoints.
    """
    if not saves(pool):
        return []
    found = []
    for frozen in private.running(study):
        try:
            checkpoint = pool.find_checkpoint(saved_as(study, frozen.number))
        except HydraTuneError as error:
            _logger.warning("Trial %d cannot be gone on with: %s", frozen.number, error)
            continue
        if checkpoint is None or checkpoint.is_in_use or checkpoint.labels != labels(study, frozen):
            continue
        found.append(Left(frozen=frozen, checkpoint=checkpoint))
    return sorted(found, key=lambda left: left.frozen.number)


def saves(pool: HydraExecutor) -> bool:
    """Whether a pool saves its trials; others than ours do not."""
    return getattr(pool, "checkpoint_dir", None) is not None


def submit_options(
    study: Study, pool: HydraExecutor, trial: Trial, left: Left | None
) -> tuple[dict[str, Any], frozenset[int]]:
    """What `submit` is told so that a trial's checkpoints are found again, and that it goes on from one.

    Returns:
        Arguments of `submit`, and the steps of which the storage has reports already.
    """
    if not saves(pool):
        return {}, frozenset()  # and the storage is not asked either
    frozen = private.stored(study, trial)
    name, known = saved_as(study, frozen.number), frozenset(frozen.intermediate_values)
    options: dict[str, Any] = {"saved_as": name, "labels": labels(study, frozen)}
    if left is not None:
        return options | {"resume_from": left.checkpoint.path}, known
    with contextlib.suppress(CheckpointError):  # of a study that is under way elsewhere; this one's have another folder
        pool.remove_checkpoint(name)
    return options, known


def is_under_way(study: Study, pool: HydraExecutor, number: int) -> bool:
    """Whether somebody trains a trial now, with its checkpoints in the pool's folder."""
    return pool.is_under_way(saved_as(study, number))


def forget(study: Study, pool: HydraExecutor, number: int) -> None:
    """A trial has been told, and will not be gone on with."""
    if saves(pool):
        pool.remove_checkpoint(saved_as(study, number), waits=False)


def saved_as(study: Study, number: int) -> str:
    """What the checkpoints of a study's trial are found by."""
    return f"{study.study_name}/{number}"


def labels(study: Study, frozen: FrozenTrial) -> dict[str, Any]:
    """What tells a trial from others of the same number."""
    started = frozen.datetime_start
    return {
        "study": study.study_name,
        "trial": frozen.number,
        "params": {name: repr(value) for name, value in frozen.params.items()},
        "started": None if started is None else started.isoformat(),
    }
