"""Finds the tuner that runs a sweep. The engine knows no tuning framework: tuners announce themselves."""

from importlib.metadata import entry_points
from typing import cast

from hydra_tune.cli.request import Tuner
from hydra_tune.errors import ConfigError

_GROUP = "hydra_tune.tuners"


def find_tuner(name: str) -> Tuner:
    """The tuner installed under `name`.

    Raises:
        ConfigError: it is not installed, or what it needs is not.
    """
    for entry_point in entry_points(group=_GROUP, name=name):
        try:
            return cast("Tuner", entry_point.load())
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != name:
                raise
            raise ConfigError(_missing(name)) from error
    raise ConfigError(_missing(name))


def _missing(name: str) -> str:
    return f"a sweep needs {name}, which is not installed: pip install 'hydra-tune[{name}]'"
