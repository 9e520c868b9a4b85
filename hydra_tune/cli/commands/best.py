"""`hydra-tune best`: the arguments. `hydra_tune.cli.run.export` writes weights, `hydra_tune.cli.inspect` finds the trial.

`cli/root.py` adds the command to `hydra-tune`, and users call the command during a sweep or afterwards. Only `--out`
imports torch: the module must not import torch at its top.
"""

import json
import sys
from pathlib import Path

import click

from hydra_tune.cli.inspect.run_output import trial_data
from hydra_tune.cli.inspect.run_scan import find_run
from hydra_tune.cli.inspect.sweep_run_record import SweepRunRecord
from hydra_tune.cli.inspect.trial_output import chosen_trial, trial_text
from hydra_tune.errors import ConfigError
from hydra_tune.observe.live.snapshot import TrialView

_EXIT_CODES = """\b
Exit codes:
  0    done
  1    the weights are not kept, do not give the value of the trial, are damaged, or
       cannot be written
  2    the command makes no sense, or there is no such run or trial; nothing was written
  130  interrupted by Ctrl-C
"""


@click.command(epilog=_EXIT_CODES)
@click.argument("run", required=False)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the weights to this file, as safetensors.",
)
@click.option("--storage", metavar="URL", help="Look for the study in this storage.")
@click.option("--trial", type=click.IntRange(min=0), metavar="N", help="Take this trial.  [the best one]")
@click.option("--weights-dir", metavar="DIR", help="Look for the weights in this folder, if they were moved.")
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else on standard output.")
def best(
    *,
    run: str | None,
    out: Path | None,
    storage: str | None,
    trial: int | None,
    weights_dir: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Print the best trial of RUN, or export its weights.

    RUN is a sweep file, an event log, an SQLite file or the name of a study. Without RUN, the only run is taken. With
    --out the weights are written to a file; the sweep must have kept weights: hydra.keep_best.
    """
    if out is None and (force or weights_dir is not None):
        raise click.UsageError("--force and --weights-dir are for weights; give --out FILE as well")
    if out is not None:
        # The write checks --out again; here a mistake is found before the storage is opened and torch is imported.
        _check_out(out, force=force)
    record = find_run(run, storage)
    chosen = chosen_trial(record, trial)
    if out is None:
        _print_best(record, chosen, as_json=as_json)
        return
    # torch takes seconds to import; help, version and a wrong name do not wait for it.
    from hydra_tune.cli.run.export import export_weights  # noqa: PLC0415

    sys.exit(export_weights(record, chosen, out, weights_dir=weights_dir, overwrite=force, as_json=as_json))


def _print_best(run: SweepRunRecord, trial: TrialView, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"study": run.study, "trial": trial.number, **trial_data(trial)}, allow_nan=False))
    else:
        click.echo(trial_text(run, trial))


def _check_out(out: Path, *, force: bool) -> None:
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder; give a file in it, such as {out / 'best.safetensors'}")
    if out.exists() and not force:
        raise ConfigError(f"{out} is there already; give another --out, or --force to replace it")
    if not out.parent.is_dir():
        raise ConfigError(f"there is no folder {out.parent} for --out {out}; make it, or give another")
