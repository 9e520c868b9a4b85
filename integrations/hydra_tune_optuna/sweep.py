"""Runs the sweeps of the command line with Optuna: the entry point `optuna` of the group `hydra_tune.tuners`.

The module translates a sweep's terms into Optuna's sampler, pruner, storage and suggestions, and reports progress to
the observer. The module reads no sweep file and displays nothing; its messages name the options of the file. `hydra-tune sweep`
(`hydra_tune/cli/run/sweep_run.py`) calls `check_sweep`, through `OptunaStudyReader.check` (`study_reader.py`), before
anything is created, and `run_sweep` once the pool is made, unless the sweep runs on a Ray cluster. `hydra-tune check`
(`hydra_tune/cli/dry_run/checking.py`) calls `check_sweep` alone, which must create nothing.

Note: `run_sweep` runs in the main thread of the sweep's process, and calls the observer in no other thread. The observer
learns of the end of each asked trial: finished, or left for a later run.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    check_distribution_compatibility,
)
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, GridSampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from hydra_tune import TrainTask
from hydra_tune.cli.display.next_step import masked
from hydra_tune.cli.inspect.run_scan import absolute_storage
from hydra_tune.cli.sweep_file.domains import ChoiceDomain, Domain, FloatDomain, IntDomain, grid_size
from hydra_tune.cli.sweep_file.request import Outcome, SweepRequest, TrialRecord
from hydra_tune.cli.sweep_file.spec import PruningRule, SweepSpec
from hydra_tune.errors import ConfigError, HydraTuneError, message_line
from hydra_tune.supervision.marks import at_work
from hydra_tune_optuna import optuna_internals
from hydra_tune_optuna.pool_study import PoolStudy
from hydra_tune_optuna.search.driver import job_name
from hydra_tune_optuna.search.pruner_checks import PrunerRemedies, choose_admission, useless_pruner
from hydra_tune_optuna.search.resume_sweep import going_on, keep_sampler
from hydra_tune_optuna.storage_opening import has_tables, open_storage
from hydra_tune_optuna.study import create_study
from hydra_tune_optuna.study_reader import GIVEN, given_params
from hydra_tune_optuna.weights import check_keeping, kept_weights

_NUM_NAMED = 5
_RUN = "run"  # key of a sweep folder's note on the present run
_REMEDIES = PrunerRemedies(
    staggered="hydra.admission: staggered",
    narrower="hydra.max_concurrent: {}",
    other="early_terminate.type: successive_halving",
)
_OUTCOMES: Mapping[TrialState, Outcome] = {
    TrialState.COMPLETE: "completed",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}


def run_sweep(request: SweepRequest) -> None:
    """Run a sweep as an Optuna study. An error of a single trial does not end the study, unless the observer says so.

    Raises:
        ConfigError: the storage cannot be opened, or the sampler's noted position is damaged.
        KeyboardInterrupt: Ctrl-C; every running trial was told as failed or, with checkpoints, is left to a later run.
        Terminated: SIGTERM, likewise.
    """
    with _quiet():
        study = _open(request)
        # Counted before the search claims any trial: a claimed trial would seem to belong to a living search.
        own_numbers, foreign_numbers = going_on(study, request.executor)
        num_going_on = len(own_numbers)
        earlier = tuple(_record(trial) for trial in study.get_trials(deepcopy=False) if _ended(trial))
        num_left, num_planned = _num_left(request.spec, earlier, num_going_on, _failed_before(request, earlier))
        request.observer.opened(study.study_name, earlier, num_planned)
        if foreign_numbers:
            request.observer.warned(_not_mine(foreign_numbers))
        choice = choose_admission(study, request.executor, n_trials=num_left)
        if choice.why is not None and request.spec.pruning is not None and request.executor.width > 1:
            request.observer.noted(choice.why)
        useless = useless_pruner(
            study,
            request.executor,
            n_trials=num_left,
            width=request.executor.width,
            choice=choice,
            remedies=_REMEDIES,
        )
        if useless is not None:
            request.observer.warned(useless)
        try:
            if num_left != 0 or num_going_on:
                _optimize(study, request, num_left, own_numbers)
        finally:
            # Also after an error or a signal: weights written so far are of use.
            request.observer.kept(kept_weights(study))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Optuna's own lines for each trial, which would repeat the observer's."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def _open(request: SweepRequest) -> PoolStudy:
    spec = request.spec
    sampler = make_sampler(spec)
    try:
        study = create_study(
            storage=open_storage(spec.storage),
            sampler=sampler,
            pruner=make_pruner(spec.pruning),
            study_name=spec.study,
            direction=spec.goal,
            load_if_exists=True,
            executor=request.executor,
            keep_best=spec.keep_best,
            weights_dir=spec.weights_dir,
        )
    except Exception as error:
        raise ConfigError(
            masked(f"{spec.at('hydra.storage')}: {spec.storage!r} cannot be opened: {message_line(error)}")
        ) from error
    # The observer in place of Optuna's log, which `_quiet` has silenced.
    study.tell_lost = request.observer.warned
    study.settled = request.observer.settled
    if request.folder is not None:
        try:
            keep_sampler(study, sampler, spec.seed, request.folder)
        except HydraTuneError as error:
            raise ConfigError(f"{spec.at('hydra.checkpoint_dir')}: {error}") from error
    return study


def check_sweep(spec: SweepSpec, *, resume: bool) -> tuple[int, int | None]:
    """Refuse a sweep that its study or its options would not let begin, as `StudyReader.check` says; creates nothing."""
    try:
        check_keeping(spec.keep_best, spec.weights_dir)
    except ConfigError as error:
        raise ConfigError(f"{spec.at('hydra.weights_dir')}: {error}") from error
    with _quiet():
        study = _stored(spec)
    if study is None:
        if resume:
            place = masked(absolute_storage(spec.storage or "", Path.cwd()))
            raise ConfigError(
                f"--resume: there is no study {spec.study!r} in {place} to go on with; "
                "give the command in the folder of the first run, or without --resume to begin another study"
            )
        earlier: tuple[TrialRecord, ...] = ()
    else:
        _check_study(study, spec)
        earlier = tuple(_record(trial) for trial in study.get_trials(deepcopy=False) if _ended(trial))
    failed = frozenset(record.number for record in earlier if record.state == "failed")
    return len(earlier), _num_left(spec, earlier, 0, failed)[0]


def _stored(spec: SweepSpec) -> Study | None:
    """Load the study of a sweep; None before its first run."""
    if spec.storage is None:
        return None
    try:
        storage = open_storage(spec.storage) if has_tables(spec.storage) else None
        if storage is None or spec.study not in optuna.get_all_study_names(storage):
            return None
        return optuna.load_study(study_name=spec.study, storage=storage)
    except Exception as error:
        raise ConfigError(
            masked(f"{spec.at('hydra.storage')}: {spec.storage!r} cannot be opened: {message_line(error)}")
        ) from error


def _check_study(study: Study, spec: SweepSpec) -> None:
    """Refuse a goal that Optuna would ignore, and a parameter that Optuna's storage would refuse in every new trial."""
    label = f"the study {study.study_name!r} in {masked(str(spec.storage))}"
    goals = " and ".join(direction.name.lower() for direction in study.directions)
    if goals != spec.goal:
        raise ConfigError(
            f"{spec.at('metric.goal')}: {label} is there already, and its goal is {goals}, not "
            f"{spec.goal}; give another hydra.study"
        )
    stored = {name: kept for trial in study.get_trials(deepcopy=False) for name, kept in trial.distributions.items()}
    for name, domain in (spec.parameters or {}).items():
        if name not in stored:
            continue
        try:
            check_distribution_compatibility(stored[name], to_distribution(domain))
        except ValueError as error:
            raise ConfigError(
                f"{spec.at(f'parameters.{name}')}: {label} is there already, with "
                f"{stored[name]} for {name}, and Optuna's storages take no other kind and no other choices; give another "
                "hydra.study"
            ) from error


def _not_mine(numbers: Sequence[int]) -> str:
    text = ", ".join(map(str, numbers[:_NUM_NAMED])) + (", ..." if len(numbers) > _NUM_NAMED else "")
    are = "trial {} is" if len(numbers) == 1 else "trials {} are"
    return (
        f"{are.format(text)} running in the storage, and not from this checkpoint_dir: in another process, or one that died "
        "without saving; not waited for"
    )


def make_sampler(spec: SweepSpec) -> BaseSampler:
    """Optuna's sampler for the sweep's `method`."""
    match spec.method:
        case "grid":
            return GridSampler(_grid(spec.parameters or {}), seed=spec.seed)
        case "random":
            return RandomSampler(seed=spec.seed)
        case "bayes":
            return TPESampler(seed=spec.seed)


def _grid(parameters: Mapping[str, Domain]) -> dict[str, list[Any]]:
    return {name: list(domain.grid() or ()) for name, domain in parameters.items()}


def make_pruner(pruning: PruningRule | None) -> BasePruner:
    """Optuna's pruner for the sweep's `early_terminate`; without the option no trial is pruned."""
    if pruning is None:
        return NopPruner()
    options = dict(pruning.options)
    match pruning.type:
        case "hyperband":
            return HyperbandPruner(
                min_resource=options["min_iter"],
                max_resource=options.get("max_iter", "auto"),
                reduction_factor=options["eta"],
            )
        case "successive_halving":
            return SuccessiveHalvingPruner(
                min_resource=options["min_iter"],
                reduction_factor=options["eta"],
                min_early_stopping_rate=options["min_early_stopping_rate"],
            )
        case "median":
            return MedianPruner(**options)
        case other:
            raise ConfigError(f"early_terminate type {other!r} is not one that Optuna has here")


def to_distribution(domain: Domain) -> BaseDistribution:
    """Optuna's distribution of a domain."""
    match domain:
        case ChoiceDomain():
            return CategoricalDistribution(domain.values)
        case IntDomain():
            return IntDistribution(domain.low, domain.high, step=domain.step, log=domain.log)
        case FloatDomain():
            return FloatDistribution(domain.low, domain.high, step=domain.step, log=domain.log)


def suggest(trial: Trial, name: str, domain: Domain) -> Any:
    """Draw one parameter; return its value for the task."""
    match domain:
        case ChoiceDomain():
            return trial.suggest_categorical(name, domain.values)
        case IntDomain():
            return trial.suggest_int(name, domain.low, domain.high, step=domain.step, log=domain.log)
        case FloatDomain():
            drawn_value = trial.suggest_float(name, domain.low, domain.high, step=domain.step, log=domain.log)
            if domain.multiple is None:
                return drawn_value
            # Noted with the trial: a resumed trial and every reader keep the value after the sweep file has changed.
            return optuna_internals.noted_once(trial, GIVEN + name, domain.settle(drawn_value))


def _ended(trial: FrozenTrial) -> bool:
    return trial.state in _OUTCOMES


def _record(trial: FrozenTrial) -> TrialRecord:
    return TrialRecord(
        number=trial.number,
        state=_OUTCOMES[trial.state],
        value=trial.value,
        params=given_params(trial),
        is_feasible=not optuna_internals.violates_constraints(trial),
    )


def _failed_before(request: SweepRequest, earlier: tuple[TrialRecord, ...]) -> frozenset[int]:
    """Numbers of the trials that failed before this run began, counting all processes of the run as one."""
    failed = [record.number for record in earlier if record.state == "failed"]
    if request.folder is not None:
        # The parent's id is common to all processes of a run.
        note, run = request.folder.noted(_RUN) or {}, os.getppid()
        if request.crashes and note.get("run") == run:
            return frozenset(note["failed"])
        request.folder.note(_RUN, {"run": run, "failed": failed})
    return frozenset(failed)


def _num_left(
    spec: SweepSpec, earlier: tuple[TrialRecord, ...], num_going_on: int, again: frozenset[int]
) -> tuple[int | None, int | None]:
    """Count the trials still to ask for, and the trials that the study will then have.

    Failed trials in `again` are run once more, except points of a grid: the sampler counts failed points as visited.
    Trials that resume from a checkpoint are not asked for.
    """
    # Resumed trials keep their numbers, so they are no new trials of the study.
    ended = len(earlier) + num_going_on
    if spec.method == "grid":
        num_left = max(0, grid_size(spec.parameters or {}) - ended)
        if spec.run_cap is not None:
            num_left = min(num_left, max(0, spec.run_cap - ended))
    elif spec.run_cap is None:
        return None, None
    else:
        num_left = max(0, spec.run_cap - num_going_on - sum(record.number not in again for record in earlier))
    return num_left, ended + num_left


def _optimize(study: PoolStudy, request: SweepRequest, num_left: int | None, going_on_numbers: frozenset[int]) -> None:
    observer = request.observer
    told_numbers: set[int] = set()

    def ended(trial: FrozenTrial) -> None:
        told_numbers.add(trial.number)
        if observer.finished(_record(trial)):
            study.stop()

    asked_numbers: set[int] = set()
    try:
        # A failed trial does not end a sweep by itself, so every Exception is caught: the observer decides.
        study.optimize(
            _objective(request, asked_numbers.add),
            n_trials=num_left,
            timeout=request.timeout_seconds,
            catch=(Exception,),
            callbacks=[lambda _study, trial: ended(trial)],
        )
    finally:
        # Trials that a signal or an error ended together with the sweep had no callback.
        for trial in study.get_trials(deepcopy=False):
            if trial.number in asked_numbers - told_numbers:
                if _ended(trial):
                    observer.finished(_record(trial))
                else:
                    observer.left(trial.number)
        # Trials of an earlier run that this one was to go on with, and has not come to.
        for number in sorted(going_on_numbers - asked_numbers):
            observer.asked(number)
            observer.left(number)


def _objective(request: SweepRequest, asked: Callable[[int], None]) -> Callable[[Trial], TrainTask]:
    spec, observer = request.spec, request.observer

    def build(trial: Trial) -> tuple[TrainTask, Mapping[str, Any]]:
        """Return the trial's task and parameters, or raise the noted error of a trial that crashed the process twice."""
        # A trial that crashed the process twice fails here, before its code runs again.
        if job_name(trial.number) in request.aside:
            raise request.aside[job_name(trial.number)]
        # Marked for the supervisor, because building a task may crash the process, too.
        with at_work(job_name(trial.number)):
            if spec.parameters is None:
                task = request.build(trial)
                # Drawn by the user's function itself, and so known only after the build.
                return task, trial.params
            params = {name: suggest(trial, name, domain) for name, domain in spec.parameters.items()}
            return request.build(**params), params

    def objective(trial: Any) -> TrainTask:
        """Build the trial's task for `PoolStudy.optimize`, and report the trial and an error of the build to the observer.

        The search gives an ended trial, too, to recover the trial's weights. The observer knows the end already.
        """
        if not isinstance(trial, Trial):
            return build(trial)[0]
        asked(trial.number)
        observer.asked(trial.number)
        try:
            task, params = build(trial)
        # No error: the objective ends its own trial.
        except optuna.TrialPruned:
            raise
        except Exception as error:
            observer.broke(trial.number, error)
            raise
        observer.built(trial.number, params, task)
        return task

    return objective
