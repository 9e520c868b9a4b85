"""`hydra-tune export`: the arguments. `hydra_tune.cli.run.export` writes the files.

`cli/root.py` adds the command to `hydra-tune`, and users call the command during a sweep or afterwards. The command
imports torch only once the run is found: the module must not import torch at its top.
"""

import sys
from pathlib import Path
from typing import NoReturn

import click

from hydra_tune.cli.commands.sweep import USAGE
from hydra_tune.cli.inspect.run_scan import find_run

_FAILED = 1
_EXIT_CODES = """\b
Exit codes:
  0    done; files that could not be made are named
  1    the folder could not be read or written
  2    the command makes no sense, or there is no such run; nothing was written
  130  interrupted by Ctrl-C
"""


@click.command(epilog=_EXIT_CODES)
@click.argument("run", required=False)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    required=True,
    help="Write the files to this folder, which is made if it is missing.",
)
@click.option("--storage", metavar="URL", help="Look for the study in this storage.")
@click.option("--force", is_flag=True, help="Write even if FOLDER has files, and replace those of the same names.")
def export(*, run: str | None, out: Path, storage: str | None, force: bool) -> None:
    """Write the results of RUN into a folder.

    The files are trials.csv, run.json, plots.png if the study is in a storage, and best.safetensors if the sweep kept
    weights. RUN is a sweep file, an event log, an SQLite file or the name of a study. Without RUN, the only run is taken.
    """
    try:
        if not force and out.is_dir() and any(out.iterdir()):
            _fail(f"the folder {out} has files; give another --out, or --force to write there", USAGE)
    except OSError as error:
        _fail(f"cannot read {out}: {error.strerror}; give another --out", _FAILED)
    record = find_run(run, storage)
    # torch takes seconds to import; help, version and a wrong name do not wait for it.
    from hydra_tune.cli.run.export import export_run  # noqa: PLC0415

    try:
        out.mkdir(parents=True, exist_ok=True)
        missing = export_run(record, out)
    except OSError as error:
        _fail(f"cannot write into {out}: {error.strerror}; give another --out", _FAILED)
    for line in missing:
        click.echo(line, err=True)
    click.echo(f"export: {out}")


def _fail(why: str, code: int) -> NoReturn:
    click.echo(why, err=True)
    sys.exit(code)
