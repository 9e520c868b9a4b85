"""Plans configurations of a checked sweep file, each as if alone in the pool.

`cli/commands/plan.py` calls `run_plan` for `hydra-tune plan`, once the sweep file is read and checked. The module must
train nothing, and create no study and no folder of the sweep. The command imports the module when called, because the
module imports torch. An error of a single configuration does not end the others.
"""

import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from rich.console import Console

from hydra_tune.cli.display.output import SweepOutput
from hydra_tune.cli.dry_run.plan_figures import print_figures
from hydra_tune.cli.dry_run.plan_table import ConfigurationForecast, print_planned
from hydra_tune.cli.dry_run.sampling import grid, sample
from hydra_tune.cli.run.sweep_run import DONE, FAILED, opened
from hydra_tune.cli.run.task_building import TaskBuilder
from hydra_tune.cli.run.task_ref import load_task
from hydra_tune.cli.sweep_file.domains import Domain, Scalar, grid_size
from hydra_tune.cli.sweep_file.options import DisplayOptions
from hydra_tune.cli.sweep_file.spec import SweepSpec
from hydra_tune.errors import BudgetError, HydraTuneError, SweepFileError, TaskError
from hydra_tune.executor import HydraExecutor
from hydra_tune.pool.dry_run.report import PoolForecast
from hydra_tune.shapes_only import has_shapes_only
from hydra_tune.task import TrainTask


def run_plan(
    spec: SweepSpec,
    given: Mapping[str, str | None],
    *,
    count: int,
    seed: int,
    as_json: bool,
    probe: bool = False,
    profile: bool | int = False,
) -> int:
    """Plan `count` configurations of a sweep and show the plans; return the exit code of the program.

    Options of the executor in `given` override the file's; None where not given. `probe` and `profile` are as of
    `HydraExecutor.plan`. With `as_json`, standard output has one JSON object and nothing else.
    """
    output = SweepOutput(DisplayOptions(as_json=as_json, live=False))
    # The stream of before, because the user's code may replace `sys.stdout` for good.
    stdout = sys.stdout
    with output.quiet():
        parameters = _parameters(spec)
        build = TaskBuilder(spec=spec, function=load_task(spec))
        overridden = _overridden(spec, given)
        # Such an executor lets CPU devices stand in for missing GPUs, without taking their memory.
        with opened(overridden, partial(HydraExecutor, plans_only=True)) as pool:
            points = _points(spec, parameters, count, seed)
            plan = partial(pool.plan, probe=probe, profile=profile)
            configurations = [_planned(number, params, build, plan) for number, params in enumerate(points)]
            notes = [*_stood_for(str(overridden.engine.get("devices", "auto")), pool), *_made_up(configurations)]
    if as_json:
        trials = [configuration.to_json() for configuration in configurations]
        json.dump({"file": spec.file, "task": spec.task, "notes": notes, "trials": trials}, stdout)
        stdout.write("\n")
    else:
        shows_fusion = probe or overridden.engine.get("fusion", "off") != "off"
        console = Console(file=stdout, highlight=False)
        print_planned(console, configurations, notes, shows_fusion=shows_fusion)
        print_figures(
            console,
            [
                (configuration.number, configuration.forecast)
                for configuration in configurations
                if configuration.forecast is not None
            ],
        )
    return FAILED if any(configuration.forecast is None for configuration in configurations) else DONE


def _points(spec: SweepSpec, parameters: Mapping[str, Domain], count: int, seed: int) -> list[dict[str, Scalar]]:
    if spec.method == "grid" and count >= grid_size(parameters):
        return grid(parameters)
    return sample(parameters, count, seed)


def _stood_for(asked: str, pool: HydraExecutor) -> list[str]:
    names = pool.device_names
    # GPUs were asked for, and the executor has put CPU devices in their places.
    if "cuda" not in asked or not all(name.startswith("cpu") for name in names):
        return []
    return [f"{asked}: not here; {len(names)} CPU devices of the same memory stand for them"]


def _made_up(found: Sequence[ConfigurationForecast]) -> list[str]:
    numbers = ", ".join(str(configuration.number) for configuration in found if configuration.shapes_only)
    return (
        [f"NO DATA: planned with made-up batches of the right shape, and not to be trained so: {numbers}"]
        if numbers
        else []
    )


def _parameters(spec: SweepSpec) -> Mapping[str, Domain]:
    if spec.parameters is None:
        raise SweepFileError(
            f"{spec.at('task')}: {spec.task} draws its parameters from a tuner's trial, and plan has no tuner; list them "
            "under parameters:"
        )
    return spec.parameters


def _overridden(spec: SweepSpec, given: Mapping[str, str | None]) -> SweepSpec:
    """Apply the command line's options, and drop their places: an error about such a value is no error of the file."""
    overrides = {name: value for name, value in given.items() if value is not None}
    places = {path: place for path, place in spec.places.items() if path.removeprefix("hydra.") not in overrides}
    return replace(spec, engine={**spec.engine, **overrides}, places=places)


def _planned(
    number: int, params: dict[str, Scalar], build: TaskBuilder, plan: Callable[[list[TrainTask]], PoolForecast]
) -> ConfigurationForecast:
    # An error of one configuration is part of the result: the plans of all others are still shown.
    forecast, error, enough, shapes_only = None, None, None, False
    try:
        task = build(**params)
        shapes_only = has_shapes_only(task)
        forecast = plan([task])
    # Before HydraTuneError, of which BudgetError and TaskError are kinds.
    except BudgetError as refusal:
        error, enough = str(refusal), refusal.enough_bytes
    except TaskError as refusal:
        # The user's code may raise anything; an error of hydra-tune says enough in one line.
        if refusal.__cause__ is not None and not isinstance(refusal.__cause__, HydraTuneError):
            traceback.print_exception(refusal.__cause__, file=sys.stderr)
        error = str(refusal)
    except HydraTuneError as refusal:
        error = str(refusal)
    except Exception as fault:  # noqa: BLE001 - the user's code may raise anything
        traceback.print_exception(fault, file=sys.stderr)
        error = f"{type(fault).__name__}: {fault}"
    return ConfigurationForecast(
        number=number, params=params, forecast=forecast, error=error, enough_bytes=enough, shapes_only=shapes_only
    )
