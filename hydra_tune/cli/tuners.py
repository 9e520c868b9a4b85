"""Finds the tuner that runs a sweep, and what finds its weights afterwards.

The engine knows no tuning framework: tuners announce themselves.
"""

from importlib.metadata import entry_points
from typing import cast

from hydra_tune.cli.request import ClusterTuner, Tuner
from hydra_tune.cli.weights_query import WeightsFinder
from hydra_tune.errors import ConfigError

_TUNERS, _FINDERS, _CLUSTERS = "hydra_tune.tuners", "hydra_tune.weights", "hydra_tune.cluster_tuners"


def find_tuner(name: str) -> Tuner:
    """The tuner installed under `name`.

    Raises:
        ConfigError: it is not installed, or what it needs is not.
    """
    return cast("Tuner", _load(_TUNERS, name))


def find_cluster_tuner(name: str) -> ClusterTuner:
    """The tuner installed under `name` that runs sweeps on clusters.

    Raises:
        ConfigError: it is not installed, or what it needs is not.
    """
    return cast("ClusterTuner", _load(_CLUSTERS, name))


def find_finder(name: str) -> WeightsFinder:
    """What finds the weights of the sweeps that the tuner installed under `name` has run.

    Raises:
        ConfigError: it is not installed, or what it needs is not.
    """
    return cast("WeightsFinder", _load(_FINDERS, name))


def _load(group: str, name: str) -> object:
    for entry_point in entry_points(group=group, name=name):
        try:
            return entry_point.load()
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != name:
                raise
            raise ConfigError(_missing(name)) from error
    raise ConfigError(_missing(name))


def _missing(name: str) -> str:
    return f"a sweep needs {name}, which is not installed: pip install 'hydra-tune[{name}]'"
