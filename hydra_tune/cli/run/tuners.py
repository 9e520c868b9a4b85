"""Finds the tuner for a sweep, the finder of its weights, and the reader of studies, by entry points.

The engine knows no tuning framework: each tuner registers itself as an entry point. `sweep_run.py`, `cluster.py` and
`cli/dry_run/checking.py` find the tuner before any pool is opened, `export.py` finds the finder when weights are
exported, and `cli/inspect/run_scan.py` finds the reader. The module must not import torch.
"""

from importlib.metadata import entry_points
from typing import Any

from hydra_tune.errors import ConfigError

TUNERS, CLUSTERS, FINDERS = "hydra_tune.tuners", "hydra_tune.cluster_tuners", "hydra_tune.weights"
"""Groups of entry points: each of a `Tuner`, a `ClusterTuner` and a `WeightsFinder`."""


def find(group: str, name: str) -> Any:
    """Load what a tuner has registered under its name in a group.

    Raises:
        ConfigError: the tuner, or its framework, is not installed.
    """
    for entry_point in entry_points(group=group, name=name):
        try:
            return entry_point.load()
        except ModuleNotFoundError as error:
            # Only the framework itself may be missing; any other failed import is a bug, shown in full.
            if error.name is None or error.name.partition(".")[0] != name:
                raise
            raise ConfigError(_missing(name)) from error
    raise ConfigError(_missing(name))


def _missing(name: str) -> str:
    return f"a sweep needs {name}, which is not installed: pip install 'hydra-tune[{name}]'"
