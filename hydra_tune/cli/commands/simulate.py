"""`hydra-tune simulate`: a sweep on a virtual clock, on devices that need not exist.

The command turns flags or a profile into a scenario and prints the outcome of `hydra_tune.simulate`; with `--replay` the
command prints the comparison that `replay` (`simulate/recorded/replay.py`) makes of a recording. The module must not
compute schedules of its own, and must not import torch. `cli/root.py` adds the command to `hydra-tune`.

Note: a scenario may take minutes to play, so each refusal of flags, and of extras that are not installed, must come before
the simulation. Only damage of a recording may be found while the recording is played.
"""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console

from hydra_tune.errors import ConfigError
from hydra_tune.observe.trace.gantt import import_matplotlib
from hydra_tune.quantities import parse_bytes
from hydra_tune.schedule import ADMISSIONS, make_policy
from hydra_tune.simulate import Outage, Scenario, SimulationResult, Slowdown, simulate
from hydra_tune.simulate.optimal import SOLVER, BestSchedule, import_ortools, optimal_schedule
from hydra_tune.simulate.plot import plot_timeline
from hydra_tune.simulate.profile import read_profile
from hydra_tune.simulate.recorded.recording import read_recording
from hydra_tune.simulate.recorded.replay import replay
from hydra_tune.simulate.table import print_replay, print_result
from hydra_tune.simulate.workload import RandomWorkload, equal_devices, stop_early

FAILED, USAGE = 1, 2

_EXIT_CODES = """\b
Exit codes:
  0    done
  1    a file could not be written
  2    the command or a file makes no sense, or an extra is missing; no result
  130  interrupted by Ctrl-C
"""
_PLOT_BARS = 2000
_MOST_SEARCHED_UNITS = 1_000_000  # the solver takes far fewer in any useful time; the units of more fill the memory
_OPTIMUM = ("makespan_seconds", "bound_seconds", "status")
_WITH_REPLAY = {"recorded", "policy", "as_json"}
_WORKLOAD = {
    "trials": "num_trials",
    "shards": "num_shards",
    "steps": "steps",
    "epochs": "epochs",
    "forward_seconds": "forward_seconds",
    "backward_seconds": "backward_seconds",
    "shard_memory": "shard_bytes",
    "spread": "spread",
    "arrival_gap": "arrival_gap_seconds",
    "estimate_error": "estimate_error",
    "burst_seconds": "burst_seconds",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _SimulationOutputOptions:
    """Destination of the figures."""

    as_json: bool
    plot: Path | None
    timeline: int


def _size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    try:
        # Bandwidths use the same parser: "12GB/s" reads as "12GB".
        return parse_bytes(value.removesuffix("/s"), what="it")
    except ConfigError as error:
        raise click.BadParameter(str(error), context, parameter) from error


def _shares(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in value.split(",")) if value else ()
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is not numbers such as 1,0.5", context, parameter) from error


def _slowdowns(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> list[Slowdown]:
    slowdowns = []
    for value in values:
        try:
            # From the right, since a device's name may contain commas.
            device, at, factor = value.rsplit(",", 2)
            # A ConfigError is a ValueError, too, so it has to be caught first.
            slowdowns.append(Slowdown(device=device, at_seconds=float(at), factor=float(factor)))
        except ConfigError as error:
            raise click.BadParameter(str(error), context, parameter) from error
        except ValueError as error:
            raise click.BadParameter(f"{value!r} is not like device0,60,0.5", context, parameter) from error
    return slowdowns


def _outages(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> list[Outage]:
    outages = []
    for value in values:
        try:
            device, at, *until = _with_times(value)
            outages.append(Outage(device=device, at_seconds=at, until_seconds=until[0] if until else None))
        except ConfigError as error:
            raise click.BadParameter(str(error), context, parameter) from error
        except ValueError as error:
            raise click.BadParameter(
                f"{value!r} is not like device0,60 or device0,60,90", context, parameter
            ) from error
    return outages


def _with_times(value: str) -> tuple[Any, ...]:
    # From the right, since a device's name may contain commas.
    device, *times = value.rsplit(",", 2)
    try:
        return device, *map(float, times)
    except ValueError:
        device, time = value.rsplit(",", 1)
        return device, float(time)


@click.command(epilog=_EXIT_CODES)
@click.argument("profile", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--trials", type=int, metavar="N", help="Simulate N trials.")
@click.option("--shards", type=int, metavar="N", help="Cut each trial into N shards.  [4]")
@click.option("--steps", type=int, metavar="N", help="Train N steps in each epoch.  [100]")
@click.option("--epochs", type=int, metavar="N", help="Train N epochs, each of which ends with a report.  [1]")
@click.option("--forward-seconds", type=float, metavar="S", help="A forward unit of one shard takes so long.  [0.1]")
@click.option("--backward-seconds", type=float, metavar="S", help="A backward unit of one shard takes so long.  [0.2]")
@click.option(
    "--burst-seconds", type=float, metavar="S", help="Run so many seconds of steps as one unit; with --shards 1.  [0]"
)
@click.option("--shard-memory", callback=_size, metavar="SIZE", help="Each shard has so many bytes, e.g. 1GiB.")
@click.option("--spread", type=float, metavar="X", help="Draw each trial's speed between 1/X and X.  [1]")
@click.option("--arrival-gap", type=float, metavar="S", help="Let trials arrive so many seconds apart on average.  [0]")
@click.option("--estimate-error", type=float, metavar="X", help="Mislead the scheduler by 1/X to X.  [1]")
@click.option(
    "--survival",
    callback=_shares,
    metavar="SHARES",
    help="Let these shares of the trials go on after each report, e.g. 1,0.5,0.25.",
)
@click.option("--devices", type=int, metavar="N", help="Use N devices, or the first N of PROFILE.")
@click.option(
    "--speeds", callback=_shares, metavar="NUMBERS", help="Give the devices these speeds, in turn, e.g. 1,0.5."
)
@click.option("--device-memory", callback=_size, metavar="SIZE", help="Each device has so many bytes for shards.")
@click.option(
    "--bandwidth", callback=_size, metavar="SIZE", help="Copy so many bytes a second to each device, e.g. 12GB/s."
)
@click.option("--nodes", type=int, metavar="N", help="Spread the devices over N machines.  [1]")
@click.option(
    "--network-bandwidth", callback=_size, metavar="SIZE", help="Copy so many bytes a second between machines."
)
@click.option(
    "--slow",
    "slowdowns",
    multiple=True,
    callback=_slowdowns,
    metavar="DEVICE,AT,FACTOR",
    help="Change the speed of a device at some second; may be given several times.",
)
@click.option(
    "--lose",
    "outages",
    multiple=True,
    callback=_outages,
    metavar="DEVICE,AT[,UNTIL]",
    help="Lose a device at some second; may be given several times.",
)
@click.option("--no-overlap", is_flag=True, help="Let loads wait for the device, without double buffering.")
@click.option("--policy", metavar="NAME", default="lrtf", show_default=True, help="Choose shard units by this policy.")
@click.option("--max-concurrent", type=int, metavar="N", help="Keep at most N trials in flight.")
@click.option(
    "--admission",
    type=click.Choice(ADMISSIONS[1:]),
    help="Let all trials in flight advance (eager), or the oldest first (staggered).",
)
@click.option("--seed", type=int, metavar="N", default=0, show_default=True, help="Draw everything with this seed.")
@click.option(
    "--timeline",
    type=click.IntRange(min=0),
    metavar="N",
    default=0,
    help="Keep the first N bars of the timeline for the JSON.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw the timeline as a PNG, by default its first 2,000 bars.",
)
@click.option(
    "--optimum",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Search the best schedule without transfers, for so long.",
)
@click.option(
    "--replay",
    "recorded",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Play a recorded sweep again.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else on standard output.")
@click.pass_context
def simulate_command(
    context: click.Context,
    /,
    *,
    profile: Path | None,
    policy: str,
    timeline: int,
    plot: Path | None,
    optimum: float | None,
    recorded: Path | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Play trials on a virtual clock, without devices.

    Simulates the trials and devices of PROFILE, or those that the options describe. Options that describe trials,
    --nodes and --speeds are for use without PROFILE. --slow and --lose add to the faults of PROFILE, --survival ends
    some of the trials early, and the other options override PROFILE.
    """
    # A plot needs bars, even where --timeline was not given.
    output = _SimulationOutputOptions(as_json=as_json, plot=plot, timeline=timeline or (_PLOT_BARS if plot else 0))
    try:
        if recorded is not None:
            _replay(context, recorded, as_json=as_json)
            return
        # For its error alone: a wrong name is found before a large profile is read.
        make_policy(policy)
        scenario = _from_flags(flags) if profile is None else _from_profile(profile, flags)
        if optimum is not None:
            _check_optimum(scenario)
        if plot is not None:
            import_matplotlib()
        result = simulate(scenario, policy, timeline=output.timeline)
        _show(result, output, None if optimum is None else _best_schedule(scenario, optimum))
    except OSError as error:
        click.echo(f"cannot write {error.filename}: {error.strerror}", err=True)
        sys.exit(FAILED)


def _replay(context: click.Context, path: Path, *, as_json: bool) -> None:
    # Only options that the user typed: defaults are compatible with --replay.
    typed_options = {
        name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    unsuitable_options = [option for option in context.command.params if option.name in typed_options - _WITH_REPLAY]
    if unsuitable_options:
        name = (
            unsuitable_options[0].human_readable_name
            if isinstance(unsuitable_options[0], click.Argument)
            else unsuitable_options[0].opts[0]
        )
        raise ConfigError(f"--replay goes with --policy and --json alone, not with {name}; the recording has the rest")
    comparison = replay(read_recording(path), context.params["policy"] if "policy" in typed_options else None)
    if as_json:
        click.echo(json.dumps(comparison.to_json(), allow_nan=False))
    else:
        print_replay(Console(highlight=False), comparison)


def _check_optimum(scenario: Scenario) -> None:
    """Refuse a scenario that has no best schedule to search, or a search without the solver."""
    speeds = {device.speed for device in scenario.devices}
    if len(speeds) > 1 or scenario.slowdowns or scenario.outages:
        raise ConfigError("--optimum is for devices of one speed without faults; leave out --speeds, --slow and --lose")
    if scenario.num_units > _MOST_SEARCHED_UNITS:
        raise ConfigError(
            f"--optimum is for at most {_MOST_SEARCHED_UNITS:,} units, and the trials have {scenario.num_units:,}; lower "
            "--steps or --trials, or leave out --optimum"
        )
    import_ortools(SOLVER)


def _best_schedule(scenario: Scenario, seconds: float) -> BestSchedule:
    """Search the best schedule of the simulated units, as if all trials had been there from the start."""
    speed = scenario.devices[0].speed
    chains = {trial.name: [unit.seconds / speed for unit in trial.step] * trial.steps_run for trial in scenario.trials}
    return optimal_schedule(chains, len(scenario.devices), time_limit_seconds=seconds)


def _show(result: SimulationResult, output: _SimulationOutputOptions, best: BestSchedule | None) -> None:
    if output.plot is not None:
        plot_timeline(result, output.plot)
    if output.as_json:
        optimum = {} if best is None else {"optimum": {name: getattr(best, name) for name in _OPTIMUM}}
        click.echo(json.dumps({**result.to_json(), **optimum}, allow_nan=False))
    else:
        print_result(Console(highlight=False), result, best)


def _from_flags(flags: dict[str, Any]) -> Scenario:
    if flags["trials"] is None or flags["devices"] is None:
        raise ConfigError("--trials and --devices are needed where there is no PROFILE; e.g. --trials 12 --devices 8")
    workload_options = {field: flags[flag] for flag, field in _WORKLOAD.items() if flags[flag] is not None}
    devices = equal_devices(
        flags["devices"],
        memory_bytes=flags["device_memory"],
        bandwidth=flags["bandwidth"],
        num_nodes=1 if flags["nodes"] is None else flags["nodes"],
        speeds=flags["speeds"] or (1.0,),
    )
    trials = RandomWorkload(**workload_options).trials(flags["seed"])
    return _finish(Scenario(trials=trials, devices=devices), flags)


def _from_profile(path: Path, flags: dict[str, Any]) -> Scenario:
    unsuitable_flags = [flag for flag in (*_WORKLOAD, "nodes", "speeds") if flags[flag]]
    if unsuitable_flags:
        raise ConfigError(
            f"--{unsuitable_flags[0].replace('_', '-')} describes what PROFILE has; leave out one of the two"
        )
    scenario = read_profile(path)
    count = flags["devices"]
    if count is not None:
        if not 1 <= count <= len(scenario.devices):
            raise ConfigError(
                f"--devices must be from 1 to {len(scenario.devices)}, as many as {path} has; not {count}"
            )
        kept_devices = scenario.devices[:count]
        # Faults of dropped devices go as well: a scenario refuses faults of unknown devices.
        names = {device.name for device in kept_devices}
        slowdowns = tuple(fault for fault in scenario.slowdowns if fault.device in names)
        outages = tuple(fault for fault in scenario.outages if fault.device in names)
        scenario = replace(scenario, devices=kept_devices, slowdowns=slowdowns, outages=outages)
    for flag, field in (("device_memory", "memory_bytes"), ("bandwidth", "bandwidth")):
        if flags[flag] is not None:
            devices = tuple(replace(device, **{field: flags[flag]}) for device in scenario.devices)
            scenario = replace(scenario, devices=devices)
    return _finish(scenario, flags)


def _finish(scenario: Scenario, flags: dict[str, Any]) -> Scenario:
    # `replace` makes a new scenario, which checks all numbers and faults together.
    names = ("max_concurrent", "admission", "network_bandwidth")  # a profile may have its own
    changes = {name: flags[name] for name in names if flags[name] is not None}
    return replace(
        scenario,
        trials=stop_early(scenario.trials, flags["survival"], flags["seed"]),
        slowdowns=(*scenario.slowdowns, *flags["slowdowns"]),
        outages=(*scenario.outages, *flags["outages"]),
        overlap=scenario.overlap and not flags["no_overlap"],
        **changes,
    )
