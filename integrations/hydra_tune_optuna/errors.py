"""Errors that only the Optuna integration raises."""

from hydra_tune.errors import HydraTuneError


class TrialCancelledError(HydraTuneError):
    """A trial whose job was cancelled by someone other than its study; pass it in `catch` to search on."""
