"""Exports a run: the weights of one trial to a file (`hydra-tune best`), or all results to a folder (`hydra-tune export`).

`cli/commands/best.py` calls `export_weights`, and `cli/commands/export.py` calls `export_run`, once the run is found.
Both commands import the module late, because the module imports torch.
"""

import io
import json
import sys
from pathlib import Path

from hydra_tune.checkpoint.tensors import load_tensors, save_tensors
from hydra_tune.cli.inspect.run_output import to_json, trial_data
from hydra_tune.cli.inspect.run_scan import kept_study, study_reader
from hydra_tune.cli.inspect.sweep_run_record import SweepRunRecord
from hydra_tune.cli.inspect.trial_output import chosen_trial, trial_text, write_csv
from hydra_tune.cli.run.sweep_run import DONE, FAILED, TUNER
from hydra_tune.cli.run.tuners import FINDERS, find
from hydra_tune.cli.run.weights_query import WeightsQuery
from hydra_tune.errors import ConfigError, FileError, HydraTuneError, WeightsError
from hydra_tune.observe.live.snapshot import TrialView

_OTHER_WEIGHTS = (
    "for another trial, or weights that were moved, use hydra-tune best --trial N --weights-dir DIR --out FILE"
)


def export_weights(
    run: SweepRunRecord, trial: TrialView, out: Path, *, weights_dir: str | None, overwrite: bool, as_json: bool
) -> int:
    """Find weights and write them to a file, with their metadata; return the exit code of the program.

    `weights_dir` is the present place of the weights; None: that of the sweep file. With `as_json`, standard output has one
    JSON object and nothing else.
    """
    try:
        study, path = _copy_weights(run, trial, out, weights_dir=weights_dir, overwrite=overwrite)
    except (FileError, WeightsError) as error:
        print(error, file=sys.stderr)  # noqa: T201 - it is output
        return FAILED
    if as_json:
        facts = trial_data(trial)
        report = {
            "study": study,
            "trial": trial.number,
            "value": facts["value"],
            "params": facts["params"],
            "weights": str(path),
            "out": str(out),
        }
        print(json.dumps(report, allow_nan=False))  # noqa: T201 - it is output
    else:
        print(f"{trial_text(run, trial)}\nweights: {out}")  # noqa: T201 - it is output
    return DONE


def export_run(run: SweepRunRecord, folder: Path) -> list[str]:
    """Write trials, pictures and the best weights of a run into an existing folder.

    Files of the same names are replaced, or removed where this run has nothing for them.

    Returns:
        One line for each file that could not be made, with the reason.

    Raises:
        OSError: the folder cannot be written.
    """
    pictures, weights = folder / "plots.png", folder / "best.safetensors"
    for path in (pictures, weights):
        # First, because each of the two may fail: an older file must not pass for one of this run.
        path.unlink(missing_ok=True)
    table = io.StringIO()
    write_csv(table, run, None)
    (folder / "trials.csv").write_text(table.getvalue(), encoding="utf-8")
    (folder / "run.json").write_text(json.dumps(to_json(run), allow_nan=False, indent=1) + "\n", encoding="utf-8")
    missing: list[str] = []
    try:
        missing += study_reader().plot(*kept_study(run), pictures)
    except ConfigError as error:
        missing.append(f"no plots.png: {error}")
    try:
        best = chosen_trial(run, None)
        _copy_weights(run, best, weights, weights_dir=None, overwrite=True)
    except WeightsError as error:
        missing.append(f"no best.safetensors: {error}; {_OTHER_WEIGHTS}")
    except HydraTuneError as error:
        missing.append(f"no best.safetensors: {error}")
    return missing


def _copy_weights(
    run: SweepRunRecord, trial: TrialView, out: Path, *, weights_dir: str | None, overwrite: bool
) -> tuple[str, Path]:
    """Write the weights of a trial to a file; return the study and the file of its `weights_dir`."""
    storage, study = kept_study(run)
    query = WeightsQuery(study=study, storage=storage, trial=trial.number, weights_dir=weights_dir or run.weights_dir)
    path: Path = find(FINDERS, TUNER)(query)
    tensors, metadata = load_tensors(path)
    save_tensors(out, tensors, metadata, overwrite=overwrite)
    return study, path
