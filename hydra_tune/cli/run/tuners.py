"""Finds the tuner for a sweep, and the finder of its weights, by entry points.

The engine knows no tuning framework: each tuner registers itself as an entry point.
"""

from importlib.metadata import entry_points
from typing import cast

from hydra_tune.cli.run.weights_query import WeightsFinder
from hydra_tune.cli.sweep_file.request import ClusterTuner, Tuner
from hydra_tune.errors import ConfigError

_TUNERS, _FINDERS, _CLUSTERS = "hydra_tune.tuners", "hydra_tune.weights", "hydra_tune.cluster_tuners"


def find_tuner(name: str) -> Tuner:
    """Load the tuner installed under `name`.

    Raises:
        ConfigError: the tuner, or its framework, is not installed.
    """
    return cast("Tuner", _load(_TUNERS, name))


def find_cluster_tuner(name: str) -> ClusterTuner:
    """Load the tuner for clusters installed under `name`.

    Raises:
        ConfigError: the tuner, or its framework, is not installed.
    """
    return cast("ClusterTuner", _load(_CLUSTERS, name))


def find_finder(name: str) -> WeightsFinder:
    """Load the weights finder of the tuner installed under `name`.

    Raises:
        ConfigError: the tuner, or its framework, is not installed.
    """
    return cast("WeightsFinder", _load(_FINDERS, name))


def _load(group: str, name: str) -> object:
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
