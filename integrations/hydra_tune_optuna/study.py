"""Drop-in for `optuna.study`, with a `create_study` and a `load_study` that take `executor=`.

People import `create_study`, `load_study` or the module itself from `hydra_tune_optuna`. `run_sweep` (`sweep.py`) and
`hyperparameter_search` (`integrations/hydra_tune_transformers/search.py`) open studies by `create_study`, and `monkeypatch.py`
calls `with_executor`. A name that the module lacks is looked up in `optuna.study`. Every check of options must come
before Optuna creates the study, which would stay in its storage.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

import optuna
from optuna.logging import get_logger
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.study import (
    MaxTrialsCallback,
    Study,
    StudyDirection,
    StudySummary,
    copy_study,
    delete_study,
    get_all_study_names,
    get_all_study_summaries,
)

from hydra_tune import HydraExecutor
from hydra_tune_optuna.optuna_internals import storage_of
from hydra_tune_optuna.pool_study import PoolStudy
from hydra_tune_optuna.weights import KeepBest, check_keeping

__all__ = [
    "MaxTrialsCallback",
    "PoolStudy",
    "Study",
    "StudyDirection",
    "StudySummary",
    "copy_study",
    "create_study",
    "delete_study",
    "get_all_study_names",
    "get_all_study_summaries",
    "load_study",
]

_logger = get_logger("optuna.hydra_tune")  # shown and configured like Optuna's own lines

Direction = Literal["minimize", "maximize"] | StudyDirection


@overload
def create_study(
    *,
    storage: str | BaseStorage | None = None,
    sampler: BaseSampler | None = None,
    pruner: BasePruner | None = None,
    study_name: str | None = None,
    direction: Direction | None = None,
    load_if_exists: bool = False,
    directions: Sequence[Direction] | None = None,
    executor: None = None,
    keep_best: None = None,
    weights_dir: None = None,
) -> Study: ...


@overload
def create_study(
    *,
    storage: str | BaseStorage | None = None,
    sampler: BaseSampler | None = None,
    pruner: BasePruner | None = None,
    study_name: str | None = None,
    direction: Direction | None = None,
    load_if_exists: bool = False,
    directions: Sequence[Direction] | None = None,
    executor: HydraExecutor,
    keep_best: KeepBest | None = None,
    weights_dir: str | os.PathLike[str] | None = None,
) -> PoolStudy: ...


def create_study(
    *,
    storage: str | BaseStorage | None = None,
    sampler: BaseSampler | None = None,
    pruner: BasePruner | None = None,
    study_name: str | None = None,
    direction: Direction | None = None,
    load_if_exists: bool = False,
    directions: Sequence[Direction] | None = None,
    executor: HydraExecutor | None = None,
    keep_best: KeepBest | None = None,
    weights_dir: str | os.PathLike[str] | None = None,
) -> Study:
    """`optuna.create_study`, with an executor.

    Args:
        storage: as in Optuna; so are all arguments but the last three.
        sampler: see `storage`.
        pruner: see `storage`.
        study_name: see `storage`.
        direction: see `storage`.
        load_if_exists: see `storage`.
        directions: see `storage`.
        executor: the pool that trains the study's tasks. A pool may serve several studies; no study closes the pool.
        keep_best: number of best trials whose weights are kept on disk, or "pareto" for all of `study.best_trials`;
            None: no weights are kept. `study.load_module(study.best_trial)` loads the kept weights.
        weights_dir: the folder for the weights; None for "weights". A relative path starts at the working directory of
            each call of `optimize`.

    Returns:
        A `PoolStudy`, or, without an executor, a plain Optuna study.

    Raises:
        ConfigError: `executor` is not a hydra-tune executor, or `keep_best` or `weights_dir` makes no sense; raised
            before the study is created.
    """
    if executor is not None:
        PoolStudy.check_executor(executor)  # refused before the study is created
    # All checks come before the study, which would stay in its storage after a refusal.
    num_objectives = len(directions) if isinstance(directions, Sequence) else None
    check_keeping(keep_best, weights_dir, num_objectives=num_objectives, has_executor=executor is not None)
    study = optuna.create_study(
        storage=storage,
        sampler=sampler,
        pruner=pruner,
        study_name=study_name,
        direction=direction,
        load_if_exists=load_if_exists,
        directions=directions,
    )
    if executor is None:
        return study
    return with_executor(study, executor, direction, directions, keep_best=keep_best, weights_dir=weights_dir)


@overload
def load_study(
    *,
    study_name: str | None,
    storage: str | BaseStorage,
    sampler: BaseSampler | None = None,
    pruner: BasePruner | None = None,
    executor: None = None,
    keep_best: None = None,
    weights_dir: None = None,
) -> Study: ...


@overload
def load_study(
    *,
    study_name: str | None,
    storage: str | BaseStorage,
    sampler: BaseSampler | None = None,
    pruner: BasePruner | None = None,
    executor: HydraExecutor,
    keep_best: KeepBest | None = None,
    weights_dir: str | os.PathLike[str] | None = None,
) -> PoolStudy: ...


def load_study(
    *,
    study_name: str | None,
    storage: str | BaseStorage,
    sampler: BaseSampler | None = None,
    pruner: BasePruner | None = None,
    executor: HydraExecutor | None = None,
    keep_best: KeepBest | None = None,
    weights_dir: str | os.PathLike[str] | None = None,
) -> Study:
    """`optuna.load_study`, with an executor.

    Args:
        study_name: as in Optuna; so are all arguments but the last three.
        storage: see `study_name`.
        sampler: see `study_name`.
        pruner: see `study_name`.
        executor: the pool that trains the study's tasks.
        keep_best: as in `create_study`; so is the last.
        weights_dir: see `keep_best`.

    Returns:
        A `PoolStudy`, or, without an executor, a plain Optuna study.

    Raises:
        ConfigError: `executor` is not a hydra-tune executor, or `keep_best` or `weights_dir` makes no sense.
    """
    # The number of objectives is known only once the study is loaded, and `PoolStudy` checks the number then.
    check_keeping(keep_best, weights_dir, has_executor=executor is not None)
    study = optuna.load_study(study_name=study_name, storage=storage, sampler=sampler, pruner=pruner)
    return study if executor is None else with_executor(study, executor, keep_best=keep_best, weights_dir=weights_dir)


def with_executor(
    study: Study,
    executor: HydraExecutor,
    direction: Direction | None = None,
    directions: Sequence[Direction] | None = None,
    *,
    keep_best: KeepBest | None = None,
    weights_dir: str | os.PathLike[str] | None = None,
) -> PoolStudy:
    """Return a `PoolStudy` on a study's storage, sampler and pruner; warn if the study has other directions than requested."""
    _warn_of_other_directions(study, [direction] if direction is not None else directions)
    return PoolStudy(
        study_name=study.study_name,
        storage=storage_of(study),
        sampler=study.sampler,
        pruner=study.pruner,
        executor=executor,
        keep_best=keep_best,
        weights_dir=weights_dir,
    )


def _warn_of_other_directions(study: Study, asked: Sequence[Direction] | None) -> None:
    """Warn of a mismatch: with `load_if_exists` Optuna silently opens a study of another direction."""
    # Nothing was asked for, or Optuna has refused the value already.
    if not isinstance(asked, Sequence):
        return
    asked_directions = [
        direction if isinstance(direction, StudyDirection) else StudyDirection[direction.upper()] for direction in asked
    ]
    if asked_directions != study.directions:
        _logger.warning(
            "The study %r was there already and is to %s, not to %s; give another study_name, or remove the study with "
            "delete_study.",
            study.study_name,
            _words(study.directions),
            _words(asked_directions),
        )


def _words(directions: Sequence[StudyDirection]) -> str:
    return " and ".join(direction.name.lower() for direction in directions)


if not TYPE_CHECKING:  # a type checker would take every misspelt name for a real one

    def __getattr__(name: str) -> object:
        return getattr(optuna.study, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(optuna.study)})
