"""What a sweep is, in plain values: the sweep file, read and checked. It knows neither YAML nor any tuner."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hydra_tune.cli.domains import Domain

Goal = Literal["minimize", "maximize"]
STOP_SECONDS = 30.0
"""How soon after Ctrl-C or SIGTERM a sweep's process ends, unless said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """When a trial is ended early.

    Args:
        type: `hyperband`, `successive_halving` or `median`.
        options: the options that were written or have a default, by their name in the sweep file.
    """

    type: str
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSpec:
    """A sweep file, read and checked.

    Args:
        file: path of the file, as given.
        task: `module:function`.
        metric: the name of what is optimized, as the task reports it.
        goal: the direction.
        method: how parameters are drawn.
        parameters: what each keyword argument of the function may be; None: the function is given the trial.
        run_cap: trials of the whole study; None: no limit.
        pruning: when trials are ended early; None: never.
        seed: of the tuner's own draws; None: another search every time.
        name: for people, and the study's name where `study` is None.
        study: the name under which the storage keeps the study.
        storage: where the study is kept; None: in memory.
        keep_best: of how many of the best trials the weights are kept; None: of none.
        weights_dir: the folder for them; None: the tuner's default.
        checkpoint_dir: the folder for the checkpoints of trials; None: they are not saved.
        checkpoint_every: how often they are saved, as it was written; None: at their reports.
        stop_seconds: how soon after Ctrl-C or SIGTERM the process ends.
        engine: arguments of `HydraExecutor` that were written.
        places: `file:line:column` of each key that was written, by its dotted path.
    """

    file: str
    task: str
    metric: str
    goal: Goal = "minimize"
    method: Literal["bayes", "random", "grid"] = "bayes"
    parameters: Mapping[str, Domain] | None = None
    run_cap: int | None = None
    pruning: Pruning | None = None
    seed: int | None = None
    name: str | None = None
    study: str | None = None
    storage: str | None = None
    keep_best: int | None = None
    weights_dir: str | None = None
    checkpoint_dir: str | None = None
    checkpoint_every: str | int | None = None
    stop_seconds: float = STOP_SECONDS
    engine: Mapping[str, Any] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)

    def at(self, path: str) -> str:
        """`file:line:column: path`, or `path` alone if it was not written in the file."""
        place = self.places.get(path)
        return f"{place}: {path}" if place else path
