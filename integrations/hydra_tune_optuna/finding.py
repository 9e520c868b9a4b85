"""Finds the weights of a finished sweep: the entry point `optuna` of the group `hydra_tune.weights`.

The module only reads: a missing storage or study is an error, never created. `hydra-tune best` and `export`
(`hydra_tune/cli/run/export.py`) find `find_weights` by the entry point, to export a trial's weights. The module imports
torch, unlike `study_reader.py`.
"""

from pathlib import Path

from hydra_tune.cli.run.weights_query import WeightsQuery
from hydra_tune_optuna.study_reader import stored_study
from hydra_tune_optuna.weights import refuse_later, weights_path


def find_weights(query: WeightsQuery) -> Path:
    """Find a trial's kept weights.

    Args:
        query: names the storage, the study and the trial.

    Returns:
        The path of the weights.

    Raises:
        ConfigError: the storage or the study is missing.
        WeightsError: the weights are not kept, or the trial's value is that of an earlier report (`result="best"`).
        FileError: the file cannot be read, or is damaged.
    """
    path = weights_path(stored_study(query.storage, query.study), query.trial, weights_dir=query.weights_dir)
    refuse_later(path, query.trial)
    return path
