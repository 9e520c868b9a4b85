"""`hydra-tune`: the group of commands.

`__main__.py` and the console script `hydra-tune` call `main`, which `cli/__init__.py` passes on. A new command has to
be added here. The imports of the commands must stay free of torch, which takes seconds.
"""

import io
import os
import sys
from contextlib import suppress
from typing import Any

import click

from hydra_tune import __version__
from hydra_tune.cli.commands.best import best
from hydra_tune.cli.commands.check import check
from hydra_tune.cli.commands.devices import devices
from hydra_tune.cli.commands.export import export
from hydra_tune.cli.commands.init import init
from hydra_tune.cli.commands.list import list_command, status
from hydra_tune.cli.commands.plan import plan
from hydra_tune.cli.commands.plot import plot
from hydra_tune.cli.commands.show import show
from hydra_tune.cli.commands.simulate import simulate_command
from hydra_tune.cli.commands.sweep import USAGE, sweep
from hydra_tune.cli.commands.trace import trace
from hydra_tune.errors import ConfigError

_INTERRUPTED = 130


class _CommandGroup(click.Group):
    """The commands: a `ConfigError` is told on standard error without a traceback, and has an exit code, as Ctrl-C has."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            click.echo(str(error), err=True)
            ctx.exit(USAGE)
        except KeyboardInterrupt:
            ctx.exit(_INTERRUPTED)


@click.group(cls=_CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="hydra-tune")
def main() -> None:
    """Hyperparameter search through one shared pool of devices."""
    # Python has no stream where its caller has closed the descriptor (`>&-`), which files of the sweep would get.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123 - as long as the process
    # A parameter, an error or a path that the terminal's encoding lacks must not end a sweep; as on standard error.
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Python asks a file for its position, and a program may have put a pipe in its place.
        with suppress(OSError):
            sys.stdout.reconfigure(errors="backslashreplace")


main.add_command(best)
main.add_command(check)
main.add_command(devices)
main.add_command(export)
main.add_command(init)
main.add_command(list_command, name="list")
main.add_command(plot)
main.add_command(show)
main.add_command(status)
main.add_command(simulate_command, name="simulate")
main.add_command(plan)
main.add_command(sweep)
main.add_command(trace)
