"""Finds the weights of a finished sweep: the entry point `optuna` of the group `hydra_tune.weights`.

The module only reads: a missing storage or study is an error, never created. `hydra-tune best`
(`hydra_tune/cli/run/export.py`) calls `find_weights` to export a trial's weights.
"""

from pathlib import Path

from hydra_tune.cli.run.weights_query import WeightsQuery
from hydra_tune_optuna.study_reader import stored_study
from hydra_tune_optuna.weights import weights_path


def find_weights(query: WeightsQuery) -> Path:
    """Find a trial's kept weights.

    Args:
        query: names the storage, the study and the trial.

    Returns:
        The path of the weights.

    Raises:
        ConfigError: the storage or the study is missing.
        WeightsError: the weights are not kept.
    """
    return weights_path(stored_study(query.storage, query.study), query.trial, weights_dir=query.weights_dir)
