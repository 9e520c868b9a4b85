"""`hydra-tune sweep`: the arguments. `hydra_tune.cli.run` does the work: `sweep_run`, or `cluster` with `--ray`.

`cli/root.py` adds the command to `hydra-tune`, and ends every command with the exit code `USAGE` at a `ConfigError`;
`export.py` uses `USAGE`, too, and `devices.py` and `plan.py` check `--device-memory` by `check_size`.

Note: isolation. An isolated sweep runs in a copy of this process (`supervision/supervisor.py`). So nothing here may
start a thread or import torch before `supervise` has made the copy.
"""

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import click

from hydra_tune.checkpoint.every import parse_every
from hydra_tune.cli.display.isolation import isolates, tell_crash
from hydra_tune.cli.display.log_file import log_path
from hydra_tune.cli.display.next_step import command_of
from hydra_tune.cli.sweep_file.options import DisplayOptions, SweepFileOverrides, check_saving, with_overrides
from hydra_tune.cli.sweep_file.overrides import set_option, with_settings
from hydra_tune.cli.sweep_file.reader import read_sweep_file
from hydra_tune.errors import ConfigError
from hydra_tune.quantities import parse_bytes
from hydra_tune.schedule import ADMISSIONS, check_policy_name
from hydra_tune.supervision.supervisor import RestartContext, numbered, supervise

USAGE = 2
"""Exit code for a wrong command or sweep file."""


_EXIT_CODES = """\b
Exit codes:
  0    done
  1    the sweep ended with an error, or no trial completed
  2    the command or FILE makes no sense, or another process runs the sweep;
       no trial has begun
  75   the last device was lost after a signal, before all trials were saved;
       --resume goes on
  130  interrupted by Ctrl-C
  143  interrupted by SIGTERM
"""


def check_size(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse an option that is no size."""
    if value is not None:
        try:
            parse_bytes(value, what="it")
        except ConfigError as error:
            raise click.BadParameter(str(error), context, parameter) from error
    return value


def _policy(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None:
        try:
            check_policy_name(value)
        except ConfigError as error:
            raise click.BadParameter(str(error), context, parameter) from error
    return value


def _every(context: click.Context, parameter: click.Parameter, value: str | None) -> str | int | None:
    if value is None:
        return None
    # isdigit alone accepts digits that int refuses, such as superscripts.
    every = int(value) if value.isascii() and value.isdigit() else value
    try:
        parse_every(every)
    except ConfigError as error:
        # click begins the message with the option's own name.
        raise click.BadParameter(str(error).removeprefix("checkpoint_every "), context, parameter) from error
    return every


def _check_cluster(given: dict[str, object]) -> None:
    for option, value in given.items():
        if value:
            raise ConfigError(f"{option} is not for sweeps on a Ray cluster; leave it out, or leave out --ray")


@click.command(epilog=_EXIT_CODES)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@set_option
@click.option("--devices", metavar="NAMES", help="Use these devices, e.g. auto, cpu:2, cuda, cuda:0,1.")
@click.option(
    "--device-memory", metavar="SIZE", callback=check_size, help="Use so many bytes of each device, e.g. 11GiB."
)
@click.option("--max-concurrent", type=click.IntRange(min=1), metavar="N", help="Keep at most N trials in flight.")
@click.option(
    "--admission",
    type=click.Choice(ADMISSIONS),
    help="Let all trials in flight advance (eager), or the oldest first (staggered).",
)
@click.option("--policy", metavar="NAME", callback=_policy, help="Choose shard units by this policy, e.g. lrtf.")
@click.option(
    "--fusion",
    "--fuse",
    "fusion",
    type=click.Choice(("auto", "on", "off")),
    help="Compute trials of one architecture together.",
)
@click.option("--run-cap", type=click.IntRange(min=1), metavar="N", help="Run until the whole study has N trials.")
@click.option(
    "--timeout",
    "timeout_seconds",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Start no trial later than this; running trials finish.",
)
@click.option("--storage", metavar="URL", help="Keep the study in this storage, e.g. sqlite:///trials.db.")
@click.option("--resume", is_flag=True, help="Go on with an interrupted study, which must exist.")
@click.option("--checkpoint-dir", metavar="DIR", help="Save running trials in this folder, to go on from there.")
@click.option(
    "--checkpoint-every",
    metavar="STEPS|TIME",
    callback=_every,
    help="Save them so often beside their reports: optimizer steps, or a time, e.g. 5min.",
)
@click.option(
    "--stop-seconds",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="End the process so soon after Ctrl-C or SIGTERM.  [30]",
)
@click.option(
    "--timeline",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write what every device did: JSON for Perfetto, chrome://tracing and hydra-tune simulate --replay.",
)
@click.option(
    "--log",
    "event_log",
    metavar="FILE",
    help="Write the event log, which hydra-tune trace reads, to this file.  [runs/NAME-TIME-PROCESS.jsonl]",
)
@click.option(
    "--event-log-limit",
    metavar="SIZE",
    callback=check_size,
    help="Leave units and copies out of the log beyond this size, and count them.  [5MB]",
)
@click.option("--no-log", is_flag=True, help="Write no event log.")
@click.option(
    "--ray",
    "ray_address",
    metavar="ADDRESS",
    help="Run on the Ray cluster there: auto, HOST:6379, or local for one that begins and ends with the sweep.",
)
@click.option(
    "--isolate/--no-isolate",
    "isolate",
    default=None,
    help="Go on after a crash of the sweep's process, or not.  [with --checkpoint-dir it goes on]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else on standard output.")
@click.option("--no-live", is_flag=True, help="Print a line for each trial instead of the live view.")
def sweep(
    *,
    file: Path,
    settings: tuple[str, ...],
    timeout_seconds: float | None,
    resume: bool,
    timeline: Path | None,
    event_log: str | None,
    no_log: bool,
    ray_address: str | None,
    isolate: bool | None,
    as_json: bool,
    no_live: bool,
    **options: Any,
) -> None:
    """Run the sweep that FILE describes, and print its best trials.

    Options given here override FILE.
    """
    # All options that are no parameters above override the file's.
    overrides = SweepFileOverrides(timeout_seconds=timeout_seconds, **options)
    spec = with_overrides(with_settings(read_sweep_file(file), settings), overrides)
    # After the options are merged, because either side may give the folder, the storage or the name.
    check_saving(spec, resume=resume)
    if ray_address is not None:
        _check_cluster({"--resume": resume, "--timeout": timeout_seconds, "--timeline": timeline, "--log": event_log})
    is_isolated = isolates(spec, isolate, is_on_cluster=ray_address is not None)
    # On a cluster each node has a pool, and so no single log.
    log = None if ray_address is not None else log_path(spec, event_log, no_log=no_log)
    display = DisplayOptions(as_json=as_json, live=not no_live, command=command_of(click.get_current_context()))
    # torch takes seconds to import; help, version and a wrong file do not wait for it.
    if ray_address is not None:
        from hydra_tune.cli.run.cluster import run_cluster_sweep  # noqa: PLC0415

        sys.exit(run_cluster_sweep(spec, display, ray_address))
    # Taken in the supervising process, so that all processes of the sweep share one limit.
    started_seconds = time.monotonic()

    def run(beginning: RestartContext | None) -> int:
        """Run the sweep in this process, after `beginning.crashes` crashed processes, and return the exit code."""
        # In the sweep's own process only: the supervisor must run no threads, so that each copy of it is sound.
        from hydra_tune.cli.run.sweep_run import run_sweep  # noqa: PLC0415

        crashes, remaining_seconds = 0 if beginning is None else beginning.crashes, timeout_seconds
        # A restarted process gets only the rest of the time.
        if remaining_seconds is not None and crashes:
            remaining_seconds = max(0.0, remaining_seconds - (time.monotonic() - started_seconds))
        return run_sweep(
            spec,
            display,
            timeout_seconds=remaining_seconds,
            timeline=timeline,
            # A file of its own for each process, because a log replaces an existing file.
            event_log=numbered(log, crashes),
            resume=resume,
            beginning=beginning,
        )

    sys.exit(supervise(run, partial(tell_crash, display)) if is_isolated else run(None))
