"""Request for a sweep's weights, apart from the request of a sweep (`cli/sweep_file/request.py`), which imports torch.

`export.py` hands a `WeightsQuery` to the finder, and the finder (`integrations/hydra_tune_optuna/finding.py`) answers
with the path of the file. The module must not import torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsQuery:
    """Names the weights to find.

    Args:
        weights_dir: folder that the user or the sweep file names for the weights; None: neither names a folder.
    """

    study: str
    storage: str
    trial: int
    weights_dir: str | None = None


WeightsFinder = Callable[[WeightsQuery], Path]
"""Finds the file of a trial's weights, from the entry points `hydra_tune.weights`. Raises `ConfigError` if the storage or
the study does not exist, and `WeightsError` if the weights were not kept or do not give the trial's value; creates
nothing.
"""
