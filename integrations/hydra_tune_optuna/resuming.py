"""Trials of a study that a dead process has left running, found and gone on with. Knows nothing of how a trial is driven.

Note: whose a trial is. With a `checkpoint_dir`, each search has a file in it that is locked as long as the search lives. It
notes the file's name with each trial in the storage, before or as the trial begins to run: it *claims* the trial. A running
trial all of whose claims are of searches that have died is nobody's, and the next search claims it. Trials without a claim are
of plain Optuna, and trials whose claim is not in this folder are of another one.

Note: where it goes on. Checkpoints are found by the study's name and the trial's number, and are the trial's own if parameters
and start agree: a study of that name may have been deleted and made again. A trial without one was killed before its first, or
before it had trained at all, and begins anew under its number.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.logging import get_logger
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from hydra_tune import HydraExecutor
from hydra_tune.checkpoint.alive import LifeSign, alone, has_died
from hydra_tune.checkpoint.alive import forget as forget_sign
from hydra_tune.errors import CheckpointError, HydraTuneError
from hydra_tune.pool.found import FoundCheckpoint
from hydra_tune_optuna import private

_SEARCHES = ".searches"  # no trial's folder begins with a point
_CLAIM = "hydra_tune:search:"

_logger = get_logger("optuna.hydra_tune")


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A trial that is to be gone on with.

    Attributes:
        frozen: as the storage has it.
        checkpoint: its last one; None: it begins anew.
        is_told: whether it is complete, and only its weights are wanted.
    """

    frozen: FrozenTrial
    checkpoint: FoundCheckpoint | None
    is_told: bool = False


class Resuming:
    """One search among those that share a study.

    Args:
        study: whose trials.
        pool: has the checkpoints; without a `checkpoint_dir` nothing is found, claimed or saved.

    Attributes:
        saves: whether the pool has a `checkpoint_dir`.
    """

    def __init__(self, study: Study, pool: HydraExecutor) -> None:
        self._study = study
        self._pool = pool
        self.saves = getattr(pool, "checkpoint_dir", None) is not None  # other pools than ours have none
        self._sign: LifeSign | None = None

    def begin(self, is_wanted: Callable[[FrozenTrial], bool]) -> list[Left]:
        """Be a search that lives.

        Args:
            is_wanted: whether the weights of a completed trial are to be got from its checkpoint.

        Returns:
            The running trials that nobody runs, by number, which are this search's now; before them, those of which the
            weights are wanted.

        Raises:
            FileError: the folder of checkpoints cannot be written to.
        """
        if not self.saves:
            return []
        self._sign = LifeSign(self._folder)
        with alone(self._folder):
            found = self.left()
            dead = {name for left in found for name in _claims(left.frozen)}
            for left in found:
                self._claim(left.frozen)
            for name in dead - {n for frozen in private.running(self._study) for n in _claims(frozen)}:
                forget_sign(self._folder, name)
        return [*self._told(is_wanted), *found]

    def left(self) -> list[Left]:
        """The running trials that nobody runs, by number; none of them is claimed by this."""
        if not self.saves:
            return []
        found = [left for frozen in private.running(self._study) if (left := self._left(frozen)) is not None]
        return sorted(found, key=lambda left: left.frozen.number)

    def close(self, *, leaves: bool) -> None:
        """The search is over.

        Args:
            leaves: whether trials of it are still running, as the storage has it.
        """
        if self._sign is None:
            return
        try:
            self._sign.close(leaves=leaves)
        except HydraTuneError as error:
            _logger.warning("The search is over, and what says that it lives could not be removed: %s", error)

    def ask(self) -> Trial:
        """A new trial, which is this search's."""
        return private.ask(self._study, None if self._sign is None else _CLAIM + self._sign.name)

    def submit_options(self, trial: Trial, left: Left | None) -> tuple[dict[str, Any], frozenset[int]]:
        """What `submit` is told so that a trial's checkpoints are found again, and that it goes on from one.

        Returns:
            Arguments of `submit`, and the steps of which the storage has reports already.
        """
        if not self.saves:
            return {}, frozenset()  # and the storage is not asked either
        frozen = private.stored(self._study, trial)
        name, known = self._saved_as(frozen.number), frozenset(frozen.intermediate_values)
        options = {"saved_as": name, "labels": labels(self._study, frozen)}
        if left is not None and left.checkpoint is not None:
            return options | {"resume_from": left.checkpoint.path}, known
        with contextlib.suppress(
            CheckpointError
        ):  # of a study that is under way elsewhere; this one's have another folder
            self._pool.remove_checkpoint(name)
        return options, known

    def has_checkpoint(self, number: int) -> bool:
        """Whether a trial of the study can be gone on with from where it was."""
        return self.saves and self._pool.has_checkpoint(self._saved_as(number))

    def forget(self, number: int) -> None:
        """A trial has been told, and will not be gone on with."""
        if self.saves:
            self._pool.remove_checkpoint(self._saved_as(number), waits=False)

    def _left(self, frozen: FrozenTrial) -> Left | None:
        """A running trial as one to go on with; None if it is somebody's, or may be."""
        claims = _claims(frozen)
        if not all(has_died(self._folder, name) for name in claims):
            return None
        try:
            checkpoint = self._pool.find_checkpoint(self._saved_as(frozen.number))
        except HydraTuneError as error:
            _logger.warning(
                "Trial %d cannot be gone on with: %s; remove its checkpoints, and it begins anew", frozen.number, error
            )
            return None
        is_own = checkpoint is not None and checkpoint.labels == labels(self._study, frozen)
        if is_own and checkpoint is not None and checkpoint.is_in_use:
            return None
        if not is_own and not claims:
            return None
        return Left(frozen=frozen, checkpoint=checkpoint if is_own else None)

    def _claim(self, frozen: FrozenTrial) -> None:
        """Have a trial be this search's, and no longer those' that have died."""
        assert self._sign is not None
        private.note(self._study, frozen, _CLAIM + self._sign.name, value=True)
        for name in _claims(frozen):
            private.note(self._study, frozen, _CLAIM + name, value=False)

    def _told(self, is_wanted: Callable[[FrozenTrial], bool]) -> list[Left]:
        """Trials that were told, and whose process died before their weights were kept; checkpoints of others go."""
        wanted = []
        for frozen in private.ended(self._study, (TrialState.COMPLETE, TrialState.PRUNED)):
            try:
                checkpoint = self._pool.find_checkpoint(self._saved_as(frozen.number))
            except HydraTuneError:
                continue  # damaged: nothing can be got from it
            if checkpoint is None or checkpoint.is_in_use or checkpoint.labels != labels(self._study, frozen):
                continue
            if frozen.state == TrialState.COMPLETE and is_wanted(frozen):
                wanted.append(Left(frozen=frozen, checkpoint=checkpoint, is_told=True))
            else:
                self.forget(frozen.number)
        return wanted

    @property
    def _folder(self) -> Path:
        assert self._pool.checkpoint_dir is not None
        return self._pool.checkpoint_dir / _SEARCHES

    def _saved_as(self, number: int) -> str:
        """What the checkpoints of the study's trial are found by."""
        return f"{self._study.study_name}/{number}"


def _claims(frozen: FrozenTrial) -> list[str]:
    """The searches that have claimed a trial."""
    noted: Iterator[tuple[str, Any]] = iter(frozen.system_attrs.items())
    return [key.removeprefix(_CLAIM) for key, value in noted if key.startswith(_CLAIM) and value]


def labels(study: Study, frozen: FrozenTrial) -> dict[str, Any]:
    """What tells a trial from others of the same number."""
    started = frozen.datetime_start
    return {
        "study": study.study_name,
        "trial": frozen.number,
        "params": {name: repr(value) for name, value in frozen.params.items()},
        "started": None if started is None else started.isoformat(),
    }
