"""`hydra-tune show`: the arguments. `hydra_tune.cli.inspect` does the work.

`cli/root.py` adds the command to `hydra-tune`, and users call the command during a sweep or afterwards. The module must not
import torch.
"""

import json
import sys

import click
from rich.console import Console

from hydra_tune.cli.inspect.run_output import to_json
from hydra_tune.cli.inspect.run_scan import find_run
from hydra_tune.cli.inspect.trial_output import print_trials, write_csv

_EXIT_CODES = """\b
Exit codes:
  0    done
  2    the command makes no sense, or there is no such run
  130  interrupted by Ctrl-C
"""
_TOP = 10


@click.command(epilog=_EXIT_CODES)
@click.argument("run", required=False)
@click.option("--storage", metavar="URL", help="Look for the study in this storage.")
@click.option(
    "--top", type=click.IntRange(min=1), metavar="N", help=f"Show the N best trials.  [{_TOP}; all in CSV and JSON]"
)
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values, a line for each trial.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else on standard output.")
def show(*, run: str | None, storage: str | None, top: int | None, as_csv: bool, as_json: bool) -> None:
    """Show the best trials of RUN.

    RUN is a sweep file, an event log, an SQLite file, a folder or the name of a study. Without RUN, the only run of the
    current folder is shown.
    """
    if as_csv and as_json:
        raise click.UsageError("--csv and --json contradict each other; give one of the two")
    record = find_run(run, storage)
    if as_csv:
        write_csv(sys.stdout, record, top)
    elif as_json:
        data = to_json(record)
        click.echo(json.dumps(data | {"trials": data["trials"][:top]}, allow_nan=False))
    else:
        print_trials(Console(highlight=False), record, top or _TOP)
