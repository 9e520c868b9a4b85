"""Every private name of Optuna that the integration needs, behind public names of this module.

All access to private names is in this module, so that the contract tests of this module tell whether a release of Optuna
still fits. The module decides nothing about trials or pools. `StudyResumer` (`search/resume_study.py`) asks for each trial
through this module. `OptimizeDriver` (`search/driver.py`) tells each trial here, and `search/shutdown.py` the untold trials
of a search that ended early. The rest of the package reads and writes the private state of Optuna's objects here.

Note: threads. During a search only the thread that calls `optimize` touches the sampler. A heartbeat, or a task's function
that reads its trial, may touch the storage in other threads. Methods of a running trial, `noted_once` and `wait_again`
delay Ctrl-C here; elsewhere the driver does so during a search.
"""
# ruff: noqa: SLF001 - that is what this module is for

import copy
import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning, UpdateFinishedTrialError
from optuna.progress_bar import _ProgressBar as ProgressBar
from optuna.pruners import (
    BasePruner,
    HyperbandPruner,
    PatientPruner,
    PercentilePruner,
    SuccessiveHalvingPruner,
    WilcoxonPruner,
)
from optuna.samplers import (
    BaseSampler,
    BruteForceSampler,
    GridSampler,
    PartialFixedSampler,
    RandomSampler,
    TPESampler,
)
from optuna.samplers._brute_force import _TreeNode
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage, RDBStorage, fail_stale_trials
from optuna.storages._cached_storage import _CachedStorage
from optuna.storages._heartbeat import BaseHeartbeat
from optuna.storages._rdb.models import TrialModel
from optuna.storages._rdb.storage import _create_scoped_session
from optuna.storages.journal import JournalFileBackend
from optuna.study import Study
from optuna.study._optimize import _log_failed_trial
from optuna.study._optimize import _logger as logger
from optuna.study._tell import _tell_with_warning
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from hydra_tune.errors import TaskError
from hydra_tune.interrupts import hold_interrupts

__all__ = [
    "ProgressBar",
    "as_running",
    "ask",
    "compares_with_completed",
    "completed_needed",
    "end_draws",
    "ended",
    "fail_stale",
    "frozen_id",
    "heartbeat_of",
    "judged_from",
    "log_completed",
    "log_failed",
    "logger",
    "note",
    "noted_once",
    "nothing_new_to_sample",
    "optimizing",
    "random_streams",
    "running",
    "set_study_attribute",
    "stop_requested",
    "storage_of",
    "storage_place",
    "stored",
    "study_attributes",
    "take_up",
    "tell",
    "trial_id",
    "violates_constraints",
    "wait_again",
    "wait_for_sqlite",
]


def storage_of(study: Study) -> BaseStorage:
    """Storage of the study."""
    return study._storage


def storage_place(study: Study) -> str | None:
    """Path of a file, URL of a server without passwords, or class of another storage of the study; None: in memory."""
    # Optuna puts a cache around a database.
    storage = study._storage._backend if isinstance(study._storage, _CachedStorage) else study._storage
    if isinstance(storage, RDBStorage):
        url = storage.engine.url
        if url.get_backend_name() != "sqlite":
            return url.set(query={}).render_as_string(hide_password=True)
        return None if url.database in (None, "", ":memory:") else str(Path(str(url.database)).resolve())
    if isinstance(storage, InMemoryStorage):
        return None
    if isinstance(storage, JournalStorage) and isinstance(storage._backend, JournalFileBackend):
        return str(Path(storage._backend._file_path).resolve())
    return type(storage).__name__


def wait_for_sqlite(storage: BaseStorage, seconds: float) -> None:
    """Make SQLite wait some seconds for a database locked by another process, unless `connect_args` set a timeout."""
    # Optuna puts a cache around a database.
    inner = storage._backend if isinstance(storage, _CachedStorage) else storage
    if not isinstance(inner, RDBStorage) or inner.engine.dialect.name != "sqlite":
        return
    if "timeout" in inner.engine_kwargs.get("connect_args", {}) or getattr(inner.engine, "waits_for_sqlite", False):
        return
    # Marked on the engine, so that a second study on the same storage adds no second listener.
    inner.engine.waits_for_sqlite = True  # type: ignore[attr-defined]
    from sqlalchemy import event  # noqa: PLC0415 - it takes a while, and Optuna imports it for such storages only

    def wait(connection: Any, record: Any, proxy: Any) -> None:
        del record, proxy
        connection.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")  # connections already open included

    event.listen(inner.engine, "checkout", wait)


def trial_id(trial: Trial) -> int:
    """Key of a trial in its storage; unlike a trial's number, unique across studies."""
    return trial._trial_id


def frozen_id(frozen: FrozenTrial) -> int:
    """Key in the storage of a frozen trial."""
    return frozen._trial_id


class _InterruptSafeTrial(Trial):
    """A trial whose public methods delay Ctrl-C.

    An interrupt in the middle of a statement leaves a connection that locks an SQLite database for as long as a
    reference to the traceback lives. Nobody could mark the trial as failed meanwhile.

    Attributes:
        _is_described: whether the objective has returned the trial's task.
    """

    _is_described = False

    def _suggest(self, name: str, distribution: BaseDistribution) -> Any:
        # In a thread of the pool, Optuna's samplers keep the list of trials that they saw there first.
        if self._is_described and name not in self._get_latest_trial().distributions:
            raise TaskError(
                f"trial {self.number} draws {name!r} in a function of its task, where samplers do not see the study's present "
                f"trials; draw every parameter in the objective, before the TrainTask is returned"
            )
        return super()._suggest(name, distribution)


# Also `_get_latest_trial`, the one private method that reads the storage for public properties.
for _name, _method in vars(Trial).items():
    if inspect.isfunction(_method) and (not _name.startswith("_") or _name == "_get_latest_trial"):
        setattr(_InterruptSafeTrial, _name, hold_interrupts()(_method))


def ask(study: Study, mark: str | None = None) -> Trial:
    """Ask for a new trial, in whose methods Ctrl-C waits.

    Args:
        study: the study to ask.
        mark: name of an attribute that is True as soon as the trial is running; up to the last colon, the name tells the
            kind of mark. None: no attribute, by `Study.ask` itself.
    """
    if mark is None:
        trial = study.ask()
        # In place, because `Study.ask` makes the trial itself.
        trial.__class__ = _InterruptSafeTrial
        return trial
    study._thread_local.cached_all_trials = None  # as Study.ask does
    trial_id = _take_waiting(study, mark)
    if trial_id is None:
        # State and mark in one call, so that a process killed here leaves no running trial without a mark.
        trial_id = study._storage.create_new_trial(
            study._study_id, create_trial(state=TrialState.RUNNING, system_attrs={mark: True})
        )
    return _InterruptSafeTrial(study, trial_id)


def _take_waiting(study: Study, mark: str) -> int | None:
    """Take a waiting trial, as `Study._pop_waiting_trial_id` does, with the mark.

    The mark comes before the state: a process killed in between leaves a waiting trial, never a running trial without a
    mark. Older marks of the same kind end here: whoever set such a mark has put the trial back, or Optuna's callback has
    copied the mark from a failed trial.
    """
    kind = mark[: mark.rfind(":") + 1]
    for frozen in study._storage.get_all_trials(study._study_id, deepcopy=False, states=(TrialState.WAITING,)):
        # Another process may have taken and ended the trial between the listing and this line.
        with suppress(UpdateFinishedTrialError):
            note(study, frozen, mark, value=True)
            if _run_waiting(study._storage, frozen._trial_id):
                for key in [
                    key for key, value in frozen.system_attrs.items() if kind and key.startswith(kind) and value
                ]:
                    if key != mark:
                        note(study, frozen, key, value=False)
                return frozen._trial_id
            note(study, frozen, mark, value=False)  # another process has taken the trial first
    return None


def _run_waiting(storage: BaseStorage, trial_id: int) -> bool:
    """Set a waiting trial running; return False if another process has done so.

    `RDBStorage` reads the state and then writes the state, and SQLite holds no lock in between: two processes would both
    run the trial. One statement does both here.
    """
    backend = storage._backend if isinstance(storage, _CachedStorage) else storage
    if not isinstance(backend, RDBStorage):
        return storage.set_trial_state_values(trial_id, state=TrialState.RUNNING)
    with _create_scoped_session(backend.scoped_session) as session:
        is_waiting = (TrialModel.trial_id == trial_id, TrialModel.state == TrialState.WAITING)
        new_state: dict[Any, TrialState] = {TrialModel.state: TrialState.RUNNING}
        if not session.query(TrialModel).filter(*is_waiting).update(new_state, synchronize_session=False):
            return False
        TrialModel.find_or_raise_by_id(trial_id, session).datetime_start = datetime.now()  # noqa: DTZ005 - as Optuna sets it
    return True


def note(study: Study, frozen: FrozenTrial, key: str, *, value: Any) -> None:
    """Write a system attribute of a trial to the storage."""
    study._storage.set_trial_system_attr(frozen._trial_id, key, value)


@hold_interrupts()
def noted_once(trial: Trial, key: str, value: Any) -> Any:
    """Return a system attribute of a trial; without the attribute, return `value`, written unless the trial has ended."""
    frozen = stored(trial.study, trial)
    if key in frozen.system_attrs:
        return frozen.system_attrs[key]
    # Storages refuse to change a told trial, whose task is built once more to recover weights.
    if not frozen.state.is_finished():
        note(trial.study, frozen, key, value=value)
    return value


def end_draws(trial: Trial) -> None:
    """Refuse new parameters from now on; parameters drawn before can be suggested again."""
    trial._is_described = True  # type: ignore[attr-defined]  # of this module's own class


def running(study: Study) -> list[FrozenTrial]:
    """Trials that the storage lists as running, in whichever process."""
    return study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))


def as_running(study: Study, frozen: FrozenTrial) -> FrozenTrial:
    """Return a copy of a trial for the objective, with the attribute `study` that running trials have."""
    # An objective may change the trial, and the storage may share the object.
    trial = copy.deepcopy(frozen)
    trial.study = study  # type: ignore[attr-defined]
    return trial


def ended(study: Study, states: tuple[TrialState, ...]) -> list[FrozenTrial]:
    """Trials in the given states."""
    return study.get_trials(deepcopy=False, states=states)


def take_up(study: Study, frozen: FrozenTrial) -> Trial:
    """Continue a trial of another process; repeated suggestions return the values drawn before."""
    return _InterruptSafeTrial(study, frozen._trial_id)


@hold_interrupts()
def wait_again(study: Study, frozen: FrozenTrial) -> None:
    """Put a stopped trial back to waiting, with its drawn parameters, for the next ask."""
    storage = study._storage
    storage.set_trial_state_values(frozen._trial_id, TrialState.WAITING)
    # The storage remembers the last waiting trial that it found, and looks only from there on.
    if isinstance(storage, InMemoryStorage):
        first_number = storage._prev_waiting_trial_number[study._study_id]
        storage._prev_waiting_trial_number[study._study_id] = min(first_number, frozen.number)


def random_streams(sampler: BaseSampler) -> list[np.random.RandomState]:
    """Random streams of a sampler supported by sweep files; empty for other samplers."""
    match sampler:
        case TPESampler():
            # TPE draws its first trials from a random sampler, which has a stream of its own.
            return [sampler._rng.rng, sampler._random_sampler._rng.rng]
        case RandomSampler() | GridSampler():
            return [sampler._rng.rng]
        case _:
            return []


def stored(study: Study, trial: Trial) -> FrozenTrial:
    """Return the storage's present record of a trial; callers that change the record must copy it first."""
    return study._storage.get_trial(trial._trial_id)


def violates_constraints(frozen: FrozenTrial) -> bool:
    """Whether a trial violates constraints and must not be the best.

    Optuna 4 knows only constraints of samplers' `constraints_func`.
    """
    if hasattr(frozen, "constraints"):
        return any(value > 0 for value in frozen.constraints.values())
    return any(value > 0 for value in frozen.system_attrs.get("constraints") or ())


def study_attributes(study: Study) -> dict[str, Any]:
    """System attributes of the study in its storage, apart from users' attributes."""
    return study._storage.get_study_system_attrs(study._study_id)


def set_study_attribute(study: Study, key: str, value: Any) -> None:
    """Write a system attribute of the study, for `study_attributes` in every process."""
    study._storage.set_study_system_attr(study._study_id, key, value)


@contextmanager
def optimizing(study: Study) -> Iterator[None]:
    """Mark this thread as the driver of `study`, as `Study.stop` and the warnings of `Study.ask` expect.

    Raises:
        RuntimeError: this thread drives the study already; in Optuna's words.
    """
    if study._thread_local.in_optimize_loop:
        raise RuntimeError("Nested invocation of `Study.optimize` method isn't allowed.")
    # As `Study.optimize` begins: a `stop()` before the call does not end the search.
    study._stop_flag = False
    study._thread_local.in_optimize_loop = True
    try:
        yield
    finally:
        study._thread_local.in_optimize_loop = False


def stop_requested(study: Study) -> bool:
    """Whether `Study.stop` was called since `optimizing` began."""
    return study._stop_flag


def tell(
    study: Study, trial: Trial, *, value: object = None, state: TrialState | None = None
) -> tuple[TrialState, list[float] | None, str | None]:
    """Tell the outcome as `Study.optimize` does; an invalid value fails the trial.

    Returns:
        The trial's state, its values, and the reason of a failure. The reason replaces Optuna's warning.
    """
    try:
        return _tell_with_warning(
            study=study,
            trial=trial,
            value_or_values=value,  # type: ignore[arg-type]  # an objective may return anything; Optuna judges it
            state=state,
            suppress_warning=True,
        )
    except KeyError as error:
        # When a trial ends while one point of a grid is left, the sampler asks whether the trial had this point. An
        # enqueued trial has no point, and the sampler fails, after the trial's state has been stored.
        told = stored(study, trial)
        if error.args != ("grid_id",) or "grid_id" in told.system_attrs or not told.state.is_finished():
            raise
        return told.state, told.values, f"its value {value!r} is invalid" if told.state == TrialState.FAIL else None


def log_completed(study: Study, trial: Trial, values: Sequence[float]) -> None:
    """Log Optuna's line for a completed trial, with the best trial so far."""
    study._log_completed_trial(list(values), trial.number, trial.params)


def log_failed(trial: Trial, reason: str, *, error: BaseException | None = None, value: object = None) -> None:
    """Log Optuna's two lines for a failed trial, with the traceback of `error`."""
    _log_failed_trial(trial.number, trial.params, reason, exc_info=error, value_or_values=value)


def heartbeat_of(storage: BaseStorage) -> BaseHeartbeat | None:
    """Return the storage as a heartbeat target, or None without a heartbeat interval."""
    if isinstance(storage, BaseHeartbeat) and storage.get_heartbeat_interval() is not None:
        return storage
    return None


def fail_stale(study: Study) -> None:
    """Fail trials of dead processes, where the storage has a heartbeat."""
    if heartbeat_of(study._storage) is None:
        return
    with warnings.catch_warnings():
        # Optuna warns of its experimental function at each call, and this one comes before every trial.
        warnings.simplefilter("ignore", ExperimentalWarning)
        fail_stale_trials(study)


def nothing_new_to_sample(study: Study) -> bool:
    """Whether an exhaustive sampler has handed out all of its points, some to trials still running.

    Such a sampler stops the study at the tell of the last point. Asked earlier, the sampler repeats a point. An
    enqueued trial is new all the same.
    """
    sampler: BaseSampler = study.sampler
    while isinstance(sampler, PartialFixedSampler):
        sampler = sampler._base_sampler
    if not isinstance(sampler, GridSampler | BruteForceSampler):
        return False
    # The next ask takes a waiting trial and draws no point; after the sampler has stopped the study, no ask comes.
    if study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        return False
    if isinstance(sampler, GridSampler):
        return not set(sampler._get_unvisited_grid_ids(study)) - _running_grid_ids(study)
    # As the sampler itself finds its next point, with running trials counted as visited.
    tree = _TreeNode()
    states = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING, TrialState.FAIL)
    sampler._populate_tree(tree, study._storage.get_all_trials(study._study_id, deepcopy=False, states=states), {})
    return not tree.count_unexpanded(exclude_running=True)


def completed_needed(pruner: BasePruner) -> int:
    """Completed trials needed before the pruner can prune; 0 for pruners that need none or are unknown to Optuna."""
    match pruner:
        case PercentilePruner():  # MedianPruner is one
            return max(1, pruner._n_startup_trials, pruner._n_min_trials)
        case WilcoxonPruner():
            return 1  # compares with the best completed trial
        case SuccessiveHalvingPruner():
            return int(pruner._min_resource is None)  # "auto": derived from the first completed trial
        case HyperbandPruner():
            return int(pruner._max_resource == "auto")
        case PatientPruner() if pruner._wrapped_pruner is not None:
            return completed_needed(pruner._wrapped_pruner)
        case _:
            return 0


def compares_with_completed(pruner: BasePruner) -> bool:
    """Whether the pruner needs completed trials, or is unknown to Optuna and may need them."""
    return completed_needed(pruner) > 0 or not type(pruner).__module__.startswith("optuna.")


def judged_from(pruner: BasePruner) -> int | None:
    """First step at which a percentile pruner compares a report with completed trials; None for all other pruners."""
    return pruner._n_warmup_steps if isinstance(pruner, PercentilePruner) else None


def _running_grid_ids(study: Study) -> set[int]:
    running = study._storage.get_all_trials(study._study_id, deepcopy=False, states=(TrialState.RUNNING,))
    return {trial.system_attrs["grid_id"] for trial in running if "grid_id" in trial.system_attrs}
