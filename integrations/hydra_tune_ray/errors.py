"""Errors that only the Ray integration raises.

`installed.py` raises `RayVersionError`, `pickling.py` `BuildPickleError`, and `client.py` and `trainable.py` `TrialError`;
`client.py`, `pools.py`, `version.py` and `node/` raise `PoolError`. People import the classes from `hydra_tune_ray`.
"""

from hydra_tune.errors import ConfigError, HydraTuneError


class RayVersionError(ConfigError, ImportError):
    """Ray is missing, or its version has not been tested with this release."""


class BuildPickleError(ConfigError):
    """An object for a pool cannot be pickled; the message names the part to blame."""


class PoolError(HydraTuneError):
    """A pool failed to start, does not answer, or has died."""


class TrialError(HydraTuneError):
    """A trial has failed in its pool; the message contains the original error."""
