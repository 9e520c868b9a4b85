"""Estimates of the compute that each trial still needs, smoothed from the pools' reports.

A pool knows the seconds of a trial's epochs once the trial has begun, or, for data without a length, has drawn an epoch;
before that only the number of epochs, and nothing before building the trial. A trial never timed is assumed to take the
average time of the others' epochs. `PoolDirectory` (`pool_directory.py`) passes each pool's report on, and asks for the
estimates before placing or moving a trial. All calls come from the directory's event loop, so there is no lock.

Note: smoothing. A pool measures seconds per step over the last few steps, and on a busy machine this figure doubles and
halves within seconds. The remaining time multiplies the noise, so raw figures would send trials to and fro. The number of
remaining epochs is exact; only the seconds of an epoch are smoothed, over about ten of the pools' heartbeats.
"""

from collections.abc import Set as AbstractSet

from hydra_tune_ray.messages import PoolLoadReport

_WEIGHT = 0.1
_UNKNOWN_SECONDS = 10.0
_UNKNOWN_EPOCHS = 10.0


class RemainingTimeEstimator:
    """Estimates of remaining seconds, as the module's docstring says. Trials are identified by their keys."""

    def __init__(self) -> None:
        self._epochs: dict[str, float] = {}
        self._seconds: dict[str, float] = {}  # of an epoch
        self._usual_seconds = _UNKNOWN_SECONDS / _UNKNOWN_EPOCHS
        self._usual_epochs = _UNKNOWN_EPOCHS

    def hear(self, load: PoolLoadReport) -> None:
        """Take a pool's report on its trials."""
        self._epochs |= load.epochs
        reports = dict(load.trials) | {key: seconds for key, (_, seconds) in load.leaving.items()}
        for key, seconds in reports.items():
            if seconds is None:
                continue
            if load.epochs[key] > 0:
                new_seconds = seconds / load.epochs[key]
                old_seconds = self._seconds.get(key, new_seconds)
                # An exponential mean, which has followed two thirds of a lasting change after 1 / _WEIGHT reports.
                self._seconds[key] = old_seconds + _WEIGHT * (new_seconds - old_seconds)

    def keep(self, keys: AbstractSet[str]) -> None:
        """Drop all trials except `keys`, and update the averages."""
        self._epochs = {key: epochs for key, epochs in self._epochs.items() if key in keys}
        self._seconds = {key: seconds for key, seconds in self._seconds.items() if key in keys}
        # Without any trial the last averages stay, as the best guess for the next trial.
        if self._epochs:
            self._usual_epochs = sum(self._epochs.values()) / len(self._epochs)
        num_timed_epochs = sum(self._epochs[key] for key in self._seconds)
        if num_timed_epochs > 0:
            # Weighted by epochs left, so that nearly finished trials count little.
            self._usual_seconds = (
                sum(self._epochs[key] * epoch_seconds for key, epoch_seconds in self._seconds.items())
                / num_timed_epochs
            )

    def seconds(self, key: str) -> float:
        """Estimated seconds of compute that a trial still needs."""
        return self._seconds.get(key, self._usual_seconds) * self._epochs.get(key, self._usual_epochs)

    @property
    def usual(self) -> float:
        """Estimated seconds of an unknown trial."""
        return self._usual_seconds * self._usual_epochs
