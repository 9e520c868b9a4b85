"""`PoolStudy`: an Optuna study whose trials run in a hydra-tune pool.

It checks and translates the arguments of `optimize`; what happens then is the driver's part.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial

from hydra_tune import HydraExecutor, TrainTask
from hydra_tune.errors import ConfigError
from hydra_tune_optuna.driver import Driver, Limits
from hydra_tune_optuna.lockstep import useless_pruner
from hydra_tune_optuna.private import ProgressBar, optimizing


class PoolStudy(Study):
    """An `optuna.Study` that trains in a pool; made by `create_study(..., executor=...)`.

    Samplers, pruners, storages, callbacks and everything but `optimize` are Optuna's own. A pickle or copy of the study
    has no executor; set `executor` to go on with it.

    Args:
        study_name: as in `optuna.Study`; so are all arguments but the last.
        storage: see `study_name`.
        sampler: see `study_name`.
        pruner: see `study_name`.
        executor: the pool; it may serve several studies.

    Raises:
        ConfigError: `executor` is something else than a hydra-tune executor.
    """

    def __init__(
        self,
        study_name: str,
        storage: str | BaseStorage,
        sampler: BaseSampler | None = None,
        pruner: BasePruner | None = None,
        *,
        executor: HydraExecutor,
    ) -> None:
        self.check_executor(executor)
        super().__init__(study_name=study_name, storage=storage, sampler=sampler, pruner=pruner)
        self.executor: HydraExecutor | None = executor

    def __getstate__(self) -> dict[Any, Any]:
        return {**super().__getstate__(), "executor": None}  # a pool has threads and devices, which no pickle can hold

    @staticmethod
    def check_executor(executor: object) -> None:
        """Refuse what cannot run tasks.

        Raises:
            ConfigError: `executor` is something else than a hydra-tune executor.
        """
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
        """Search: build a task for each trial, train it in the pool, report, prune and tell.

        Args:
            func: builds the task of a trial. It may also return the trial's value itself, as in plain Optuna.
            n_trials: new trials to run; without a limit, until `stop()`, `timeout` or Ctrl-C.
            timeout: seconds after which no new trial starts; running ones finish.
            n_jobs: trials in flight. 1, the default, and -1 stand for the pool's width; a larger number caps it. For a
                strictly sequential search, make the executor with `max_concurrent=1`.
            catch: errors that fail their trial without ending the search.
            callbacks: called as `(study, frozen_trial)` after each trial, in the calling thread, one at a time.
            gc_after_trial: collect garbage after each trial.
            show_progress_bar: show Optuna's progress bar.

        Raises:
            ConfigError: no executor (a copied study), or a number of jobs that makes no sense.
            RuntimeError: called from within `func` or a callback.
        """
        if self.executor is None:
            raise ConfigError("this study is a copy, and has no executor; set study.executor = HydraExecutor() first")
        if n_jobs < 1 and n_jobs != -1:
            raise ConfigError(f"n_jobs must be -1 or at least 1, not {n_jobs}")
        width = self.executor.width if n_jobs in (1, -1) else min(n_jobs, self.executor.width)
        limits = Limits(
            n_trials=n_trials,
            timeout_seconds=timeout,
            width=width,
            catch=tuple(catch) if isinstance(catch, Iterable) else (catch,),
            gc_after_trial=gc_after_trial,
            useless_pruner=useless_pruner(self, self.executor, n_trials=n_trials, width=width),
        )
        with optimizing(self):
            progress_bar = ProgressBar(show_progress_bar, n_trials, timeout)
            try:
                Driver(self, self.executor, func, limits, callbacks=callbacks, progress_bar=progress_bar).run()
            finally:
                progress_bar.close()
