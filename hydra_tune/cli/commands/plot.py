"""`hydra-tune plot`: the arguments. The `StudyReader` of the tuner draws.

`cli/root.py` adds the command to `hydra-tune`, and users call the command during a sweep or afterwards. The module must not
import torch or a tuner.
"""

import sys
from pathlib import Path

import click

from hydra_tune.cli.inspect.run_scan import find_run, kept_study, study_reader

_FAILED = 1
_EXIT_CODES = """\b
Exit codes:
  0    done; pictures that could not be drawn are named
  1    the file could not be written
  2    the command makes no sense, there is no such run, or nothing can be drawn
  130  interrupted by Ctrl-C
"""


@click.command(epilog=_EXIT_CODES)
@click.argument("run", required=False)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    required=True,
    help="Write the pictures to this file: .png, or .html for a browser.",
)
@click.option("--storage", metavar="URL", help="Look for the study in this storage.")
def plot(*, run: str | None, out: Path, storage: str | None) -> None:
    """Draw the trials of RUN as a PNG, or for a browser.

    Optuna's own plots show learning curves, parallel coordinates and importances of parameters. RUN is a sweep
    file, an event log, an SQLite file or the name of a study, which must be in a storage.
    """
    if out.suffix.lower() not in (".png", ".html"):
        raise click.UsageError(f"--out {out} must end in .png or .html")
    try:
        missing = study_reader().plot(*kept_study(find_run(run, storage)), out)
    except OSError as error:
        click.echo(f"cannot write {out}: {error.strerror}; give another --out", err=True)
        sys.exit(_FAILED)
    for line in missing:
        click.echo(line, err=True)
    click.echo(f"plot: {out}")
