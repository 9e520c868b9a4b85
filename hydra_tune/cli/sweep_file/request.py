"""The interface between the command line and tuners.

`cli/run/sweep_run.py` fills a `SweepRequest` just before the sweep begins, and `cli/run/cluster.py` a `ClusterRequest`; a
tuner, found through the entry points `hydra_tune.tuners` or `hydra_tune.cluster_tuners`, runs the sweep and reports events
to a `SweepObserver`, the `SweepProgressTracker` of `cli/display/board.py`. The tuners are
`integrations/hydra_tune_optuna/sweep.py` and, for a cluster, `integrations/hydra_tune_ray/sweep.py`. The command line
must import no tuner. The module imports torch by way of the executor.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from hydra_tune.checkpoint.sweep_folder import SweepFolder
from hydra_tune.cli.sweep_file.spec import SweepSpec
from hydra_tune.errors import HydraTuneError
from hydra_tune.executor import HydraExecutor
from hydra_tune.task import TrainTask

Outcome = Literal["completed", "pruned", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """The end of a trial.

    Args:
        number: the tuner's number of the trial, from 0.
        value: the metric, or None without a value.
        is_feasible: whether the trial violates no constraints.
    """

    number: int
    state: Outcome
    value: float | None
    params: Mapping[str, Any]
    is_feasible: bool = True


class SweepObserver(Protocol):
    """Receiver of a tuner's events; all calls come from the thread that runs the tuner."""

    def opened(self, study: str, earlier: tuple[TrialRecord, ...], num_planned: int | None) -> None:
        """The study is open: its name, the trials ended before this run, and the number of trials planned."""

    def noted(self, text: str) -> None:
        """The sweep says how it goes."""

    def warned(self, text: str) -> None:
        """The sweep can run, but probably not as intended."""

    def asked(self, number: int) -> None:
        """A trial exists; its task is about to be built."""

    def built(self, number: int, params: Mapping[str, Any], task: TrainTask) -> None:
        """A trial's task is about to be submitted."""

    def broke(self, number: int, error: Exception) -> None:
        """A trial's task could not be built."""

    def kept(self, weights: Mapping[int, Path]) -> None:
        """The sweep is over; files of the kept weights, by trial, the best first."""

    def finished(self, record: TrialRecord) -> bool:
        """A trial ended. Return True to ask for no more trials."""

    def left(self, number: int) -> None:
        """A trial of this run is left for a later run to resume."""

    def settled(self) -> None:
        """An interrupted sweep has stored the fate of its trials, or need not: the process may end at any moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest:
    """Everything that a tuner needs to run a sweep.

    Args:
        build: builds the task: from the drawn parameters by keyword, or from the trial for a file without parameters.
        timeout_seconds: no new trial starts after this time; None: no limit.
        folder: the sweep's own folder beside the checkpoints of its trials; None: trials are not saved.
        crashes: number of processes of this run that crashed before this process, which resumes their trials.
        aside: trials that fail without being built or trained, because they crashed earlier processes: the error of each,
            by the name of its job, `trial N`.
    """

    spec: SweepSpec
    executor: HydraExecutor
    build: Callable[..., TrainTask]
    observer: SweepObserver
    timeout_seconds: float | None = None
    folder: SweepFolder | None = None
    crashes: int = 0
    aside: Mapping[str, HydraTuneError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRequest:
    """Everything that a tuner needs to run a sweep on a cluster with a pool on each node.

    `function` is the function named by `task:`, from a module of this process. `build` takes the drawn parameters by
    keyword.
    """

    spec: SweepSpec
    address: str
    function: Callable[..., Any]
    build: Callable[..., TrainTask]
    observer: SweepObserver


ClusterTuner = Callable[[ClusterRequest], None]
"""Runs a sweep on a cluster until the end, as a `Tuner`; looked up in the entry points `hydra_tune.cluster_tuners`."""

Tuner = Callable[[SweepRequest], None]
"""Runs a sweep until the end. Raises `ConfigError` before the first trial if the sweep cannot run. Lets KeyboardInterrupt and
Terminated through once the study knows each running trial as failed or, where trials are saved, as one to resume.
"""
