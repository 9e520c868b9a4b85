"""`hydra-tune list` and `hydra-tune status`: the arguments. `hydra_tune.cli.inspect` does the work.

`cli/root.py` adds both commands to `hydra-tune`, and users call the commands during sweeps and afterwards. The module must
not import torch, so that both commands answer at once.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from hydra_tune.cli.inspect.run_output import print_list, print_status, to_json
from hydra_tune.cli.inspect.run_scan import runs_at

_EXIT_CODES = """\b
Exit codes:
  0    done, also where there are no runs
  2    there is no such folder, file, study or storage, or no run of the file
  130  interrupted by Ctrl-C
"""


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    command = click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON object and nothing else on standard output."
    )(command)
    command = click.option("--storage", metavar="URL", help="Look only for the studies in this storage.")(command)
    return click.argument("place", default=".")(command)


@click.command(epilog=_EXIT_CODES)
@_options
def list_command(*, place: str, storage: str | None, as_json: bool) -> None:
    """List the runs of PLACE or of a storage.

    PLACE is a folder, by default the current one, or a sweep file, an event log, an SQLite file or the name of a study.
    Looks for such files in a folder, and for event logs also in its folder runs.
    """
    _show(place, storage, as_json=as_json, with_trials=False)


@click.command(epilog=_EXIT_CODES)
@_options
def status(*, place: str, storage: str | None, as_json: bool) -> None:
    """Show how far runs have come, and how they go on.

    Looks at the runs of PLACE, or of a storage. Tells a running sweep from a killed one by the lock of its event
    log or of its checkpoints. PLACE is as for hydra-tune list.
    """
    _show(place, storage, as_json=as_json, with_trials=True)


def _show(place: str, storage: str | None, *, as_json: bool, with_trials: bool) -> None:
    runs, notes = runs_at(place, storage)
    for note in notes:
        click.echo(note, err=True)
    if as_json:
        click.echo(json.dumps({"runs": [to_json(run, with_trials=with_trials) for run in runs]}, allow_nan=False))
    elif not runs:
        where = Path(place).resolve() if storage is None else storage
        click.echo(f"no runs in {where}; hydra-tune init writes a sweep to begin with, and hydra-tune sweep runs one")
    else:
        (print_status if with_trials else print_list)(Console(highlight=False), runs)
