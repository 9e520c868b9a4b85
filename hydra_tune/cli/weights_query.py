"""How the weights of a sweep are asked for afterwards; apart from the request of a sweep, which needs torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsQuery:
    """Which weights are asked for, after a sweep.

    Args:
        study: the study's name; None: the only one in the storage.
        storage: where the study is kept.
        trial: the number of the trial; None: the best one.
        weights_dir: where the weights are now, if they were moved.
    """

    study: str | None
    storage: str
    trial: int | None = None
    weights_dir: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTrial:
    """A trial whose weights are kept.

    Args:
        study: the study's name.
        number: of the trial.
        value: of the trial.
        params: what was drawn.
        path: of the weights.
    """

    study: str
    number: int
    value: float | None
    params: Mapping[str, Any]
    path: Path


WeightsFinder = Callable[[WeightsQuery], KeptTrial]
"""Finds weights, of the group `hydra_tune.weights`. Raises `ConfigError` if the storage, the study or the trial is not there,
and `WeightsError` if the weights are not kept; creates nothing."""
