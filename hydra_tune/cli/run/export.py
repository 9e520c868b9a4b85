"""Exports the weights of a sweep's trial to a file.

`cli/commands/best.py` calls `export` once the arguments of `hydra-tune best` are checked.
"""

import json
import sys
from pathlib import Path

from hydra_tune.checkpoint.tensors import load_tensors, save_tensors
from hydra_tune.cli.run.sweep_run import DONE, FAILED, INTERRUPTED, TUNER, USAGE
from hydra_tune.cli.run.tuners import FINDERS, find
from hydra_tune.cli.run.weights_query import KeptTrial, WeightsQuery
from hydra_tune.errors import ConfigError, FileError, WeightsError
from hydra_tune.observe.live import text


def export(query: WeightsQuery, out: Path, *, overwrite: bool, as_json: bool) -> int:
    """Find weights and write them to a file, with facts of their trial as metadata.

    Args:
        query: names the trial.
        out: the file.
        overwrite: whether to replace an existing file.
        as_json: one JSON object on standard output, and nothing else.

    Returns:
        The exit code of the program.
    """
    try:
        kept_trial: KeptTrial = find(FINDERS, TUNER)(query)
        tensors, metadata = load_tensors(kept_trial.path)
        save_tensors(out, tensors, metadata, overwrite=overwrite)
    except ConfigError as error:
        print(error, file=sys.stderr)  # noqa: T201 - it is output
        return USAGE
    except (FileError, WeightsError) as error:
        print(error, file=sys.stderr)  # noqa: T201 - it is output
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    value = None if kept_trial.value is None else text.plain(kept_trial.value)
    if as_json:
        report = {
            "study": kept_trial.study,
            "trial": kept_trial.number,
            "value": value,
            "params": {name: text.plain(param) for name, param in kept_trial.params.items()},
            "weights": str(kept_trial.path),
            "out": str(out),
        }
        print(json.dumps(report, allow_nan=False))  # noqa: T201 - it is output
    else:
        params = "".join(f"\n  {name}: {param}" for name, param in kept_trial.params.items())
        print(f"trial {kept_trial.number} of {kept_trial.study}, value {value}{params}\nweights: {out}")  # noqa: T201 - it is output
    return DONE
