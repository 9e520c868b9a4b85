"""`JobTimeEstimate`: compute time done and remaining of a job, corrected as units finish."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class JobTimeEstimate:
    """Times of a job in seconds on a device of speed 1.

    Each finished unit either brings a new prediction of the remaining time, or the estimate corrects the last
    prediction: subtract the predicted times of the units finished since, and multiply by the ratio of measured to
    predicted time of these units.

    Args:
        remaining_seconds: predicted remaining time, corrected.
        done_seconds: measured time of all finished units.
    """

    remaining_seconds: float = 0.0
    done_seconds: float = 0.0
    _uncorrected_seconds: float = 0.0  # remaining time by the last prediction, uncorrected
    _predicted_seconds: float = 0.0  # predicted time of the units finished since
    _measured_seconds: float = 0.0  # measured time of the same units

    def tell(self, remaining_seconds: float) -> None:
        """Take a new prediction of the remaining time, and drop all corrections."""
        self.remaining_seconds = self._uncorrected_seconds = remaining_seconds
        self._predicted_seconds = self._measured_seconds = 0.0

    def finish(self, predicted_seconds: float, measured_seconds: float, remaining_seconds: float | None) -> None:
        """Account for a finished unit.

        Args:
            predicted_seconds: predicted time of the unit.
            measured_seconds: measured time of the unit.
            remaining_seconds: a new prediction of the remaining time, or None to correct the last prediction.
        """
        self.done_seconds += measured_seconds
        if remaining_seconds is not None:
            self.tell(remaining_seconds)
            return
        # The ratio is taken over all units since the last prediction, because the times of single units scatter.
        self._predicted_seconds += predicted_seconds
        self._measured_seconds += measured_seconds
        uncorrected_seconds = self._uncorrected_seconds = max(0.0, self._uncorrected_seconds - predicted_seconds)
        has_ratio = self._predicted_seconds > 0 and self._measured_seconds > 0  # units of zero time give no ratio
        self.remaining_seconds = (
            uncorrected_seconds * (self._measured_seconds / self._predicted_seconds)
            if has_ratio
            else uncorrected_seconds
        )
