"""Finds the weights of a finished sweep: the entry point `optuna` of the group `hydra_tune.weights`.

`hydra-tune best` and `export` (`hydra_tune/cli/run/export.py`) find `find_weights` by the entry point, to export a trial's
weights. The module must not create a storage or a study.
"""

from pathlib import Path

from hydra_tune.cli.run.weights_query import WeightsQuery
from hydra_tune_optuna.study_reader import stored_study
from hydra_tune_optuna.weights import refuse_later, weights_path


def find_weights(query: WeightsQuery) -> Path:
    """Find a trial's kept weights.

    Raises:
        ConfigError: the storage or the study is missing.
        WeightsError: the weights are not kept, or the trial's value is that of an earlier report (`result="best"`).
        FileError: the file cannot be read, or is damaged.
    """
    path = weights_path(stored_study(query.storage, query.study), query.trial, weights_dir=query.weights_dir)
    refuse_later(path, query.trial)
    return path
