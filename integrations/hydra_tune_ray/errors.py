"""Errors that only the Ray integration raises."""

from hydra_tune.errors import ConfigError, HydraTuneError


class RayVersionError(ConfigError, ImportError):
    """Ray is missing, or its version has not been tested with this release."""


class BuildPickleError(ConfigError):
    """An object for a pool cannot be pickled; the message names the part to blame."""


class PoolError(HydraTuneError):
    """A pool failed to start, does not answer, or has died."""


class TrialError(HydraTuneError):
    """A trial has failed in its pool; the message contains the original error."""
