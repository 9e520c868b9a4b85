"""Errors that only the Ray integration raises."""

from hydra_tune.errors import ConfigError, HydraTuneError


class RayVersionError(ConfigError, ImportError):
    """Ray is not installed, or in a version that this release has not been tested with."""


class BuildPickleError(ConfigError):
    """What is to be sent to a pool and cannot be pickled; the message names the object."""


class PoolError(HydraTuneError):
    """A pool that cannot be started, does not answer, or has died."""


class TrialError(HydraTuneError):
    """A trial that has failed in its pool; the message has what it raised there."""
