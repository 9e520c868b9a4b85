"""Errors that only the Optuna integration raises."""

from hydra_tune.errors import HydraTuneError


class TrialCancelledError(HydraTuneError):
    """A trial's job was cancelled by a caller other than its study; add the class to `catch` to search on."""
