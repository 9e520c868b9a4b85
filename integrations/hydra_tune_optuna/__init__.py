"""Optuna with a shared pool: `import hydra_tune_optuna`.

The package offers everything of Optuna under the same names, and `create_study` and `load_study` also take `executor=`.
A study made with an executor is a `PoolStudy`: its `optimize` trains the `TrainTask` returned by the objective in the
executor's pool. Without an executor the package acts as Optuna, unchanged. `install()` makes `import optuna` itself
take `executor=`.

The package must not know shards, and of devices only names and number: an executor takes tasks and hands back reports.
Read `study` and `pool_study` first, then `search`, the loop between study and pool, and `weights`, which keeps the best
trials' weights. `sweep`, `finding`, `study_reader` and `storage_opening` serve the command line, `monkeypatch` has
`install`, and `optuna_internals` alone uses Optuna's private names. `hyperparameter_search` of `hydra_tune_transformers`
makes its study here.

Note: imports. `import hydra_tune_optuna` must not import torch, because `hydra-tune list` reads studies without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

import optuna
from optuna import (
    Study,
    Trial,
    TrialPruned,
    __version__,
    artifacts,
    copy_study,
    create_trial,
    delete_study,
    distributions,
    exceptions,
    get_all_study_names,
    get_all_study_summaries,
    importance,
    integration,
    logging,
    pruners,
    samplers,
    search_space,
    storages,
    trial,
    version,
    visualization,
)

if TYPE_CHECKING:
    from hydra_tune_optuna import study
    from hydra_tune_optuna.errors import TrialCancelledError
    from hydra_tune_optuna.monkeypatch import install, uninstall
    from hydra_tune_optuna.pool_study import PoolStudy
    from hydra_tune_optuna.study import create_study, load_study
    from hydra_tune_optuna.weights import kept_weights, load_module, weights_path

__all__ = [
    "PoolStudy",
    "Study",
    "Trial",
    "TrialCancelledError",
    "TrialPruned",
    "__version__",
    "artifacts",
    "copy_study",
    "create_study",
    "create_trial",
    "delete_study",
    "distributions",
    "exceptions",
    "get_all_study_names",
    "get_all_study_summaries",
    "importance",
    "install",
    "integration",
    "kept_weights",
    "load_module",
    "load_study",
    "logging",
    "pruners",
    "samplers",
    "search_space",
    "storages",
    "study",
    "trial",
    "uninstall",
    "version",
    "visualization",
    "weights_path",
]

# Imported on first use, because most of these modules import torch, and the reader of studies needs none.
_HOMES = {
    "PoolStudy": "pool_study",
    "TrialCancelledError": "errors",
    "create_study": "study",
    "install": "monkeypatch",
    "kept_weights": "weights",
    "load_module": "weights",
    "load_study": "study",
    "uninstall": "monkeypatch",
    "weights_path": "weights",
}

if not TYPE_CHECKING:  # a type checker would take every misspelt name for a real one

    def __getattr__(name: str) -> object:
        if name == "study":
            return import_module("hydra_tune_optuna.study")
        if name not in _HOMES:
            return getattr(optuna, name)
        value = getattr(import_module(f"hydra_tune_optuna.{_HOMES[name]}"), name)
        # Cached as a module attribute: later accesses no longer come here.
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *dir(optuna)})
