"""`hydra-tune best`: the arguments. `hydra_tune.cli.run.export` writes weights, `hydra_tune.cli.inspect` finds the trial.

`cli/root.py` adds the command to `hydra-tune`, and users call the command once trials of a sweep with `hydra.keep_best`
have completed.
"""

import json
import sys
from pathlib import Path

import click

from hydra_tune.cli.commands.sweep import USAGE
from hydra_tune.cli.inspect.run_output import trial_data
from hydra_tune.cli.inspect.run_scan import find_run
from hydra_tune.cli.inspect.trial_output import chosen_trial, trial_text
from hydra_tune.cli.run.weights_query import WeightsQuery
from hydra_tune.cli.sweep_file.reader import read_sweep_file
from hydra_tune.errors import ConfigError

_EXIT_CODES = """\b
Exit codes:
  0    done
  1    the weights are not kept, are damaged, or cannot be written
  2    the command makes no sense, or there is no such storage, study or trial; nothing was written
  130  interrupted by Ctrl-C
"""


@click.command(epilog=_EXIT_CODES)
@click.argument("study")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the weights to this file, as safetensors.",
)
@click.option("--storage", metavar="URL", help="Look for the study in this storage.  [that of the sweep file]")
@click.option("--trial", type=click.IntRange(min=0), metavar="N", help="Take this trial.  [the best one]")
@click.option("--weights-dir", metavar="DIR", help="Look for the weights in this folder, if they were moved.")
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else on standard output.")
def best(
    *,
    study: str,
    out: Path | None,
    storage: str | None,
    trial: int | None,
    weights_dir: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Print the best trial of STUDY, or export its weights.

    With --out the weights are written to a file. STUDY is a sweep file, or with --storage the name of a study. For
    --out the sweep must have kept weights: hydra.keep_best.
    """
    if out is None:
        if force or weights_dir is not None:
            raise click.UsageError("--force and --weights-dir are for weights; give --out FILE as well")
        sys.exit(_print_best(study, storage, trial, as_json=as_json))
    try:
        query = _query(study, storage, trial, weights_dir)
        # The write checks --out again; here a mistake is found before torch is imported and the storage is opened.
        _check_out(out, force=force)
    except ConfigError as error:
        click.echo(str(error), err=True)
        sys.exit(USAGE)
    # torch takes seconds to import; help, version and a wrong file do not wait for it.
    from hydra_tune.cli.run.export import export  # noqa: PLC0415

    sys.exit(export(query, out, overwrite=force, as_json=as_json))


def _print_best(study: str, storage: str | None, number: int | None, *, as_json: bool) -> int:
    try:
        run = find_run(study, storage)
        trial = chosen_trial(run, number)
    except ConfigError as error:
        click.echo(str(error), err=True)
        return USAGE
    if as_json:
        click.echo(json.dumps({"study": run.study, "trial": trial.number, **trial_data(trial)}, allow_nan=False))
    else:
        click.echo(trial_text(run, trial))
    return 0


def _check_out(out: Path, *, force: bool) -> None:
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder; give a file in it, such as {out / 'best.safetensors'}")
    if out.exists() and not force:
        raise ConfigError(f"{out} is there already; give another --out, or --force to replace it")
    if not out.parent.is_dir():
        raise ConfigError(f"there is no folder {out.parent} for --out {out}; make it, or give another")


def _query(study: str, storage: str | None, trial: int | None, weights_dir: str | None) -> WeightsQuery:
    path = Path(study)
    # No file, so STUDY must be a name, which only means something within a storage.
    if not path.is_file():
        if storage is None:
            raise ConfigError(
                f"there is no sweep file {study!r}; if it is the name of a study, give --storage URL as well"
            )
        return WeightsQuery(study=study, storage=storage, trial=trial, weights_dir=weights_dir)
    spec = read_sweep_file(path)
    url = storage or spec.storage
    if url is None:
        raise ConfigError(
            f"{study}: the sweep has no hydra.storage, so its study ended with its process; its weights are files of their "
            "own, which the sweep's last lines have named"
        )
    return WeightsQuery(
        study=spec.study,
        storage=url,
        trial=trial,
        weights_dir=weights_dir or spec.weights_dir,
        domains=spec.parameters or {},
    )
