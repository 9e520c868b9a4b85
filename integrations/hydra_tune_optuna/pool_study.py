"""`PoolStudy`: an Optuna study whose trials run in a hydra-tune pool.

`PoolStudy` checks and translates the arguments of `optimize`; `OptimizeDriver` (`search/driver.py`) runs the search in the
calling thread. `create_study` and `load_study` (`study.py`) return a `PoolStudy` when called with `executor=`; so do
Optuna's own after `install` (`monkeypatch.py`). People, `run_sweep` (`sweep.py`) and `hyperparameter_search`
(`integrations/hydra_tune_transformers/search.py`) call `optimize`. A copy or a pickle must hold no pool and no objective.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from optuna.logging import get_logger
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial
from torch import nn

from hydra_tune import HydraExecutor, TrainTask
from hydra_tune.errors import ConfigError
from hydra_tune_optuna.optuna_internals import ProgressBar, optimizing, storage_of, wait_for_sqlite
from hydra_tune_optuna.search.driver import OptimizeDriver, OptimizeLimits
from hydra_tune_optuna.search.pruner_checks import choose_admission, useless_pruner
from hydra_tune_optuna.weights import Build, KeepBest, StudyWeights, check_keeping, load_module

_logger = get_logger("optuna.hydra_tune")  # shown and configured like Optuna's own lines

_LOCKED_SECONDS = 60.0
"""Longest wait for an SQLite database locked by another process."""


def _do_nothing() -> None:
    """Do nothing: the default of `settled`."""


class PoolStudy(Study):
    """An `optuna.Study` that trains in a pool; made by `create_study(..., executor=...)`.

    Everything but `optimize` and `load_module` is Optuna's own. A pickle or copy of the study has no executor; set
    `executor` to continue with the copy.

    Args:
        study_name: as in `optuna.Study`; so are all arguments before `executor`.
        storage: see `study_name`.
        sampler: see `study_name`.
        pruner: see `study_name`.
        executor: the pool; one pool may serve several studies.
        keep_best: number of best trials whose weights are kept on disk, or "pareto" for all of `best_trials`; None: no
            weights are kept.
        weights_dir: the folder for the weights; None for "weights". A relative path starts at the working directory of
            each call of `optimize`.

    Attributes:
        executor: as given; None in a copy. A program may set another.
        keep_best: as given; read at each call of `optimize`.
        weights_dir: as given; likewise.
        tell_lost: receives a message for weights that could not be kept; `run_sweep` (`sweep.py`) sets the callback.
        settled: as of `OptimizeDriver`; likewise.

    Raises:
        ConfigError: `executor` is not a hydra-tune executor, or `keep_best` or `weights_dir` makes no sense.
    """

    def __init__(
        self,
        study_name: str,
        storage: str | BaseStorage,
        sampler: BaseSampler | None = None,
        pruner: BasePruner | None = None,
        *,
        executor: HydraExecutor,
        keep_best: KeepBest | None = None,
        weights_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.check_executor(executor)
        super().__init__(study_name=study_name, storage=storage, sampler=sampler, pruner=pruner)
        wait_for_sqlite(storage_of(self), _LOCKED_SECONDS)
        # After Optuna's own `__init__`, which reads the directions from the storage.
        check_keeping(keep_best, weights_dir, num_objectives=len(self.directions))
        self.executor: HydraExecutor | None = executor
        self.keep_best = keep_best
        self.weights_dir = weights_dir
        self.tell_lost: Callable[[str], None] = _logger.error
        self.settled: Callable[[], None] = _do_nothing
        self._func: Build | None = None
        self._weights: StudyWeights | None = None

    def __getstate__(self) -> dict[Any, Any]:
        # No pickle can hold a pool's threads and devices, and an objective may be any function.
        process_bound = {
            "executor": None,
            "tell_lost": _logger.error,
            "settled": _do_nothing,
            "_func": None,
            "_weights": None,
        }
        return {**super().__getstate__(), **process_bound}

    @staticmethod
    def check_executor(executor: object) -> None:
        """Refuse an object that cannot run tasks.

        Raises:
            ConfigError: `executor` is not a hydra-tune executor.
        """
        # By its methods, because pools of other libraries may take the executor's place.
        if isinstance(executor, type) or not all(hasattr(executor, name) for name in ("submit", "events")):
            raise ConfigError(f"executor must be a HydraExecutor, not {executor!r}; e.g. executor=HydraExecutor()")

    def optimize(
        self,
        func: Callable[[Trial], TrainTask | float | Sequence[float]],
        n_trials: int | None = None,
        timeout: float | None = None,
        n_jobs: int = 1,
        catch: Iterable[type[Exception]] | type[Exception] = (),
        callbacks: Iterable[Callable[[Study, FrozenTrial], None]] | None = None,
        gc_after_trial: bool = False,
        show_progress_bar: bool = False,
    ) -> None:
        """Search: build a task for each trial, train the task in the pool, report, prune and tell.

        Args:
            func: builds the task of a trial, or returns the trial's value itself, as in plain Optuna.
            n_trials: new trials to run; without a limit, until `stop()`, `timeout` or Ctrl-C.
            timeout: seconds after which no new trial starts; running trials finish.
            n_jobs: trials in flight. 1, the default, and -1 stand for the pool's width; a larger number caps the width.
                For a strictly sequential search, make the executor with `max_concurrent=1`.
            catch: errors that fail their trial without ending the search.
            callbacks: called as `(study, frozen_trial)` after each trial that does not end the search, in the calling
                thread, one at a time.
            gc_after_trial: collect garbage after each trial.
            show_progress_bar: show Optuna's progress bar.

        Raises:
            ConfigError: no executor (a copied study), or a number of jobs, `keep_best` or `weights_dir` that makes no
                sense.
            RuntimeError: called from within `func` or a callback.
        """
        if self.executor is None:
            raise ConfigError("this study is a copy, and has no executor; set study.executor = HydraExecutor() first")
        # Checked again, because both are plain attributes, which a program may have set since.
        check_keeping(self.keep_best, self.weights_dir, num_objectives=len(self.directions))
        if n_jobs < 1 and n_jobs != -1:
            raise ConfigError(f"n_jobs must be -1 or at least 1, not {n_jobs}")
        # Optuna's default of 1 would leave the pool's devices idle, so 1 stands for the pool's width, too.
        width = self.executor.width if n_jobs in (1, -1) else min(n_jobs, self.executor.width)
        choice = choose_admission(self, self.executor, n_trials=n_trials)
        advice = partial(useless_pruner, self, self.executor, n_trials=n_trials, width=width, choice=choice)
        limits = OptimizeLimits(
            n_trials=n_trials,
            timeout_seconds=timeout,
            width=width,
            catch=tuple(catch) if isinstance(catch, Iterable) else (catch,),
            gc_after_trial=gc_after_trial,
            admission=choice,
            useless_pruner=advice(),
            useless_if_fused=advice(is_fused=True),
        )
        with optimizing(self), self._keeping() as weights:
            # For `load_module`, which builds a trial's module by the objective.
            self._func = func
            progress_bar = ProgressBar(show_progress_bar, n_trials, timeout)
            try:
                OptimizeDriver(
                    self,
                    self.executor,
                    func,
                    limits,
                    callbacks=callbacks,
                    progress_bar=progress_bar,
                    weights=weights,
                    settled=self.settled,
                ).run()
            finally:
                progress_bar.close()

    @contextmanager
    def _keeping(self) -> Iterator[StudyWeights | None]:
        """Within the block, keep weights as the study is configured; write pending weights at the end."""
        if self.keep_best is None:
            yield None
            return
        self._weights = weights = StudyWeights(self, self.keep_best, self.weights_dir, self.tell_lost)
        try:
            yield weights
        finally:
            self._weights = None
            weights.close()

    def load_module(self, trial: FrozenTrial | int | None = None, build: Build | None = None) -> nn.Module:
        """Load the trained module of a trial with kept weights; see `hydra_tune_optuna.load_module`.

        Args:
            trial: the trial, or its number; None for `best_trial`.
            build: the objective; None for the objective of this object's last `optimize`.

        Raises:
            ConfigError: no `build`, and this object has not run `optimize`.
            WeightsError: as `hydra_tune_optuna.load_module`, with all other errors.
        """
        build = build or self._func
        if build is None:
            raise ConfigError(
                "load_module builds the model with the objective; give build=, the function given to optimize"
            )
        if self._weights is not None:
            self._weights.flush()  # in a callback the weights may still be pending
        return load_module(self, trial, build, weights_dir=self.weights_dir)
