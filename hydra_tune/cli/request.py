"""How a tuner is asked to run a sweep.

The command line fills a `SweepRequest`; a tuner, found through the entry points of the group `hydra_tune.tuners`,
runs it and tells a `SweepObserver` what happens. Neither side imports the other.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from hydra_tune.checkpoint.sweep_folder import SweepFolder
from hydra_tune.cli.spec import SweepSpec
from hydra_tune.errors import HydraTuneError
from hydra_tune.executor import HydraExecutor
from hydra_tune.task import TrainTask

Outcome = Literal["completed", "pruned", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """How a trial ended.

    Args:
        number: the tuner's number of the trial, from 0.
        state: how it ended.
        value: the metric, None if there is none.
        params: what was drawn.
    """

    number: int
    state: Outcome
    value: float | None
    params: Mapping[str, Any]


class SweepObserver(Protocol):
    """What a tuner tells while it runs; all from the thread that runs the tuner."""

    def opened(self, study: str, earlier: tuple[TrialRecord, ...], num_planned: int | None) -> None:
        """The study is open. It has a name, trials that ended before this run, and a number of trials to have."""

    def warned(self, text: str) -> None:
        """The sweep can run, but not as whoever wrote it will have meant."""

    def asked(self, number: int) -> None:
        """A trial exists; its task is about to be built."""

    def built(self, number: int, params: Mapping[str, Any], task: TrainTask) -> None:
        """A trial's task is about to be submitted."""

    def broke(self, number: int, error: Exception) -> None:
        """A trial's task could not be built."""

    def kept(self, weights: Mapping[int, Path]) -> None:
        """The sweep is over, and these are the files of the weights that are kept, by trial, the best first."""

    def finished(self, record: TrialRecord) -> bool:
        """A trial ended. True: ask for no more trials."""

    def left(self, number: int) -> None:
        """A trial of this run is left to be gone on with by a later one."""

    def settled(self) -> None:
        """A sweep that is cut short has noted what becomes of its trials, or need not: the process may end at any moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest:
    """What a tuner needs to run a sweep.

    Args:
        spec: the sweep.
        executor: the pool.
        build: makes the task: with the drawn parameters by keyword, or with the trial where the file has none.
        observer: is told what happens.
        timeout_seconds: no new trial is started after this; None: no limit.
        folder: the sweep's own folder beside the checkpoints of its trials; None: these are not saved.
        resume: whether there has to be a study already.
        crashes: how many processes of this run have crashed before this one, which goes on with what they have left.
        aside: trials that fail without being built or trained, by the names of their jobs, `trial N`, with the error of each.
    """

    spec: SweepSpec
    executor: HydraExecutor
    build: Callable[..., TrainTask]
    observer: SweepObserver
    timeout_seconds: float | None = None
    folder: SweepFolder | None = None
    resume: bool = False
    crashes: int = 0
    aside: Mapping[str, HydraTuneError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRequest:
    """What a tuner needs to run a sweep on a cluster, whose nodes have pools of their own.

    Args:
        spec: the sweep.
        address: of the cluster.
        function: what `task:` names, from a module of this process.
        build: makes the task from the drawn parameters, by keyword.
        observer: is told what happens.
    """

    spec: SweepSpec
    address: str
    function: Callable[..., Any]
    build: Callable[..., TrainTask]
    observer: SweepObserver


ClusterTuner = Callable[[ClusterRequest], None]
"""Runs a sweep until it is done, as a `Tuner`; found in the group `hydra_tune.cluster_tuners`."""

Tuner = Callable[[SweepRequest], None]
"""Runs a sweep until it is done. Raises `ConfigError` before the first trial if it cannot, and lets KeyboardInterrupt and
Terminated through after every running trial was told that it failed or, where trials are saved, is left to be gone on with."""
