"""`hydra-tune init`: the arguments. `hydra_tune.cli.starter` has the files.

`cli/root.py` adds the command to `hydra-tune`, and new users call the command first. The module must not import torch.
"""

import sys
from pathlib import Path

import click

from hydra_tune.cli.starter import write_starter

_FAILED = 1
_EXIT_CODES = """\b
Exit codes:
  0    done
  1    a file could not be written
  2    a file is there already; nothing was written
"""


@click.command(epilog=_EXIT_CODES)
@click.argument("folder", default=".", type=click.Path(path_type=Path))
def init(*, folder: Path) -> None:
    """Write a first sweep into FOLDER: space.yaml and train.py.

    FOLDER is by default the current one. Both files have comments, and run as they are in under a minute on a CPU.
    Nothing is replaced.
    """
    try:
        paths = write_starter(folder)
    except OSError as error:
        click.echo(f"cannot write {error.filename}: {error.strerror}; give another folder", err=True)
        sys.exit(_FAILED)
    for path in paths:
        click.echo(f"written: {path}")
    change = "" if folder == Path() else f"cd {folder} && "
    click.echo(f"next: {change}hydra-tune check space.yaml, then hydra-tune sweep space.yaml")
