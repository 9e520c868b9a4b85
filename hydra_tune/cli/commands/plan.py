"""`hydra-tune plan`: the arguments. `hydra_tune.cli.dry_run.planning` does the work.

`cli/root.py` adds the command to `hydra-tune`, and users call the command on a sweep file before `hydra-tune sweep`.
The command imports torch only once the file is read: the module must not import torch at its top.
"""

import sys
from pathlib import Path

import click

from hydra_tune.cli.commands.sweep import check_size
from hydra_tune.cli.sweep_file.domains import grid_size
from hydra_tune.cli.sweep_file.overrides import set_option, with_settings
from hydra_tune.cli.sweep_file.reader import read_sweep_file
from hydra_tune.cli.sweep_file.spec import SweepSpec

_EXIT_CODES = """\b
Exit codes:
  0    done
  1    a configuration does not fit, cannot be planned, or its task cannot be made
  2    the command or FILE makes no sense
  130  interrupted by Ctrl-C
"""
_MOST = 8
_MOST_OF_A_GRID = 32


def _count(spec: SweepSpec) -> int:
    # A sweep never has more trials than its run_cap, so by default a plan shows no more.
    most = spec.run_cap or _MOST_OF_A_GRID
    if (
        spec.method == "grid"
        and spec.parameters is not None
        and grid_size(spec.parameters) <= min(most, _MOST_OF_A_GRID)
    ):
        return grid_size(spec.parameters)
    return min(most, _MOST)


@click.command(epilog=_EXIT_CODES)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@set_option
@click.option(
    "--trials",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"Plan N configurations.  [a grid's, else at most {_MOST}]",
)
@click.option("--seed", type=int, metavar="N", help="Draw the configurations with this seed.  [the file's, or 0]")
@click.option("--devices", metavar="NAMES", help="Plan for these devices, e.g. auto, cpu:2, cuda, cuda:0,1.")
@click.option(
    "--device-memory", metavar="SIZE", callback=check_size, help="Use so many bytes of each device, e.g. 11GiB."
)
@click.option(
    "--fusion",
    "--fuse",
    "fusion",
    type=click.Choice(("auto", "on", "off")),
    help="Show which trials would be computed together.",
)
@click.option("--probe", is_flag=True, help="Time a few steps alone and together, where --fusion auto would do so.")
@click.option("--profile", is_flag=True, help="Show where a step's memory is, and what planned groups would cost.")
@click.option(
    "--profile-trials", type=click.IntRange(min=1), metavar="N", help="Show it for N trials.  [a group's, at most 8]"
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else on standard output.")
def plan(
    *,
    file: Path,
    settings: tuple[str, ...],
    trials: int | None,
    seed: int | None,
    devices: str | None,
    device_memory: str | None,
    fusion: str | None,
    probe: bool,
    profile: bool,
    profile_trials: int | None,
    as_json: bool,
) -> None:
    """Show what trials of the sweep in FILE would do.

    Trains nothing. Takes all configurations of a small grid, or draws some from all over the space. For each
    configuration: shards, units, memory, the smallest sufficient budget, and the bytes that a step moves, by kind.
    """
    spec = with_settings(read_sweep_file(file), settings)
    # torch takes seconds to import; help, version and a wrong file do not wait for it.
    from hydra_tune.cli.dry_run.planning import run_plan  # noqa: PLC0415

    count = trials or _count(spec)
    engine_options = {"devices": devices, "device_memory": device_memory, "fusion": fusion}
    draw_seed = spec.seed or 0 if seed is None else seed
    sys.exit(
        run_plan(
            spec,
            engine_options,
            count=count,
            seed=draw_seed,
            as_json=as_json,
            probe=probe,
            profile=profile_trials or profile,
        )
    )
