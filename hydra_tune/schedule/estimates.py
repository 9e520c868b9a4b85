"""`Estimate`: how long a job has run and how long it still will, corrected as its units finish."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Estimate:
    """Times of one job, all on a device of speed 1.

    What is left is either told with each finished unit, or corrected here: the last prediction told, less the predicted
    times of the units finished since, times how much longer than predicted those took.

    Args:
        remaining_seconds: predicted time of what is left, corrected.
        done_seconds: what all finished units took.
    """

    remaining_seconds: float = 0.0
    done_seconds: float = 0.0
    _uncorrected_seconds: float = 0.0  # what is left by the prediction last told
    _predicted_seconds: float = 0.0  # of the units finished since, by that prediction
    _measured_seconds: float = 0.0  # and as they really took

    def tell(self, remaining_seconds: float) -> None:
        """Take a prediction of what is left; it is right until a unit shows otherwise."""
        self.remaining_seconds = self._uncorrected_seconds = remaining_seconds
        self._predicted_seconds = self._measured_seconds = 0.0

    def finish(self, predicted_seconds: float, measured_seconds: float, remaining_seconds: float | None) -> None:
        """A unit is finished.

        Args:
            predicted_seconds: how long it was predicted to take.
            measured_seconds: how long it took.
            remaining_seconds: a new prediction of what is left, or None to correct the last.
        """
        self.done_seconds += measured_seconds
        if remaining_seconds is not None:
            self.tell(remaining_seconds)
            return
        self._predicted_seconds += predicted_seconds
        self._measured_seconds += measured_seconds
        left = self._uncorrected_seconds = max(0.0, self._uncorrected_seconds - predicted_seconds)
        is_known = self._predicted_seconds > 0 and self._measured_seconds > 0  # no unit that took no time says anything
        self.remaining_seconds = left * (self._measured_seconds / self._predicted_seconds) if is_known else left
