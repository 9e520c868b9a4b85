"""What trials have left to compute, from what pools say of it: smoothed, and guessed where a pool does not know it yet.

A pool knows how long a trial's epochs are once it has computed one, or only how many there are; or, before it has built the
trial, nothing. Epochs nobody has timed are taken to be as long as those of the others, on the average.

Note: why smoothed. A pool's seconds for a step are of the last few steps, and on a busy machine they double and halve within
seconds. What is left is many times that, so trials would be sent to and fro. How many epochs are left is certain; only the
seconds of one are smoothed, over about ten of the pools' pulses.
"""

from collections.abc import Set as AbstractSet

from hydra_tune_ray.messages import Load

_WEIGHT = 0.1
_UNKNOWN_SECONDS = 10.0
_UNKNOWN_EPOCHS = 10.0


class Left:
    """See the module. Trials go by their keys."""

    def __init__(self) -> None:
        self._epochs: dict[str, float] = {}
        self._seconds: dict[str, float] = {}  # of an epoch; where epochs are not told, all that is left is one
        self._usual_seconds = _UNKNOWN_SECONDS / _UNKNOWN_EPOCHS
        self._usual_epochs = _UNKNOWN_EPOCHS

    def hear(self, load: Load) -> None:
        """A pool says what its trials have left."""
        self._epochs |= load.epochs
        told = dict(load.trials) | {key: seconds for key, (_, seconds) in load.leaving.items()}
        for key, seconds in told.items():
            if seconds is None:
                continue
            epochs = load.epochs.get(key)
            if epochs is None:
                self._epochs[key], self._seconds[key] = 1.0, seconds
            elif epochs > 0:
                fresh = seconds / epochs
                known = self._seconds.get(key, fresh)
                self._seconds[key] = known + _WEIGHT * (fresh - known)

    def keep(self, keys: AbstractSet[str]) -> None:
        """There are no others any more."""
        self._epochs = {key: epochs for key, epochs in self._epochs.items() if key in keys}
        self._seconds = {key: seconds for key, seconds in self._seconds.items() if key in keys}
        if self._epochs:
            self._usual_epochs = sum(self._epochs.values()) / len(self._epochs)
        timed = sum(self._epochs[key] for key in self._seconds)
        if timed > 0:
            self._usual_seconds = sum(self._epochs[key] * each for key, each in self._seconds.items()) / timed

    def seconds(self, key: str) -> float:
        """Of compute that a trial has left, as far as anybody knows."""
        return self._seconds.get(key, self._usual_seconds) * self._epochs.get(key, self._usual_epochs)

    @property
    def usual(self) -> float:
        """Seconds of a trial of which nothing is known."""
        return self._usual_seconds * self._usual_epochs
