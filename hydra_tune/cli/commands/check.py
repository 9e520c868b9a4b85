"""`hydra-tune check`: the arguments. `hydra_tune.cli.dry_run.checking` does the work.

`cli/root.py` adds the command to `hydra-tune`, and users call the command on a sweep file while they write the file.
The command imports torch only once the file is read: the module must not import torch at its top.
"""

import sys
from pathlib import Path

import click

from hydra_tune.cli.sweep_file.overrides import set_option, with_settings
from hydra_tune.cli.sweep_file.reader import read_sweep_file

_EXIT_CODES = """\b
Exit codes:
  0    hydra-tune sweep would begin
  2    the command or FILE makes no sense; every problem is named at its place
  130  interrupted by Ctrl-C
"""


@click.command(epilog=_EXIT_CODES)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@set_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else on standard output.")
def check(*, file: Path, settings: tuple[str, ...], as_json: bool) -> None:
    """Check FILE without training, and say what would run.

    Checks the keys, imports the task, builds the task of one configuration, looks at the study and the checkpoints, and
    opens the devices with the options of FILE. Creates no storage, no log and no folder.
    """
    spec = with_settings(read_sweep_file(file), settings)
    # torch takes seconds to import; help, version and a wrong file do not wait for it.
    from hydra_tune.cli.dry_run.checking import run_check  # noqa: PLC0415

    sys.exit(run_check(spec, as_json=as_json))
