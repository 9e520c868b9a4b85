"""Runs a sweep from a checked sweep file on a Ray cluster: sets up tuner and display; the pools run on the nodes.

`cli/commands/sweep.py` calls `run_cluster_sweep` for `--ray`, once the sweep file is read and merged with the options.
No pool is opened in this process, so the display shows no devices and no units. The module must not import Ray or another
tuner: the entry point `ray` leads to the tuner (`integrations/hydra_tune_ray/sweep.py`).
"""

from functools import partial

from hydra_tune.cli.display.board import SweepProgressTracker
from hydra_tune.cli.display.output import SweepOutput
from hydra_tune.cli.run.sweep_run import DONE, FAILED, INTERRUPTED, show_run
from hydra_tune.cli.run.task_building import TaskBuilder
from hydra_tune.cli.run.task_ref import load_task
from hydra_tune.cli.run.tuners import CLUSTERS, find
from hydra_tune.cli.sweep_file.domains import grid_size
from hydra_tune.cli.sweep_file.options import DisplayOptions
from hydra_tune.cli.sweep_file.request import ClusterRequest
from hydra_tune.cli.sweep_file.spec import SweepSpec
from hydra_tune.errors import SweepFileError
from hydra_tune.pool.stats import PoolStats

TUNER = "ray"

_ELSEWHERE = PoolStats(devices={}, units_run=0, units_saved=0, elapsed_seconds=0.0, scheduler_seconds=0.0)
"""Empty statistics for devices on other machines."""

_REFUSED = {
    "storage": "Ray keeps the results of its searches itself",
    "keep_best": "Ray keeps the last weights of all trials, as checkpoints",
    "checkpoint_dir": "Ray saves and restores its trials itself",
}


def run_cluster_sweep(spec: SweepSpec, display: DisplayOptions, address: str) -> int:
    """Run a sweep on the Ray cluster at an address and show the result; return the exit code of the program."""
    output = SweepOutput(display)
    board = SweepProgressTracker(spec, output.log)
    _check(spec)
    with output.quiet():
        # The user's module may print while it is imported.
        function, tuner = load_task(spec), find(CLUSTERS, TUNER)
        request = ClusterRequest(
            spec=spec,
            address=address,
            function=function,
            build=TaskBuilder(spec=spec, function=function),
            observer=board,
        )
        show_run(partial(tuner, request), board, output, lambda: _ELSEWHERE)
    view = board.snapshot(_ELSEWHERE)
    output.report(view)
    if view.status == "interrupted":
        return INTERRUPTED
    return DONE if view.status == "completed" and view.best is not None else FAILED


def _check(spec: SweepSpec) -> None:
    for option, why in _REFUSED.items():
        if getattr(spec, option) is not None:
            raise SweepFileError(f"{spec.at(f'hydra.{option}')} is not for sweeps on a Ray cluster: {why}")
    if spec.parameters is None:
        raise SweepFileError(f"{spec.file}: a sweep on a Ray cluster needs parameters, which Ray draws")
    if spec.method == "grid" and spec.run_cap is not None and spec.run_cap < grid_size(spec.parameters):
        raise SweepFileError(
            f"{spec.at('run_cap')}: on a Ray cluster a grid is trained whole, and this one has "
            f"{grid_size(spec.parameters)} points; leave run_cap out, or out of --run-cap, or use method: random"
        )
    if spec.run_cap is None and spec.method != "grid":
        raise SweepFileError(f"{spec.file}: a sweep on a Ray cluster needs run_cap, the number of its trials")
