"""`hydra-tune devices`: arguments and output. `devices/hardware/survey.py` looks at the devices.

`cli/root.py` adds the command to `hydra-tune`, and users call the command before a sweep. The command imports torch
only once the arguments are read: the module must not import torch at its top.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hydra_tune.cli.commands.sweep import check_size
from hydra_tune.quantities import format_bytes

_EXIT_CODES = """\b
Exit codes:
  0    done
  2    the command makes no sense, or there are no such devices
  130  interrupted by Ctrl-C
"""
_NOTHING = "-"
_WAYS = ("to_device", "to_host", "both_ways")
_WIDE = 100  # columns from which on all rates fit


@click.command(epilog=_EXIT_CODES)
@click.option(
    "--devices", metavar="NAMES", default="auto", help="Look at these devices, e.g. cpu:2, cuda, cuda:0,1.  [auto]"
)
@click.option(
    "--device-memory", metavar="SIZE", callback=check_size, help="Use so many bytes of each device, e.g. 11GiB."
)
@click.option("--no-measure", is_flag=True, help="Do not measure how fast copies are.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else on standard output.")
def devices(*, devices: str, device_memory: str | None, no_measure: bool, as_json: bool) -> None:
    """Show the devices that a pool finds here.

    Shows their memory, the pool's share of the memory, and the speed of copies. Trains nothing, and frees
    everything at the end.
    """
    from hydra_tune.devices.hardware.survey import survey  # noqa: PLC0415 - torch takes seconds to import

    report = survey(devices, device_memory, measures=not no_measure)
    if as_json:
        click.echo(json.dumps(report.to_json(), allow_nan=False))
    else:
        # From the plain data, so that both outputs have the same figures.
        print_survey(Console(highlight=False), report.to_json())


def print_survey(console: Console, found: Mapping[str, Any]) -> None:
    """Print a `DeviceSurvey`, given as plain data."""
    # On a narrow console the rate of both ways at once gives way.
    ways = _WAYS if console.width >= _WIDE else _WAYS[:2]
    console.print(_device_table(found["devices"], ways))
    if found["crossings"]:
        console.print()
        console.print(_crossing_table(found["crossings"]))
    lines = [f"NVIDIA driver {found['driver']}"] if found["driver"] else []
    for line in (*lines, *found["notes"]):
        console.print()
        console.print(Text(line))


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _device_table(found: Sequence[Mapping[str, Any]], ways: Sequence[str]) -> Table:
    table = _table()
    table.add_column("device", no_wrap=True)
    table.add_column("model", overflow="fold", min_width=12)
    for name in ("free", "total", "pool takes", "cc", *(way.replace("_", " ") for way in ways)):
        table.add_column(name, justify="right", no_wrap=True)
    for device in found:
        rates = device["rates"] or {}
        table.add_row(
            Text(device["name"]),
            Text(device["model"]),
            *(format_bytes(device[key]) for key in ("free_bytes", "total_bytes", "budget_bytes")),
            device["compute_capability"] or _NOTHING,
            *(_rate(rates.get(way)) for way in ways),
        )
    return table


def _crossing_table(found: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("from", "to", "peer access", "rate")
    for crossing in found:
        access = "yes" if crossing["is_direct"] else "no, over the host"
        rate = _rate(crossing["bytes_per_second"])
        table.add_row(Text(crossing["source"]), Text(crossing["target"]), access, rate)
    return table


def _rate(bytes_per_second: float | None) -> str:
    return _NOTHING if bytes_per_second is None else f"{format_bytes(bytes_per_second)}/s"
