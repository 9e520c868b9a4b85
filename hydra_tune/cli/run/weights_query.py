"""Request for a sweep's weights; apart from the request of a sweep, whose module imports torch.

`cli/commands/best.py` makes a `WeightsQuery` from its arguments, `export.py` hands the query to the finder, and the
finder (`integrations/hydra_tune_optuna/finding.py`) answers with a `KeptTrial`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra_tune.cli.sweep_file.domains import Domain


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsQuery:
    """Names the weights to find, after a sweep.

    Args:
        study: the study's name; None: the only study in the storage.
        storage: storage of the study.
        trial: the number of the trial; None: the best trial.
        weights_dir: present place of the weights, if moved.
        domains: of the sweep's parameters; values are rounded as the task was given them.
    """

    study: str | None
    storage: str
    trial: int | None = None
    weights_dir: str | None = None
    domains: Mapping[str, Domain] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTrial:
    """A trial with kept weights.

    Args:
        study: the study's name.
        number: of the trial.
        value: of the trial.
        params: drawn parameters.
        path: of the weights.
    """

    study: str
    number: int
    value: float | None
    params: Mapping[str, Any]
    path: Path


WeightsFinder = Callable[[WeightsQuery], KeptTrial]
"""Finds weights, from the entry points `hydra_tune.weights`. Raises `ConfigError` if the storage, the study or the trial
does not exist, and `WeightsError` if the weights were not kept; creates nothing.
"""
