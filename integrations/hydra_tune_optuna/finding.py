"""Finds the weights of a finished sweep: the entry point `optuna` of the group `hydra_tune.weights`.

The module only reads: a missing storage or study is an error, never created. `hydra-tune best`
(`hydra_tune/cli/run/export.py`) calls `find_weights` to export a trial's weights.
"""

import optuna
from optuna.study import Study

from hydra_tune.cli.run.weights_query import KeptTrial, WeightsQuery
from hydra_tune.errors import ConfigError, WeightsError, message_line
from hydra_tune_optuna.storage_opening import check_file, open_storage
from hydra_tune_optuna.sweep import given
from hydra_tune_optuna.weights import weights_path

_NUM_NAMED = 5


def find_weights(query: WeightsQuery) -> KeptTrial:
    """Find a trial's kept weights.

    Args:
        query: names the storage, the study and the trial.

    Returns:
        The trial and the path of its weights.

    Raises:
        ConfigError: the storage, the study or the trial is missing, or the storage has several studies.
        WeightsError: the weights are not kept, or no trial has completed.
    """
    study = _study(query)
    if query.trial is None:
        try:
            trial = study.best_trial
        except (ValueError, RuntimeError) as error:
            raise WeightsError(
                f"study {study.study_name!r} has no best trial: {message_line(error)} name one of its trials with --trial"
            ) from error
    else:
        trials = study.get_trials(deepcopy=False)
        if query.trial >= len(trials):
            raise ConfigError(f"study {study.study_name!r} has no trial {query.trial}; it has {len(trials)}, from 0 on")
        trial = trials[query.trial]
    return KeptTrial(
        study=study.study_name,
        number=trial.number,
        value=trial.values[0] if trial.values else None,
        params={name: given(query.domains, name, value) for name, value in trial.params.items()},
        path=weights_path(study, trial, weights_dir=query.weights_dir),
    )


def _study(query: WeightsQuery) -> Study:
    check_file(query.storage)
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        storage = open_storage(query.storage)
        assert storage is not None
        names = sorted(optuna.get_all_study_names(storage))
    except Exception as error:
        raise ConfigError(f"the storage {query.storage!r} cannot be opened: {message_line(error)}") from error
    finally:
        optuna.logging.set_verbosity(verbosity)
    return optuna.load_study(study_name=_chosen(query, names), storage=storage)


def _chosen(query: WeightsQuery, names: list[str]) -> str:
    if not names:
        raise ConfigError(f"there is no study in {query.storage}")
    names_text = ", ".join(map(repr, names[:_NUM_NAMED]))
    if len(names) > _NUM_NAMED:
        names_text += f", and {len(names) - _NUM_NAMED} more"
    if query.study is None and len(names) > 1:
        raise ConfigError(f"there are {len(names)} studies in {query.storage}: {names_text}; give the name of one")
    if query.study is not None and query.study not in names:
        raise ConfigError(f"there is no study {query.study!r} in {query.storage}; there is {names_text}")
    return query.study or names[0]
