"""Runs the sweeps of the command line on a Ray cluster: the entry point `ray` of the group `hydra_tune.cluster_tuners`.

The module translates a sweep's terms into Ray's search space, scheduler and searcher, and reports progress to the observer.
`hydra-tune sweep --ray` (`hydra_tune/cli/run/cluster.py`) calls `run_sweep` once the sweep file has been checked. Ray calls
the observer's callback in the driver alone; a pickle of the callback is inert elsewhere. Once connected, `run_sweep` must
shut Ray down at the end, also after an error: a shutdown ends a cluster that was begun for the sweep.
"""

import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray._private import services
from ray.tune.experiment import Trial
from ray.tune.result import DONE
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, MedianStoppingRule, TrialScheduler
from ray.tune.search import BasicVariantGenerator, Searcher

from hydra_tune.cli.sweep_file.domains import Domain, FloatDomain, IntDomain
from hydra_tune.cli.sweep_file.request import ClusterRequest, SweepObserver, TrialRecord
from hydra_tune.cli.sweep_file.spec import PruningRule, SweepSpec
from hydra_tune.errors import ConfigError
from hydra_tune_ray import trainable  # an import of the module itself would take the function's place in the package
from hydra_tune_ray.callback import PoolCallback
from hydra_tune_ray.checkpoint_transfer import NOTE
from hydra_tune_ray.errors import TrialError
from hydra_tune_ray.pools import Pools, start_pools

_CONNECT_SECONDS = 10.0
_UNLIMITED = 10**9
_NEW = "local"


def run_sweep(request: ClusterRequest) -> None:
    """Run a sweep with Ray Tune, in a pool on each node of a cluster.

    Raises:
        ConfigError: no such cluster, a cluster without devices, or a sweep with a feature that Ray lacks.
    """
    spec = request.spec
    scheduler, search = scheduler_of(spec.pruning), searcher_of(spec)
    _connect(request.address, Path(spec.file).resolve().parent)
    try:
        # Pickle the sweep file's module by value, since the file is on this machine only; its imports must exist on the
        # nodes.
        module = sys.modules[request.function.__module__]
        ray.cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
        with start_pools(**spec.engine) as pools:
            request.observer.opened(spec.name or spec.task, (), spec.run_cap)
            _search(request, pools, scheduler, search)
    finally:
        # Also ends a cluster that was begun for this sweep.
        ray.shutdown()


def _connect(address: str, folder: Path) -> None:
    """Connect to a cluster, whose processes find modules beside the sweep file, too, where they have its folder."""
    # As `task_ref` does in this process. Ray replaces the variable by the node's own.
    environment = {"env_vars": {"PYTHONPATH": f"{folder}{os.pathsep}${{PYTHONPATH}}"}}
    try:
        if address == _NEW:
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env=environment,
            )
        else:
            _check_listens(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, runtime_env=environment)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--ray: there is no Ray cluster at {address!r}: {str(error).splitlines()[0]}; start one with "
            "`ray start --head`, or give the address that it says, or local"
        ) from error


def _check_listens(address: str) -> None:
    """Check that a cluster listens at the address: Ray itself would retry for minutes, with an unclear message.

    Raises:
        OSError: nothing listens there.
        ValueError: not an address.
    """
    if "://" in address:
        return
    # Resolve as Ray does: "auto" comes from a file or the environment, and 127.0.0.1 becomes this machine's address.
    resolved = services.canonicalize_bootstrap_address(address)
    if resolved is None:
        return
    host, _, port = resolved.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"nobody listens at {resolved} ({error})") from error


def _search(request: ClusterRequest, pools: Pools, scheduler: TrialScheduler, search: Any) -> None:
    spec = request.spec
    assert spec.parameters is not None, "checked before"
    width = sum(pool.width for pool in pools.figures())
    observer_callback = _ObserverCallback(spec, request.observer)
    tune.Tuner(
        trainable(_taking_names(request.build, spec.parameters), pools=pools),
        param_space={name: space_of(domain, spec.method) for name, domain in spec.parameters.items()},
        tune_config=tune.TuneConfig(
            metric=spec.metric,
            mode="min" if spec.goal == "minimize" else "max",
            # Ray repeats a whole grid `num_samples` times.
            num_samples=1 if spec.method == "grid" else spec.run_cap or 1,
            scheduler=scheduler,
            search_alg=search,
            max_concurrent_trials=width,
            # `PoolTrainable` takes the config of another trial in place, which saves the start of a process.
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            name=spec.study or spec.name,
            verbose=0,
            callbacks=[PoolCallback(pools), observer_callback],
            stop=observer_callback.stopper,
        ),
    ).fit()


def space_of(domain: Domain, method: str) -> Any:
    """Ray's search space of a parameter."""
    if method == "grid":
        return tune.grid_search(list(domain.grid() or ()))
    match domain:
        case IntDomain() if domain.log:
            # Ray's ranges of whole numbers end before their upper limit.
            return tune.lograndint(domain.low, domain.high + 1)
        case FloatDomain() if domain.log:
            return tune.loguniform(domain.low, domain.high)
        case IntDomain(step=1):
            return tune.randint(domain.low, domain.high + 1)
        case FloatDomain(step=None):
            return tune.uniform(domain.low, domain.high)
        case _:
            # Choices, and ranges with a step: an explicit list keeps exactly the sweep's values.
            return tune.choice(list(domain.grid() or ()))


def scheduler_of(pruning: PruningRule | None) -> TrialScheduler:
    """Ray's scheduler for the sweep's `early_terminate`.

    Raises:
        ConfigError: a rule that Ray lacks in this form.
    """
    if pruning is None:
        return FIFOScheduler()  # type: ignore[no-untyped-call]
    options = dict(pruning.options)
    match pruning.type:
        case "successive_halving":
            # Successive halving skips the first rungs: each unit of the rate multiplies the first by eta.
            first = options["min_iter"] * options["eta"] ** options["min_early_stopping_rate"]
            return ASHAScheduler(max_t=_UNLIMITED, grace_period=first, reduction_factor=options["eta"])
        case "hyperband" if options.get("max_iter") is not None:
            return ASHAScheduler(
                max_t=options["max_iter"],
                grace_period=options["min_iter"],
                reduction_factor=options["eta"],
                brackets=3,
                stop_last_trials=False,  # a trial longer than max_iter goes on to its end, as with Optuna
            )
        case "hyperband":
            raise ConfigError(
                "early_terminate.max_iter: on a Ray cluster hyperband needs the most iterations of a trial"
            )
        case "median":
            return MedianStoppingRule(
                # Ray counts iterations from 1, and judges from the grace period on.
                grace_period=options["n_warmup_steps"] + 1,
                min_samples_required=max(options["n_startup_trials"], options["n_min_trials"]),
            )
        case other:
            raise ConfigError(f"early_terminate type {other!r} is not one that Ray has here")


def searcher_of(spec: SweepSpec) -> "Searcher | BasicVariantGenerator":
    """Ray's searcher for the sweep's `method`.

    Raises:
        ConfigError: TPE, without Optuna.
    """
    if spec.method != "bayes":
        return BasicVariantGenerator(random_state=spec.seed)
    try:
        from optuna.samplers import TPESampler  # noqa: PLC0415 - only this method needs it
        from ray.tune.search.optuna import OptunaSearch  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            "method: bayes is Optuna's TPE, and Optuna is not installed: pip install 'hydra-tune[optuna]'"
        ) from error
    return OptunaSearch(sampler=TPESampler(seed=spec.seed))


def _taking_names(build: Callable[..., Any], parameters: Mapping[str, Domain]) -> Callable[[Mapping[str, Any]], Any]:
    def sweep(config: Mapping[str, Any]) -> Any:
        return build(**{name: _given(parameters[name], drawn) for name, drawn in config.items()})

    return sweep


def _given(domain: Domain, drawn: Any) -> Any:
    """Value for the task, from Ray's sample."""
    return domain.settle(drawn) if isinstance(domain, FloatDomain) else drawn


_LIVE: dict[int, Any] = {}
"""Callbacks and stoppers of this process: Ray pickles callbacks, and their observers cannot be pickled."""


def _found(key: int, kind: "type[tune.Callback | tune.Stopper]") -> Any:
    """Return the pickled object itself in its own process, and an inert substitute elsewhere."""
    return _LIVE.get(key) or (tune.Callback() if kind is tune.Callback else _ObserverStopper())


class _ObserverCallback(tune.Callback):
    """Reports the fate of trials to the observer, and ends the search when the observer asks for it."""

    def __init__(self, spec: SweepSpec, observer: SweepObserver) -> None:
        self.stopper = _ObserverStopper()
        _LIVE[id(self)] = self
        self._spec = spec
        self._observer = observer
        self._numbers: dict[str, int] = {}
        self._stopped: set[str] = set()

    def __reduce__(self) -> Any:
        return _found, (id(self), tune.Callback)

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:  # noqa: ARG002
        if trial.trial_id not in self._numbers:
            self._numbers[trial.trial_id] = len(self._numbers)
            self._observer.asked(self._numbers[trial.trial_id])

    def on_trial_result(
        self,
        iteration: int,  # noqa: ARG002 - the arguments are Ray's
        trials: list[Trial],  # noqa: ARG002
        trial: Trial,
        result: dict[str, Any],
        **info: Any,  # noqa: ARG002
    ) -> None:
        """Note a trial that a scheduler or a stopper ends; Ray marks the last result of such a trial."""
        if result.get(DONE) and not result.get("is_last"):
            self._stopped.add(trial.trial_id)

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:  # noqa: ARG002
        # Ray calls a trial complete that a scheduler has stopped, too. A trial that trains on after its last report, as with
        # `report_every`, completes without a result of its own.
        is_pruned = trial.trial_id in self._stopped or _has_pruned_itself(trial)
        self._finished(trial, "pruned" if is_pruned else "completed")

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:  # noqa: ARG002
        # Not `trial.get_error()`: Ray copies the file there only later.
        lines = (trial.error_file and Path(trial.error_file).read_text().strip().splitlines()) or ["failed"]
        if trial.trial_id in self._numbers:
            self._observer.broke(self._numbers[trial.trial_id], TrialError(lines[-1]))
        self._finished(trial, "failed")

    def _finished(self, trial: Trial, state: Any) -> None:
        if trial.trial_id not in self._numbers:
            return  # the trial has never begun
        assert self._spec.parameters is not None
        record = TrialRecord(
            number=self._numbers[trial.trial_id],
            state=state,
            value=None if state == "failed" else (trial.last_result or {}).get(self._spec.metric),
            params={name: _given(domain, trial.config[name]) for name, domain in self._spec.parameters.items()},
        )
        if self._observer.finished(record):
            self.stopper.is_over = True


def _has_pruned_itself(trial: Trial) -> bool:
    """Whether a trial has diverged after its last report: Ray has no result of that, and saves the trial at its end."""
    kept = trial.checkpoint
    if kept is None or kept.filesystem is None:
        return False
    return bool(kept.filesystem.get_file_info(f"{kept.path}/{NOTE}").is_file)


class _ObserverStopper(tune.Stopper):
    """Ends the search once the observer has asked for the end."""

    def __init__(self) -> None:
        self.is_over = False
        _LIVE[id(self)] = self

    def __reduce__(self) -> Any:
        return _found, (id(self), tune.Stopper)

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:  # noqa: ARG002 - Ray's signature
        return self.is_over

    def stop_all(self) -> bool:
        return self.is_over
