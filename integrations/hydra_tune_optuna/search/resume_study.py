"""Finds trials left running by a dead process, for a new search to resume.

`OptimizeDriver` (`driver.py`) claims the found trials by `StudyResumer.begin` at the start of each search, asks for new
trials through `ask`, and takes the options of each submit. `resume_sweep.py` lists the found trials before a sweep, without
claiming any; `checkpoint_gc.py` removes checkpoints here, and `shutdown.py` asks whether a trial has one.

Note: ownership. With a `checkpoint_dir`, each search keeps a locked file there for as long as the search lives. The search
*claims* a trial by writing the file's name into the trial's storage record, before or as the trial begins to run. A running
trial is ownerless when all its claims are by dead searches and no living job uses its checkpoint, and the next search claims
the trial. Trials with neither a claim nor a checkpoint here belong to plain Optuna, and trials with a claim unknown to this
folder belong to another folder.

Note: studies. Beside the searches' files the folder notes the identity and the storage of each study, unless the study is
in memory. A study of the same name in another storage is refused, because each of the two would remove the checkpoints of the
other. A study that was deleted and made anew in its storage, or moved with its storage, takes the folder over.

Note: checkpoints. Checkpoints are found by study name and trial number, and must agree with the trial in parameters and
start time, because a study may have been deleted and recreated under its name. A trial without a checkpoint was killed
before its first, or before any training, and begins anew under its number.
"""

import contextlib
import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.logging import get_logger
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from hydra_tune import HydraExecutor
from hydra_tune.checkpoint.alive import LivenessFile, alone, has_died
from hydra_tune.checkpoint.alive import forget as forget_sign
from hydra_tune.checkpoint.files import file_error, write_file
from hydra_tune.checkpoint.naming import folder_name
from hydra_tune.errors import CheckpointError, HydraTuneError
from hydra_tune.pool.checkpointing.lookup import CheckpointSummary
from hydra_tune_optuna import optuna_internals

_SEARCHES = ".searches"  # no trial's folder begins with a dot
_CLAIM = "hydra_tune:search:"
_IDENTITY = "hydra_tune:identity"  # of a study, in its storage

_logger = get_logger("optuna.hydra_tune")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumableTrial:
    """A trial to resume.

    Attributes:
        frozen: the storage's record.
        checkpoint: last checkpoint; None: the trial begins anew.
        is_told: whether the trial is complete, and only its weights are missing.
    """

    frozen: FrozenTrial
    checkpoint: CheckpointSummary | None
    is_told: bool = False


class StudyResumer:
    """The resuming side of one search among several that may share a study.

    Attributes:
        saves: whether the pool has a `checkpoint_dir`; otherwise nothing is found, claimed or saved.
    """

    def __init__(self, study: Study, pool: HydraExecutor) -> None:
        self._study = study
        self._pool = pool
        # Pools of other libraries have no checkpoint_dir.
        self.saves = getattr(pool, "checkpoint_dir", None) is not None
        self._sign: LivenessFile | None = None

    def begin(self, is_wanted: Callable[[FrozenTrial], bool]) -> list[ResumableTrial]:
        """Register this search as alive, and claim the trials of dead searches.

        Args:
            is_wanted: whether a completed trial's weights should be recovered from its checkpoint.

        Returns:
            Completed trials with weights to recover; then the ownerless running trials, by number.

        Raises:
            CheckpointError: the folder has the checkpoints of a study of this name in another storage.
            FileError: the folder of checkpoints cannot be written to.
        """
        if not self.saves:
            return []
        self._sign = LivenessFile(self._folder)
        # Alone: two searches that start at once must not claim the same trials.
        with alone(self._folder):
            self._take_folder()
            ownerless = self.left()
            dead_searches = {name for resumable in ownerless for name in _claims(resumable.frozen)}
            for resumable in ownerless:
                self._claim(resumable.frozen)
            # Only forget a dead search once no running trial refers to it: a forgotten name counts as foreign.
            for name in dead_searches - {
                n for frozen in optuna_internals.running(self._study) for n in _claims(frozen)
            }:
                forget_sign(self._folder, name)
        return [*self._told(is_wanted), *ownerless]

    def _take_folder(self) -> None:
        """Note that the folder is this study's, unless the folder is that of a study of this name in another storage."""
        name, storage = self._study.study_name, optuna_internals.storage_place(self._study)
        path = self._folder / f"{folder_name(name)}.json"
        noted, identity = _noted(path), optuna_internals.study_attributes(self._study).get(_IDENTITY)
        place = noted.get("storage")
        # A copy of a storage has the studies' identities, too. A storage that was moved has left its place.
        is_moved = identity is not None and identity == noted.get("identity") and not Path(str(place)).exists()
        if place not in (None, storage) and not is_moved:
            raise CheckpointError(
                f"{str(self._pool.checkpoint_dir)!r} has the checkpoints of another study {name!r}, in {place}, and this "
                f"study is in {storage or 'memory'}; give one of the two another checkpoint_dir or name, or, if the other "
                f"study is gone, remove {str(path)!r}"
            )
        if storage is None:  # a study in memory ends with its process, and loses no checkpoint to a later study
            return
        if identity is None:
            identity = uuid.uuid4().hex
            optuna_internals.set_study_attribute(self._study, _IDENTITY, identity)
        own = {"identity": identity, "storage": storage}
        if noted != own:
            write_file(path, json.dumps(own).encode())

    def left(self) -> list[ResumableTrial]:
        """Find the ownerless running trials, sorted by number, without claiming any."""
        if not self.saves:
            return []
        ownerless = [
            resumable
            for frozen in optuna_internals.running(self._study)
            if (resumable := self._left(frozen)) is not None
        ]
        return sorted(ownerless, key=lambda resumable: resumable.frozen.number)

    def close(self, *, leaves: bool) -> None:
        """End this search's registration.

        Args:
            leaves: whether the storage still lists trials of this search as running.
        """
        if self._sign is None:
            return
        try:
            self._sign.close(leaves=leaves)
        except HydraTuneError as error:
            _logger.warning("The search is over, but its liveness file could not be removed: %s", error)

    def ask(self) -> Trial:
        """Ask for a new trial, claimed by this search."""
        return optuna_internals.ask(self._study, None if self._sign is None else _CLAIM + self._sign.name)

    def submit_options(self, trial: Trial, left: ResumableTrial | None) -> tuple[dict[str, Any], frozenset[int]]:
        """Make the `submit` options under which a trial's checkpoints are found again, and from which a trial resumes.

        Returns:
            Arguments of `submit`, and the steps already reported to the storage.
        """
        if not self.saves:
            return {}, frozenset()  # without asking the storage
        frozen = optuna_internals.stored(self._study, trial)
        name, known_steps = self._saved_as(frozen.number), frozenset(frozen.intermediate_values)
        # The labels are compared when a later search finds the checkpoint.
        options = {"saved_as": name, "labels": labels(self._study, frozen)}
        if left is not None and left.checkpoint is not None:
            return options | {"resume_from": left.checkpoint.path}, known_steps
        with contextlib.suppress(
            CheckpointError
        ):  # of a study that runs elsewhere; this study's checkpoints have another folder
            # An old checkpoint under this name must not be taken for the new trial's.
            self._pool.remove_checkpoint(name)
        return options, known_steps

    def has_checkpoint(self, number: int) -> bool:
        """Whether a trial of the study can resume from a checkpoint."""
        return self.saves and self._pool.has_checkpoint(self._saved_as(number))

    def forget(self, number: int) -> None:
        """Remove the checkpoints of a trial that was told and will not resume."""
        if self.saves:
            self._pool.remove_checkpoint(self._saved_as(number), waits=False)

    def _left(self, frozen: FrozenTrial) -> ResumableTrial | None:
        """Make a running trial resumable; None for a trial that may have an owner."""
        claims = _claims(frozen)
        # A claim by a living search, or by a search of another folder, which cannot be asked whether it lives.
        if not all(has_died(self._folder, name) for name in claims):
            return None
        try:
            checkpoint = self._pool.find_checkpoint(self._saved_as(frozen.number))
        except HydraTuneError as error:
            _logger.warning(
                "Trial %d cannot be resumed: %s; remove its checkpoints to begin the trial anew", frozen.number, error
            )
            return None
        # The same study name and number do not suffice: the study may have been deleted and made anew.
        is_own = checkpoint is not None and checkpoint.labels == labels(self._study, frozen)
        if is_own and checkpoint is not None and checkpoint.is_in_use:
            return None
        # Without a claim and without a checkpoint of ours, the trial belongs to plain Optuna.
        if not is_own and not claims:
            return None
        return ResumableTrial(frozen=frozen, checkpoint=checkpoint if is_own else None)

    def _claim(self, frozen: FrozenTrial) -> None:
        """Claim a trial for this search, and cancel the claims of dead searches."""
        assert self._sign is not None
        # The new claim comes first: killed in between, the trial has two claims, never none.
        optuna_internals.note(self._study, frozen, _CLAIM + self._sign.name, value=True)
        for name in _claims(frozen):
            optuna_internals.note(self._study, frozen, _CLAIM + name, value=False)

    def _told(self, is_wanted: Callable[[FrozenTrial], bool]) -> list[ResumableTrial]:
        """Find completed trials that lack kept weights after a crash.

        The checkpoints of other completed trials, and of pruned trials, are removed; checkpoints of failed trials stay.
        """
        recoverable = []
        for frozen in optuna_internals.ended(self._study, (TrialState.COMPLETE, TrialState.PRUNED)):
            try:
                checkpoint = self._pool.find_checkpoint(self._saved_as(frozen.number))
            except HydraTuneError:
                continue  # damaged: nothing to recover
            # Nothing to do, another process's business, or another study of the same name.
            if checkpoint is None or checkpoint.is_in_use or checkpoint.labels != labels(self._study, frozen):
                continue
            if frozen.state == TrialState.COMPLETE and is_wanted(frozen):
                recoverable.append(ResumableTrial(frozen=frozen, checkpoint=checkpoint, is_told=True))
            else:
                self.forget(frozen.number)
        return recoverable

    @property
    def _folder(self) -> Path:
        assert self._pool.checkpoint_dir is not None
        return self._pool.checkpoint_dir / _SEARCHES

    def _saved_as(self, number: int) -> str:
        return f"{self._study.study_name}/{number}"


def _noted(path: Path) -> dict[str, Any]:
    try:
        noted = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise file_error("read", path, error) from error
    except ValueError as error:
        raise CheckpointError(f"{str(path)!r} is damaged: {error}; remove it to continue without it") from error
    return noted if isinstance(noted, dict) else {}


def _claims(frozen: FrozenTrial) -> list[str]:
    """Names of the searches that claim a trial."""
    attributes: Iterator[tuple[str, Any]] = iter(frozen.system_attrs.items())
    return [key.removeprefix(_CLAIM) for key, value in attributes if key.startswith(_CLAIM) and value]


def labels(study: Study, frozen: FrozenTrial) -> dict[str, Any]:
    """Facts that tell a trial from other trials with the same number."""
    started = frozen.datetime_start
    return {
        "study": study.study_name,
        "trial": frozen.number,
        "params": {name: repr(value) for name, value in frozen.params.items()},
        "started": None if started is None else started.isoformat(),
    }
