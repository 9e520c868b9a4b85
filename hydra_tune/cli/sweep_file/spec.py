"""A sweep in plain values: the sweep file, read and checked.

`read_sweep_file` (`reader.py`) makes the `SweepSpec` at the start of a command. `cli/run/sweep_run.py` then makes the
pool with the options in the `SweepSpec`, and `integrations/hydra_tune_optuna/sweep.py` the study; `cli/run/cluster.py` and
`integrations/hydra_tune_ray/sweep.py` run the sweep on Ray. `cli/display/`, `cli/dry_run/` and `cli/inspect/` read a
`SweepSpec`, too. Options of the command line make another `SweepSpec` (`options.py`, `overrides.py`,
`cli/dry_run/planning.py`). The module must know neither YAML nor any tuner, and must not load torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hydra_tune.cli.sweep_file.domains import Domain

Goal = Literal["minimize", "maximize"]
STOP_SECONDS = 30.0
"""Default time between Ctrl-C or SIGTERM and the end of the sweep's process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningRule:
    """Rule for ending trials early.

    Args:
        type: `hyperband`, `successive_halving` or `median`.
        options: options with a written or default value, by their name in the sweep file.
    """

    type: str
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSpec:
    """A sweep file, read and checked.

    Args:
        file: path of the file, as given.
        task: `module:function`.
        metric: the name of the optimized metric, as reported by the task.
        parameters: domain of each keyword argument of the function; None: the function receives the trial.
        run_cap: trials of the whole study; None: no limit.
        seed: of the tuner's own draws; None: another search every time.
        name: for people, and the study's name where the file has no `hydra.study`.
        study: the name of the study in the storage; None: neither the file's `name` nor `hydra.study` is given.
        storage: storage of the study; None: in memory.
        keep_best: number of best trials whose weights are kept; None: no weights are kept.
        weights_dir: the folder for the weights; None: the tuner's default.
        checkpoint_dir: the folder for the checkpoints of trials; None: no checkpoints.
        checkpoint_every: interval of checkpoints, as written in the file; None: at reports.
        stop_seconds: time from Ctrl-C or SIGTERM to the end of the process.
        engine: arguments of `HydraExecutor` given in the file or by options.
        places: `file:line:column` of each key in the file, by its dotted path; without keys of `hydra:` that
            options override.
    """

    file: str
    task: str
    metric: str
    goal: Goal = "minimize"
    method: Literal["bayes", "random", "grid"] = "bayes"
    parameters: Mapping[str, Domain] | None = None
    run_cap: int | None = None
    pruning: PruningRule | None = None
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
        """Return `file:line:column: path`, or `path` alone for a key not in the file."""
        place = self.places.get(path)
        return f"{place}: {path}" if place else path
