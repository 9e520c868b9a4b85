"""Checks a sweep as far as that is possible without training, and describes what would run.

`cli/commands/check.py` calls `run_check` for `hydra-tune check`, once the sweep file is read. The check must train nothing,
and create no storage, no log and no folder. Its steps follow `run_sweep` (`cli/run/sweep_run.py`), up to the open devices:
the check imports the user's module, builds one task where the sweep file has the parameters, and opens the devices.
"""

import json
import sys
import traceback
from typing import Any

from hydra_tune.checkpoint.sweep_folder import check_free
from hydra_tune.cli.display.next_step import masked
from hydra_tune.cli.display.output import SweepOutput
from hydra_tune.cli.dry_run.sampling import sample
from hydra_tune.cli.run.sweep_run import DONE, TUNER, USAGE, check_beginning, opened
from hydra_tune.cli.run.task_building import TaskBuilder
from hydra_tune.cli.run.task_ref import load_task
from hydra_tune.cli.run.tuners import TUNERS, find
from hydra_tune.cli.sweep_file.domains import ChoiceDomain, Domain, FloatDomain
from hydra_tune.cli.sweep_file.options import DisplayOptions, check_saving
from hydra_tune.cli.sweep_file.spec import SweepSpec
from hydra_tune.errors import ConfigError, HydraTuneError, SweepFileError, TaskError
from hydra_tune.executor import HydraExecutor
from hydra_tune.observe.live import text
from hydra_tune.paths import absolute_path

_MOST_VALUES = 8


def run_check(spec: SweepSpec, *, as_json: bool) -> int:
    """Check a sweep and print what would run; return the exit code of the program.

    With `as_json`, standard output has one JSON object and nothing else, and nothing at all after an error.
    """
    output, stdout = SweepOutput(DisplayOptions(as_json=as_json, live=False)), sys.stdout
    try:
        # The user's module may print while it is imported.
        with output.quiet():
            check_saving(spec, resume=False)
            function = load_task(spec)
            find(TUNERS, TUNER)
            _build_one(TaskBuilder(spec=spec, function=function))
            num_ended, num_left = check_beginning(spec, resume=False)
            _check_free(spec)
            with opened(spec, _pool) as pool:
                plan = _description(spec, pool, num_ended, num_left)
    except ConfigError:
        raise
    except HydraTuneError as error:
        # The user's code may raise anything; an error of hydra-tune says enough in one line.
        if error.__cause__ is not None and not isinstance(error.__cause__, HydraTuneError):
            traceback.print_exception(error.__cause__, file=sys.stderr)
        print(error, file=sys.stderr)  # noqa: T201 - it is output
        return USAGE
    if as_json:
        print(json.dumps({"file": spec.file, "task": spec.task, **plan}, allow_nan=False), file=stdout)
    else:
        print(f"{spec.file} is a sweep that would begin", file=stdout)
        for name, value in plan.items():
            lines = value if isinstance(value, list) else [value]
            for line in lines:
                print(f"  {name:<12} {line}", file=stdout)
    return DONE


def _check_free(spec: SweepSpec) -> None:
    if spec.checkpoint_dir is not None and spec.study is not None:
        try:
            check_free(absolute_path(spec.checkpoint_dir), spec.study)
        except HydraTuneError as error:
            raise SweepFileError(f"{spec.at('hydra.checkpoint_dir')}: {error}") from error


def _pool(**engine: Any) -> HydraExecutor:
    """Make a pool with the sweep's options, which makes no folder when it opens its devices."""
    HydraExecutor(**engine)  # for its errors alone: some options depend on spill_dir
    return HydraExecutor(**{**engine, "spill_dir": None})


def _build_one(build: TaskBuilder) -> None:
    """Build the task of one configuration, which must report the sweep's metric."""
    spec = build.spec
    if spec.parameters is None:
        return  # the function draws from a tuner's trial, and there is no study here
    (params,) = sample(spec.parameters, 1, spec.seed or 0)
    try:
        build(**params)
    except HydraTuneError:
        raise
    except Exception as error:
        raise TaskError(
            f"{spec.at('task')}: {spec.task} failed with {text.params(params)}: {type(error).__name__}: {error}"
        ) from error


def _description(spec: SweepSpec, pool: HydraExecutor, num_ended: int, num_left: int | None) -> dict[str, Any]:
    saving = "not kept: the study ends with its process"
    if spec.storage is not None:
        saving = f"{spec.study or 'a study without a name'} in {masked(spec.storage)}"
        saving += f", which has {num_ended} trials that have ended" if num_ended else ""
    checkpoints = spec.checkpoint_dir or "none: running trials begin anew after an interruption"
    pruning = "none" if spec.pruning is None else f"{spec.pruning.type} {text.params(spec.pruning.options)}".rstrip()
    parameters = spec.parameters or {}
    return {
        "runs": f"{_count(spec, num_ended, num_left)} of {spec.task}, drawn by {spec.method}, to {spec.goal} {spec.metric}",
        "parameters": [f"{name}: {_domain(domain)}" for name, domain in parameters.items()]
        or ["drawn by the task from its trial"],
        "pruning": pruning,
        "devices": f"{', '.join(pool.device_names)}; {pool.width} trials in flight",
        "study": saving,
        "checkpoints": checkpoints,
    }


def _count(spec: SweepSpec, num_ended: int, num_left: int | None) -> str:
    if num_left is None:
        return "trials without end, unless --run-cap or --timeout is given,"
    if num_ended:
        return f"{num_left} more trials"
    return f"{num_left} trials" + (", the whole grid," if spec.run_cap is None else "")


def _domain(domain: Domain) -> str:
    if isinstance(domain, ChoiceDomain):
        if len(domain.values) == 1:
            return str(domain.values[0])
        shown = ", ".join(map(str, domain.values[:_MOST_VALUES]))
        return f"one of {shown}{', ...' if len(domain.values) > _MOST_VALUES else ''}"
    step = (
        domain.multiple or domain.step if isinstance(domain, FloatDomain) else domain.step if domain.step > 1 else None
    )
    spread = ", over magnitudes" if domain.log else ""
    return f"from {domain.low} to {domain.high}{'' if step is None else f' in steps of {step}'}{spread}"
