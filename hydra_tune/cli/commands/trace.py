"""`hydra-tune trace`: reports on a run's event log.

`cli/root.py` adds the command to `hydra-tune`, and users call the command on a log that `hydra-tune sweep` or
`HydraExecutor(event_log=...)` has written. `observe/event_log/run_figures.py` computes the figures, and `observe/trace/`
writes, draws and prints. A `ConfigError` of a log, a range or an installation passes through to `cli/root.py`, which ends
with exit code 2. The module must not import torch.
"""

import json
import sys
from pathlib import Path

import click
from rich.console import Console

from hydra_tune.observe.event_log.reader import read_log
from hydra_tune.observe.event_log.run_figures import run_figures
from hydra_tune.observe.trace.chrome_trace import write_trace
from hydra_tune.observe.trace.run_plot import plot_run
from hydra_tune.observe.trace.run_table import print_run

FAILED, USAGE = 1, 2

_EXIT_CODES = """\b
Exit codes:
  0    done
  1    a file could not be written
  2    the command or LOG makes no sense; nothing was written
  130  interrupted by Ctrl-C
"""


@click.command(epilog=_EXIT_CODES)
@click.argument("log", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the trace to this file.  [LOG with .trace.json]",
)
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Draw the run as a PNG, too."
)
@click.option("--from", "start", type=float, metavar="S", help="Draw from this second on.  [the first unit]")
@click.option("--to", "end", type=float, metavar="S", help="Draw up to this second.  [the last unit]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else on standard output.")
def trace(
    *, log: Path, out: Path | None, plot: Path | None, start: float | None, end: float | None, as_json: bool
) -> None:
    """Show the figures of the run that wrote the event log LOG.

    Prints makespan, utilisation, overlap, bytes and units, and writes a trace for Perfetto (ui.perfetto.dev) or
    chrome://tracing.
    """
    if plot is None and (start is not None or end is not None):
        raise click.UsageError("--from and --to say what is drawn; give --plot FILE as well")
    target = log.with_suffix(".trace.json") if out is None else out
    try:
        run_log = read_log(log)
        figures = run_figures(run_log)
        # The plot first: it may refuse the range or miss matplotlib, and with that exit code nothing has been written.
        if plot is not None:
            plot_run(run_log, figures, plot, start=start, end=end)
        write_trace(run_log, target)
    except OSError as error:
        click.echo(
            f"cannot write {error.filename or target}: {error.strerror}; give another place with --out or --plot",
            err=True,
        )
        sys.exit(FAILED)
    if as_json:
        click.echo(json.dumps(figures.to_json(), allow_nan=False))
        return
    print_run(Console(highlight=False), figures)
    click.echo(f"trace        {target}, for ui.perfetto.dev or chrome://tracing")
