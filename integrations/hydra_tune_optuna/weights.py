"""Keeps the weights of a study's best trials, and loads a trial's trained module.

`PoolStudy.optimize` (`pool_study.py`) makes a `StudyWeights` for each search with `keep_best`. `OptimizeDriver`
(`search/driver.py`) offers the weights of each completed trial, and `search/checkpoint_gc.py` recovered weights. After a
search, people import `load_module`, `kept_weights` and `weights_path` from `hydra_tune_optuna`; `run_sweep` (`sweep.py`) and
`find_weights` (`finding.py`) serve the command line. `study.py`, `monkeypatch.py`, `pool_study.py` and `sweep.py` call
`check_keeping`. The search calls its `StudyWeights` in one thread. A thread of `BestWeights` (`checkpoint/best.py` of
`hydra_tune`) writes the files, so weights may be pending after an offer.

Note: location. Each study has its own folder in `weights_dir`; the study's storage records the folder's name and place.
So new studies of one name share no folder, and any process that can open the study finds the weights. Only a copy of a
study under the same name, in another storage, shares the folder; `weights_path` and `load_module` refuse the file of a trial
that the other study made. `weights_dir=` finds a folder that was moved.
"""

import contextlib
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
from hydra_tune.checkpoint.tensors import load_metadata
from hydra_tune.errors import ConfigError, FileError, WeightsError
from hydra_tune.paths import absolute_path, check_reachable, option_path
from hydra_tune.train.checkpoint.weights import load_module as load_task_module
from hydra_tune_optuna import optuna_internals

KeepBest = int | Literal["pareto"]
Build = Callable[[Any], Any]
"""The objective: takes a trial, running or ended, and returns its task."""

DEFAULT_DIR = "weights"
_ATTRIBUTE = "hydra_tune:weights:"
_EARLIER = "report of the value"  # in the metadata, where the value is not the last report's
_NUM_NAMED = 10


def check_keeping(
    keep_best: object, weights_dir: object, *, num_objectives: int | None = None, has_executor: bool = True
) -> None:
    """Refuse, by a `ConfigError`, options that make no sense; without `num_objectives`, the number is not known yet."""
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


def _check_dir(path: Any) -> None:
    ancestor = option_path(path, "weights_dir")
    check_reachable(ancestor, "weights_dir")
    # The folder may be made later: its nearest existing parent must be a writable folder.
    while not ancestor.exists():
        ancestor = ancestor.parent
    if not ancestor.is_dir():
        raise ConfigError(f"weights_dir {os.fspath(path)!r} cannot be made: {str(ancestor)!r} is a file; give a folder")
    if not os.access(ancestor, os.W_OK | os.X_OK):
        raise ConfigError(
            f"weights_dir {os.fspath(path)!r} cannot be written by this user; give one that is yours to write"
        )


class StudyWeights:
    """Keeper of a study's best weights during a search.

    Args:
        weights_dir: folder for the weights; None for "weights".
        tell: receives a message, in the search's thread, for weights that could not be kept.
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
        self._choose = (
            _ParetoFrontSelector(study.directions)
            if keep_best == "pareto"
            else _BestTrialSelector(study.directions[0], keep_best)
        )
        self._files = BestWeights(_own_folder(study, weights_dir or DEFAULT_DIR), self._choose)

    def completed(self, trial: FrozenTrial, task: TrainTask, result: Any) -> None:
        """Keep the weights of a completed trial if the trial is among the best; the storage knows of the completion already.

        A trial that violates a constraint is not kept.
        """
        if trial.state != TrialState.COMPLETE or optuna_internals.violates_constraints(trial):
            return
        if isinstance(self._choose, _BestTrialSelector):
            # Among equal trials keep the study's own choice: study.best_trial must lead to weights.
            self._choose.favourite = self._study.best_trial.number
        metadata = {
            "study": self._study.study_name,
            "trial": str(trial.number),
            "params": _params_text(trial),
            "metrics": json.dumps(task.metrics),
        }
        number = _earlier_report(trial, task, result.history)
        if number is not None:
            metadata[_EARLIER] = f"{number} of {len(result.history)}"
        try:
            # The method, not its result: only the weights of the best trials are ever copied.
            self._files.offer(trial.number, tuple(trial.values), result.state_dict, metadata)
        except Exception as error:  # noqa: BLE001 - the user's own state_dict() may raise anything; the search goes on
            self.say_lost(trial.number, f"{type(error).__name__}: {error}")
        self._say_failures()

    def lacks(self, trial: FrozenTrial) -> bool:
        """Whether a completed trial is among the best but has no kept weights, as after a crash."""
        if optuna_internals.violates_constraints(trial):
            return False
        # Asked as if the trial were offered now, beside the trials already kept.
        kept_values = kept_trials(self._files.folder)
        return trial.number not in kept_values and trial.number in self._choose(
            {**kept_values, trial.number: tuple(trial.values)}
        )

    def is_settled(self, number: int) -> bool:
        """Whether offered weights are written, or have failed to be."""
        return not self._files.is_waiting(number)

    def flush(self) -> None:
        """Wait until all pending weights are written or have failed."""
        self._files.flush()

    def close(self) -> None:
        """Write the pending weights, and stop."""
        self._files.close()
        self._say_failures()

    def _say_failures(self) -> None:
        for number, why in self._files.failures():
            self.say_lost(number, why)

    def say_lost(self, number: int, why: str) -> None:
        """Report weights that could not be kept."""
        self._tell(f"The weights of trial {number} are not kept: {why}")


def _earlier_report(trial: FrozenTrial, task: TrainTask, history: Sequence[Mapping[str, float]]) -> int | None:
    """Return the number, from 1, of the report whose value a trial has, where the last report has another value."""
    if task.result != "best":
        return None
    reported = [entry[task.metrics[0]] for entry in history]
    is_earlier = bool(reported) and reported[-1] != trial.values[0] and trial.values[0] in reported
    return reported.index(trial.values[0]) + 1 if is_earlier else None


class _BestTrialSelector:
    """Ranks the k best trials by value; ties go to the study's own best trial, then to the older trial.

    Attributes:
        favourite: the study's best trial; storages differ in their choice among equal trials.
    """

    def __init__(self, direction: StudyDirection, count: int) -> None:
        self._sign = -1.0 if direction == StudyDirection.MAXIMIZE else 1.0
        self._count = count
        self.favourite: int | None = None

    def rank(self, number: int, values: Values) -> tuple[float, bool, int]:
        """Sort key of a trial; the best trial has the smallest."""
        return self._sign * values[0], number != self.favourite, number

    def __call__(self, trials: Mapping[int, Values]) -> frozenset[int]:
        ranked = sorted(trials, key=lambda number: self.rank(number, trials[number]))
        return frozenset(ranked[: self._count])


class _ParetoFrontSelector:
    """Selects the Pareto front: trials that no other trial dominates.

    A trial dominates another by being at least as good in every objective and better in one.
    """

    def __init__(self, directions: Sequence[StudyDirection]) -> None:
        self._signs = [-1.0 if direction == StudyDirection.MAXIMIZE else 1.0 for direction in directions]

    def __call__(self, trials: Mapping[int, Values]) -> frozenset[int]:
        losses = {number: self._losses(values) for number, values in trials.items()}
        return frozenset(
            number
            for number, trial_losses in losses.items()
            if not any(_dominates(rival_losses, trial_losses) for rival_losses in losses.values())
        )

    def _losses(self, values: Values) -> Values:
        return tuple(sign * value for sign, value in zip(self._signs, values, strict=True))


def _dominates(first: Values, second: Values) -> bool:
    # At least as good everywhere and not equal means better somewhere.
    return first != second and all(
        first_value <= second_value for first_value, second_value in zip(first, second, strict=True)
    )


def _own_folder(study: Study, weights_dir: str | os.PathLike[str]) -> Path:
    """Folder of the study in `weights_dir`; recorded in the storage at first use."""
    place = absolute_path(weights_dir)
    # A study searched with several `weights_dir` has a folder in each.
    if not any(folder.parent == place for folder in _folders(study)):
        name = f"{_readable_name(study)}-{uuid.uuid4().hex[:8]}"
        optuna_internals.set_study_attribute(study, f"{_ATTRIBUTE}{name}", str(place))
    # Two processes may each have recorded a folder at the same moment; both take the first by name.
    return next(folder for folder in _folders(study) if folder.parent == place)


def _readable_name(study: Study) -> str:
    """Begin of the folder's name: the study's, shortened and cleaned for people and file systems."""
    return re.sub(r"[^\w.-]+", "-", study.study_name).strip("-.")[:60] or "study"


def _folders(study: Study, weights_dir: str | os.PathLike[str] | None = None) -> list[Path]:
    """All folders with weights of the study by name, at their recorded places; then the same in `weights_dir`."""
    # `copy_study` copies the attributes, too: trials of the same number in both studies would overwrite each other's
    # weights.
    own = re.compile(re.escape(f"{_ATTRIBUTE}{_readable_name(study)}") + "-[0-9a-f]{8}")
    recorded = sorted(
        (key.removeprefix(_ATTRIBUTE), place)
        for key, place in optuna_internals.study_attributes(study).items()
        if own.fullmatch(key)
    )
    places = [Path(place) / name for name, place in recorded]
    moved_places = [] if weights_dir is None else [absolute_path(weights_dir) / name for name, _ in recorded]
    return list(dict.fromkeys([*places, *moved_places]))


def kept_weights(study: Study, weights_dir: str | os.PathLike[str] | None = None) -> dict[int, Path]:
    """Find the files of a study's kept weights, by trial number; with one objective, the best trial first.

    Args:
        study: any study that was searched with `keep_best`, also loaded by plain Optuna.
        weights_dir: present place of the study's folder, if moved.

    Returns:
        Paths of safetensors files, by trial number.

    Raises:
        FileError: a folder cannot be read.
    """
    values_and_paths: dict[int, tuple[Values, Path]] = {}
    for folder in _folders(study, weights_dir):
        for number, values in kept_trials(folder).items():
            # The first folder wins: recorded places come before `weights_dir`.
            values_and_paths.setdefault(number, (values, weights_file(folder, number)))
    # Its count does not matter: only the order is used.
    selector = _BestTrialSelector(study.directions[0], 1)
    has_one_objective = len(study.directions) == 1
    if has_one_objective and values_and_paths:
        with contextlib.suppress(ValueError):  # no trial that fulfils its constraints
            selector.favourite = study.best_trial.number
    rank = selector.rank
    order = sorted(
        values_and_paths,
        key=lambda number: (rank(number, values_and_paths[number][0]) if has_one_objective else (), number),
    )
    return {number: values_and_paths[number][1] for number in order}


def weights_path(
    study: Study, trial: FrozenTrial | int | None = None, *, weights_dir: str | os.PathLike[str] | None = None
) -> Path:
    """Find the file of a trial's weights: safetensors of the module's `state_dict()`.

    Args:
        study: as in `kept_weights`.
        trial: the trial, or its number; None for `study.best_trial`.
        weights_dir: present place of the study's folder, if moved.

    Raises:
        WeightsError: the weights are not kept, and the message lists the trials with weights; or a copy of the study under the
            same name has made the file.
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
    """Load the trained module of a trial: built by its task's factory, with the kept weights.

    Args:
        study: as in `kept_weights`.
        trial: the trial, or its number; None for `study.best_trial`.
        build: the objective of the search; called with the ended trial, whose `suggest_` methods return the drawn
            values.
        weights_dir: present place of the study's folder, if moved.

    Returns:
        The module on the host, in the mode set by its factory, for most models training mode; call `.eval()`.

    Raises:
        WeightsError: the weights are not kept or do not fit the built model, the trial's value is that of an earlier
            report (`result="best"`), or `build` returns no task.
        FileError: the file cannot be read, or is damaged.
        ValueError: the study has no best trial, or `build` draws a parameter unknown to the trial.
    """
    frozen = _frozen(study, trial)
    path = _path_of(study, frozen, weights_dir)
    refuse_later(path, frozen.number)
    task = build(optuna_internals.as_running(study, frozen))
    if not isinstance(task, TrainTask):
        raise WeightsError(
            f"build returned {type(task).__name__} for trial {frozen.number}, not a TrainTask; give the objective that the "
            f"study was searched with"
        )
    return load_task_module(task, path)


def refuse_later(path: Path, number: int) -> None:
    """Refuse weights, kept at a path, that do not give the value of their trial.

    Raises:
        WeightsError: the value is that of an earlier report.
        FileError: the file cannot be read, or is damaged.
    """
    report = load_metadata(path).get(_EARLIER)
    if report is not None:
        count = report.partition(" ")[0]
        raise WeightsError(
            f"the value of trial {number} is that of its report {report} (result='best'), and the kept weights are those of "
            f"the last step, which give another value; train the trial's task again up to that report (dataclasses.replace("
            f"task, stop=lambda history: len(history) == {count})), or load the weights of the last step with "
            f"hydra_tune.load_module(task, {str(path)!r})"
        )


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
    others = ""
    for folder in folders:
        path = weights_file(folder, trial.number)
        if path.is_file():
            difference = _difference(trial, path)
            if not difference:
                return path
            others = (
                f"{str(path)!r} holds those of a trial with {difference}; a copy of the study under the same name has made the "
                f"file, in the folder that the two share. Train the trial's task again, and give a copy a name of its own: "
                f"copy_study(..., to_study_name=...)"
            )
    raise WeightsError(
        f"the weights of trial {trial.number} of study {study.study_name!r} are not kept: {others or _why(trial, folders)}"
    )


def _difference(trial: FrozenTrial, path: Path) -> str:
    """Describe how the trial that a file belongs to differs from a completed trial; empty where the two are one."""
    if trial.state != TrialState.COMPLETE:
        return ""
    try:
        metadata = load_metadata(path)
        found = {"parameters": json.loads(metadata["params"]), "values": json.loads(metadata["values"])}
    # The reader of a damaged file says so, and a file without these texts is the user's own.
    except (FileError, KeyError, ValueError):
        return ""
    expected = {"parameters": json.loads(_params_text(trial)), "values": list(trial.values)}
    for name, value in found.items():
        texts = {json.dumps(each, sort_keys=True) for each in (value, expected[name])}
        # By the texts too, because NaN differs from itself.
        if value != expected[name] and len(texts) > 1:
            return f"{name} {value} instead of {expected[name]}"
    return ""


def _params_text(trial: FrozenTrial) -> str:
    return json.dumps(trial.params, default=str)


def _why(trial: FrozenTrial, folders: Sequence[Path]) -> str:
    if not folders:
        return (
            "the study was never searched with keep_best; give create_study(..., keep_best=1); a copy made by copy_study has "
            "no weights, so load them from the study that was searched"
        )
    if trial.state != TrialState.COMPLETE:
        return f"the trial is {trial.state.name}, and only those of completed trials are"
    where = ", ".join(repr(str(folder)) for folder in folders)
    kept_numbers = sorted({number for folder in folders for number in kept_trials(folder)})
    if not kept_numbers:
        return f"there are none in {where}; if the folder was moved, give weights_dir="
    numbers_text = ", ".join(map(str, kept_numbers[:_NUM_NAMED])) + (", ..." if len(kept_numbers) > _NUM_NAMED else "")
    return f"in {where} are those of {numbers_text}; raise keep_best, or take one of these"
