"""`hyperparameter_search`: `Trainer.hyperparameter_search` whose trials train in a pool.

Each trial copies the arguments of the `Trainer`, sets the arguments that `hp_space` suggests, as the transformers library
does, and becomes a task (`task.py`) of a study of `hydra_tune_optuna`. `install` gives the method of `Trainer` an
`executor=`. People import `hyperparameter_search` and `install` from `hydra_tune_transformers`.

Note: `_build` is the study's objective, and runs in the thread of the search. The model of a trial is built once more on a
thread of the pool, with a `FixedTrial`, and so without the study's storage.
"""

import copy
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from optuna.trial import FixedTrial, Trial
from transformers import Trainer, set_seed
from transformers.hyperparameter_search import ALL_HYPERPARAMETER_SEARCH_BACKENDS, OptunaBackend
from transformers.trainer_utils import BestRun, HPSearchBackend, default_compute_objective

import hydra_tune_optuna
from hydra_tune import HydraExecutor, TrainTask
from hydra_tune.errors import ConfigError
from hydra_tune_transformers.evaluation import OBJECTIVE
from hydra_tune_transformers.shared import shared_objects
from hydra_tune_transformers.task import InitializedModel, own_random_state, task_of

_OF_OPTIMIZE = ("timeout", "n_jobs", "gc_after_trial", "catch")
_LOGGER = logging.getLogger(__name__)


def hyperparameter_search(
    trainer: Trainer,
    hp_space: Callable[[Trial], Mapping[str, Any]] | None = None,
    compute_objective: Callable[[dict[str, float]], Any] | None = None,
    n_trials: int = 20,
    direction: str | list[str] = "minimize",
    *,
    executor: HydraExecutor,
    **kwargs: Any,
) -> BestRun | list[BestRun]:
    """Search as `trainer.hyperparameter_search(backend="optuna")` does, with the trials of a pool.

    Args:
        trainer: a `Trainer` as `task_from_trainer` takes it, with a `model_init`; unchanged afterwards. A `model_init` of
            one argument is called with the trial, and once more when the trial trains, then with the values drawn.
        hp_space: `(trial) -> {argument of TrainingArguments: value}`; default: as in the transformers library.
        compute_objective: `(metrics) -> value`, or several values; default: as in the transformers library.
        n_trials: trials to run.
        direction: `"minimize"` or `"maximize"`, or a list of these for several values.
        executor: the pool.
        **kwargs: of `optuna.create_study` and, with their names there, `timeout`, `n_jobs`, `gc_after_trial` and `catch` of
            `Study.optimize`.

    Returns:
        The best trial, or the best trials of several values.

    Raises:
        ConfigError: no `model_init`, or no `eval_dataset`.
        RefusedTrainerError: as `task_from_trainer`.

    Differs: a trial whose space has a `seed` trains with that seed; `Trainer` seeds the model of each trial with the seed of
    the trial before.
    """
    if trainer.model_init is None or trainer.eval_dataset is None:
        missing = "model_init" if trainer.model_init is None else "eval_dataset"
        raise ConfigError(f"hyperparameter_search needs a Trainer with {missing}=")
    space = OptunaBackend().default_hp_space if hp_space is None else hp_space
    objective = default_compute_objective if compute_objective is None else compute_objective
    if isinstance(direction, list) and len(direction) == 1:
        (direction,) = direction
    chosen: dict[str, Any] = {"directions" if isinstance(direction, list) else "direction": direction}
    optimizing = {name: kwargs.pop(name) for name in _OF_OPTIMIZE if name in kwargs}
    study = hydra_tune_optuna.create_study(executor=executor, **chosen, **kwargs)
    num_objectives = len(direction) if isinstance(direction, list) else 0
    build = partial(_build, trainer, space, objective, num_objectives)
    shared = shared_objects(trainer)  # known for the whole search, with the states before the first trial
    study.optimize(build, n_trials=n_trials, **optimizing)
    del shared
    if num_objectives:
        return [BestRun(str(best.number), best.values, best.params) for best in study.best_trials]
    best = study.best_trial
    return BestRun(str(best.number), best.value, best.params)


def _build(
    trainer: Trainer,
    space: Callable[[Trial], Mapping[str, Any]],
    compute_objective: Callable[[dict[str, float]], Any],
    num_objectives: int,
    trial: Trial,
) -> TrainTask:
    with own_random_state():
        # Shallow: trials share the data, and the arguments, model and optimizer of the given `Trainer` stay.
        own = copy.copy(trainer)
        own.args = copy.copy(trainer.args)
        set_seed(own.args.seed)
        # Before the arguments are set, as in `Trainer.train`: the sampler draws for the `model_init` first.
        own.model, own.optimizer, own.lr_scheduler = own.call_model_init(trial), None, None
        for name, value in space(trial).items():
            if not hasattr(own.args, name):
                _LOGGER.warning("the search draws %s, and TrainingArguments have no such argument", name)
                continue
            before = getattr(own.args, name)
            setattr(own.args, name, value if before is None else type(before)(value))
        own._train_batch_size = own.args.train_batch_size  # noqa: SLF001 - as `Trainer` itself does in a search
        own.create_accelerator_and_postprocess()
        # The `model_init` runs again in the pool, and the fixed trial answers without the storage of the study.
        drawn = FixedTrial(trial.params, trial.number)
        names = tuple(f"val_{OBJECTIVE}_{number}" for number in range(num_objectives)) or f"val_{OBJECTIVE}"
        model = InitializedModel(trainer.model_init, drawn, trainer.processing_class)
        return task_of(own, model, compute_objective, names)


class PoolBackend(OptunaBackend):  # type: ignore[misc]  # to mypy the library is Any
    """The Optuna backend of the transformers library, which takes `executor=` as well."""

    def run(self, trainer: Trainer, n_trials: int, direction: str | list[str], **kwargs: Any) -> Any:
        """Search in the pool of `executor`; without `executor`, search as the library does."""
        # Removed also when None: the library passes all other arguments on to `optuna.create_study`.
        executor = kwargs.pop("executor", None)
        if executor is None:
            return super().run(trainer, n_trials, direction, **kwargs)
        space, objective = trainer.hp_space, trainer.compute_objective
        return hyperparameter_search(trainer, space, objective, n_trials, direction, executor=executor, **kwargs)


def install() -> None:
    """Give `Trainer.hyperparameter_search(backend="optuna")` an `executor=`; without it, the method is unchanged."""
    ALL_HYPERPARAMETER_SEARCH_BACKENDS[HPSearchBackend.OPTUNA] = PoolBackend


def uninstall() -> None:
    """Undo `install`."""
    ALL_HYPERPARAMETER_SEARCH_BACKENDS[HPSearchBackend.OPTUNA] = OptunaBackend
