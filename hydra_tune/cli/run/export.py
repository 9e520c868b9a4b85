"""Exports the weights of a sweep's trial to a file.

`cli/commands/best.py` calls `export` once the trial of `hydra-tune best` is found.
"""

import json
import sys
from pathlib import Path

from hydra_tune.checkpoint.tensors import load_tensors, save_tensors
from hydra_tune.cli.inspect.run_output import trial_data
from hydra_tune.cli.inspect.run_scan import kept_study
from hydra_tune.cli.inspect.sweep_run_record import SweepRunRecord
from hydra_tune.cli.inspect.trial_output import trial_text
from hydra_tune.cli.run.sweep_run import DONE, FAILED, INTERRUPTED, TUNER, USAGE
from hydra_tune.cli.run.tuners import FINDERS, find
from hydra_tune.cli.run.weights_query import WeightsQuery
from hydra_tune.errors import ConfigError, FileError, WeightsError
from hydra_tune.observe.live.snapshot import TrialView


def export(
    run: SweepRunRecord, trial: TrialView, out: Path, *, weights_dir: str | None, overwrite: bool, as_json: bool
) -> int:
    """Find weights and write them to a file, with facts of their trial as metadata.

    Args:
        run: the run.
        trial: its trial.
        out: the file.
        weights_dir: present place of the weights; None: that of the sweep file.
        overwrite: whether to replace an existing file.
        as_json: one JSON object on standard output, and nothing else.

    Returns:
        The exit code of the program.
    """
    try:
        storage, study = kept_study(run)
        query = WeightsQuery(
            study=study, storage=storage, trial=trial.number, weights_dir=weights_dir or run.weights_dir
        )
        path: Path = find(FINDERS, TUNER)(query)
        tensors, metadata = load_tensors(path)
        save_tensors(out, tensors, metadata, overwrite=overwrite)
    except ConfigError as error:
        print(error, file=sys.stderr)  # noqa: T201 - it is output
        return USAGE
    except (FileError, WeightsError) as error:
        print(error, file=sys.stderr)  # noqa: T201 - it is output
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
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
