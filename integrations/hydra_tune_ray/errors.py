"""Errors that only the Ray integration raises.

`installed.py` raises `RayVersionError`, `pickling.py` `BuildPickleError`, and `client.py` and `trainable.py` `TrialError`;
`client.py`, `pools.py`, `version.py` and `node/` raise `PoolError`. People import the classes from `hydra_tune_ray`. If Ray
is missing or untested, the import of `hydra_tune_ray` itself raises `RayVersionError`, which people catch as a
`ConfigError` or an `ImportError`.

The module must import neither Ray nor torch: `installed.py` imports the module to say that Ray is missing. Ray pickles
errors on their way to the driver, so a class takes its message alone.
"""

from hydra_tune.errors import ConfigError, HydraTuneError


class RayVersionError(ConfigError, ImportError):
    """Ray, or a package that Ray Tune needs, is missing, or this release has not been tested with the version of Ray."""


class BuildPickleError(ConfigError):
    """An object for a pool cannot be pickled; the message names the part to blame."""


class PoolError(HydraTuneError):
    """A pool failed to start, does not answer, has died, or is of another version; or a checkpoint could not be fetched."""


class TrialError(HydraTuneError):
    """A trial cannot go on.

    The trial has failed in its pool (the message contains the original error), was ended there, has no result for Ray, or
    has no usable checkpoint.
    """
