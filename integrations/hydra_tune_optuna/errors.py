"""Errors that only the Optuna integration raises.

`OptimizeDriver` (`search/driver.py`) fails a trial with `TrialCancelledError` if another caller has cancelled the
trial's job; people import the class from `hydra_tune_optuna`.
"""

from hydra_tune.errors import HydraTuneError


class TrialCancelledError(HydraTuneError):
    """A trial's job was cancelled by a caller other than its study; add the class to `catch` to search on."""
