"""The weights of a study's best trials: which are kept, where, and how a trial leads to its trained module.

Note: where. In `weights_dir` each study has a folder of its own, whose name it keeps in its storage, with the place. So
studies of one name do not meet, and any process that can open the study finds the weights. A folder that was moved is found
with `weights_dir=`.
"""

import copy
import json
import os
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState
from torch import nn

from hydra_tune import TrainTask
from hydra_tune.checkpoint.best import BestWeights, Values, kept_trials, weights_file
from hydra_tune.errors import ConfigError, WeightsError
from hydra_tune.train.weights import load_module as load_task_module
from hydra_tune_optuna import private

KeepBest = int | Literal["pareto"]
Build = Callable[[Any], Any]
"""The objective: takes a trial, also one that has ended, and returns its task."""

DEFAULT_DIR = "weights"
_ATTRIBUTE = "hydra_tune:weights:"
_NUM_NAMED = 10


def check_keeping(
    keep_best: object, weights_dir: object, *, num_objectives: int | None = None, has_executor: bool = True
) -> None:
    """Refuse options that make no sense.

    Args:
        keep_best: how many trials' weights are kept.
        weights_dir: where.
        num_objectives: of the study; None where that is not known yet.
        has_executor: whether anything is trained.

    Raises:
        ConfigError: one of them, by name.
    """
    if keep_best is None:
        if weights_dir is not None:
            raise ConfigError("weights_dir is where weights are kept, and none are; give keep_best=1 or more as well")
        return
    if not has_executor:
        raise ConfigError("keep_best keeps what a pool has trained; give executor=HydraExecutor() as well")
    is_count = isinstance(keep_best, int) and not isinstance(keep_best, bool) and keep_best >= 1
    if not is_count and keep_best != "pareto":
        raise ConfigError(f"keep_best must be a whole number of at least 1, or 'pareto', not {keep_best!r}")
    if is_count and num_objectives is not None and num_objectives > 1:
        raise ConfigError(
            f"keep_best={keep_best} needs one objective, and there are {num_objectives}, by which trials have no order; use "
            f"keep_best='pareto', which keeps all of study.best_trials"
        )
    if weights_dir is not None:
        _check_dir(weights_dir)


def _check_dir(path: object) -> None:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ConfigError(f"weights_dir must be the path of a folder, not {path!r}")
    there = Path(os.fspath(path)).absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise ConfigError(f"weights_dir {os.fspath(path)!r} cannot be made: {str(there)!r} is a file; give a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(
            f"weights_dir {os.fspath(path)!r} cannot be written by this user; give one that is yours to write"
        )


class StudyWeights:
    """The best weights of one study, while it is searched.

    Args:
        study: the study.
        keep_best: how many trials, or "pareto".
        weights_dir: where; None for "weights".
        tell: is told, in the thread of the search, what could not be kept.
    """

    def __init__(
        self,
        study: Study,
        keep_best: KeepBest,
        weights_dir: str | os.PathLike[str] | None,
        tell: Callable[[str], None],
    ) -> None:
        self._study = study
        self._tell = tell
        self._choose = _Pareto(study.directions) if keep_best == "pareto" else _Best(study.directions[0], keep_best)
        self._files = BestWeights(_own_folder(study, weights_dir or DEFAULT_DIR), self._choose)

    def completed(self, trial: FrozenTrial, task: TrainTask, result: Any) -> None:
        """A trial has completed, and the storage knows; its weights are kept if it is among the best.

        Args:
            trial: as the storage has it. One that violates a constraint is not kept.
            task: what was trained.
            result: of the job.
        """
        if trial.state != TrialState.COMPLETE or private.violates_constraints(trial):
            return
        if isinstance(self._choose, _Best):
            self._choose.favourite = self._study.best_trial.number
        metadata = {
            "study": self._study.study_name,
            "trial": str(trial.number),
            "params": json.dumps(trial.params, default=str),
            "metrics": json.dumps(task.metrics),
        }
        try:
            self._files.offer(trial.number, tuple(trial.values), result.state_dict, metadata)
        except Exception as error:  # noqa: BLE001 - the user's own state_dict() may raise anything; the search goes on
            self.say_lost(trial.number, f"{type(error).__name__}: {error}")
        self._say_failures()

    def lacks(self, trial: FrozenTrial) -> bool:
        """Whether a trial that has completed is among the best, and its weights are not kept, as after a crash."""
        if private.violates_constraints(trial):
            return False
        there = kept_trials(self._files.folder)
        return trial.number not in there and trial.number in self._choose({**there, trial.number: tuple(trial.values)})

    def is_settled(self, number: int) -> bool:
        """Whether weights that were offered are written, or will not be."""
        return not self._files.is_waiting(number)

    def flush(self) -> None:
        """Wait until everything is written or has failed."""
        self._files.flush()

    def close(self) -> None:
        """Write what waits."""
        self._files.close()
        self._say_failures()

    def _say_failures(self) -> None:
        for number, why in self._files.failures():
            self.say_lost(number, why)

    def say_lost(self, number: int, why: str) -> None:
        """Tell of weights that are not kept."""
        self._tell(f"The weights of trial {number} are not kept: {why}")


class _Best:
    """The k best by value; of equal ones that which the study calls its best, then the older.

    Attributes:
        favourite: the study's best trial; storages differ in which they name of equal ones.
    """

    def __init__(self, direction: StudyDirection, count: int) -> None:
        self._sign = -1.0 if direction == StudyDirection.MAXIMIZE else 1.0
        self._count = count
        self.favourite: int | None = None

    def rank(self, number: int, values: Values) -> tuple[float, bool, int]:
        """The smaller, the better."""
        return self._sign * values[0], number != self.favourite, number

    def __call__(self, trials: Mapping[int, Values]) -> frozenset[int]:
        ranked = sorted(trials, key=lambda number: self.rank(number, trials[number]))
        return frozenset(ranked[: self._count])


class _Pareto:
    """Those that no other is at least as good as in everything, and better than in something."""

    def __init__(self, directions: Sequence[StudyDirection]) -> None:
        self._signs = [-1.0 if direction == StudyDirection.MAXIMIZE else 1.0 for direction in directions]

    def __call__(self, trials: Mapping[int, Values]) -> frozenset[int]:
        losses = {number: self._losses(values) for number, values in trials.items()}
        return frozenset(
            number for number, mine in losses.items() if not any(_dominates(other, mine) for other in losses.values())
        )

    def _losses(self, values: Values) -> Values:
        return tuple(sign * value for sign, value in zip(self._signs, values, strict=True))


def _dominates(first: Values, second: Values) -> bool:
    return first != second and all(mine <= other for mine, other in zip(first, second, strict=True))


def _own_folder(study: Study, weights_dir: str | os.PathLike[str]) -> Path:
    """The study's folder in `weights_dir`; noted in the storage, where it is not yet."""
    place = Path(os.fspath(weights_dir)).absolute()
    if not any(folder.parent == place for folder in _folders(study)):
        name = re.sub(r"[^\w.-]+", "-", study.study_name).strip("-.")[:60] or "study"
        private.set_study_attribute(study, f"{_ATTRIBUTE}{name}-{uuid.uuid4().hex[:8]}", str(place))
    # Two processes may have noted one each at the same moment; both take the first.
    return next(folder for folder in _folders(study) if folder.parent == place)


def _folders(study: Study, weights_dir: str | os.PathLike[str] | None = None) -> list[Path]:
    """All folders that the study has weights in, by name, where they were made; then the same in `weights_dir`."""
    noted = sorted(
        (key.removeprefix(_ATTRIBUTE), place)
        for key, place in private.study_attributes(study).items()
        if key.startswith(_ATTRIBUTE)
    )
    places = [Path(place) / name for name, place in noted]
    moved = [] if weights_dir is None else [Path(weights_dir).absolute() / name for name, _ in noted]
    return list(dict.fromkeys([*places, *moved]))


def kept_weights(study: Study, weights_dir: str | os.PathLike[str] | None = None) -> dict[int, Path]:
    """The files of a study's weights, by the numbers of its trials, the best first where there is one objective.

    Args:
        study: any study that was searched with `keep_best`, also one that plain Optuna has loaded.
        weights_dir: where the study's folder is now, if it was moved.

    Raises:
        FileError: a folder cannot be read.
    """
    found: dict[int, tuple[Values, Path]] = {}
    for folder in _folders(study, weights_dir):
        for number, values in kept_trials(folder).items():
            found.setdefault(number, (values, weights_file(folder, number)))
    rank = _Best(study.directions[0], 1).rank
    one = len(study.directions) == 1
    order = sorted(found, key=lambda number: (rank(number, found[number][0]) if one else (), number))
    return {number: found[number][1] for number in order}


def weights_path(
    study: Study, trial: FrozenTrial | int | None = None, *, weights_dir: str | os.PathLike[str] | None = None
) -> Path:
    """The file of a trial's weights, safetensors of the module's `state_dict()`.

    Args:
        study: as in `kept_weights`.
        trial: the trial, or its number; None for `study.best_trial`.
        weights_dir: where the study's folder is now, if it was moved.

    Raises:
        WeightsError: they are not kept; the message says which are.
        ValueError: the study has no best trial.
    """
    return _path_of(study, _frozen(study, trial), weights_dir)


def load_module(
    study: Study,
    trial: FrozenTrial | int | None,
    build: Build,
    *,
    weights_dir: str | os.PathLike[str] | None = None,
) -> nn.Module:
    """The trained module of a trial, built by its task's factory, with the weights that were kept.

    Args:
        study: as in `kept_weights`.
        trial: the trial, or its number; None for `study.best_trial`.
        build: the objective that was searched with: called with the trial as it has ended, whose `suggest_` methods return
            what was drawn.
        weights_dir: where the study's folder is now, if it was moved.

    Returns:
        The module on the host, in the mode its factory leaves it in, which for most is that of training; call `.eval()`.

    Raises:
        WeightsError: the weights are not kept, do not fit what `build` makes, or `build` returns no task.
        FileError: the file cannot be read, or is damaged.
        ValueError: the study has no best trial, or `build` draws what the trial has not drawn.
    """
    frozen = _frozen(study, trial)
    path = _path_of(study, frozen, weights_dir)
    task = build(copy.deepcopy(frozen))
    if not isinstance(task, TrainTask):
        raise WeightsError(
            f"build returned {type(task).__name__} for trial {frozen.number}, not a TrainTask; give the objective that the "
            f"study was searched with"
        )
    return load_task_module(task, path)


def _frozen(study: Study, trial: FrozenTrial | int | None) -> FrozenTrial:
    if trial is None:
        return study.best_trial
    if isinstance(trial, FrozenTrial):
        return trial
    trials = study.get_trials(deepcopy=False)
    if isinstance(trial, bool) or not isinstance(trial, int) or not 0 <= trial < len(trials):
        raise WeightsError(
            f"there is no trial {trial!r} in study {study.study_name!r}; it has {len(trials)}, from 0 on"
        )
    return trials[trial]


def _path_of(study: Study, trial: FrozenTrial, weights_dir: str | os.PathLike[str] | None) -> Path:
    folders = _folders(study, weights_dir)
    for folder in folders:
        path = weights_file(folder, trial.number)
        if path.is_file():
            return path
    raise WeightsError(
        f"the weights of trial {trial.number} of study {study.study_name!r} are not kept: " + _why(trial, folders)
    )


def _why(trial: FrozenTrial, folders: Sequence[Path]) -> str:
    if not folders:
        return "the study was never searched with keep_best; give create_study(..., keep_best=1)"
    if trial.state != TrialState.COMPLETE:
        return f"the trial is {trial.state.name}, and only those of completed trials are"
    where = ", ".join(repr(str(folder)) for folder in folders)
    kept = sorted({number for folder in folders for number in kept_trials(folder)})
    if not kept:
        return f"there are none in {where}; if the folder was moved, give weights_dir="
    shown = ", ".join(map(str, kept[:_NUM_NAMED])) + (", ..." if len(kept) > _NUM_NAMED else "")
    return f"in {where} are those of {shown}; raise keep_best, or take one of these"
