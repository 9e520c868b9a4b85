"""Unit times and remaining work of a trial: the estimates by which the scheduler plans.

The estimates start from the run of a plan's check, or from a guess, and follow the measurements. `train/loop/batch_units.py`
makes the `UnitTimes` of a plan, and `OwnCodeTrial` (`train/own_code_trial.py`) those of the user's own code. `TrialFigures`
(`train/trial_figures.py`) records the seconds of each unit here, `OwnCodeTrial` the seconds of each step by own code, and
`fusion/group/multi_step_unit.py` those of a group's steps. A worker (`pool/runtime/worker.py`) tells the scheduler the trial's
remaining time after each unit. Measured seconds must not change the numbers of a trial.
"""

import threading
from collections.abc import Collection, Hashable, Mapping

# Weight of a new measurement against the present estimate.
_WEIGHT = 0.1
# Cap of a measurement, in multiples of the estimate: a slower unit was delayed by something else.
_MOST = 2.0
_COUNTED = ("batches_per_epoch", "validation_batches", "epoch", "steps", "evaluated_batches")
# First guess: bytes that a step touches for each byte of the state.
_STEP_BYTES = 4
# First guess for updates, because a plan's check runs no updates.
_UPDATE_BYTES_PER_SECOND = 2e9


class UnitTimes:
    """Seconds of the units of a step, and the sum. Several trials may measure the same units from several threads.

    Args:
        seconds: first estimates by unit.
        repeats: runs of a unit in a step; once unless named.
        name: name under which several trials share the times; None for a trial that measures alone.
    """

    def __init__(
        self,
        seconds: Mapping[Hashable, float],
        repeats: Mapping[Hashable, int] | None = None,
        name: str | None = None,
    ) -> None:
        self.name = name
        self._seconds = dict(seconds)
        self._repeats = dict(repeats or {})
        # Counts up to two; all later measurements weigh the same.
        self._num_measured: dict[Hashable, int] = {}
        self._lock = threading.Lock()
        self.total = sum(value * self._repeats.get(unit, 1) for unit, value in seconds.items())

    def of(self, unit: Hashable) -> float:
        """Return the seconds that a unit is expected to take."""
        return self._seconds.get(unit, 0.0)

    def are_measured(self, kinds: Collection[str]) -> bool:
        """Whether all units of some kinds have been measured without the one-time costs of a first run."""
        units = [unit for unit in self._seconds if isinstance(unit, tuple) and unit[0] in kinds]
        return all(self._num_measured.get(unit, 0) > 1 for unit in units)

    def measured(self, unit: Hashable, seconds: float) -> None:
        """Record a measurement of a unit; a unit outside the regular step, or without any seconds, does not count.

        The remaining time is many times a unit's seconds, and the scheduler moves jobs between devices when remaining
        times seem to jump. So a single measurement changes little. Of the first two measurements, which include
        one-time costs, the shorter counts.
        """
        # Times of a GPU's events may differ by nothing or less; from an estimate of zero the cap would never let go.
        if unit not in self._seconds or seconds <= 0:
            return
        with self._lock:
            estimate = self._seconds[unit]
            number = self._num_measured.get(unit, 0)
            if number > 1:
                fresh = estimate + _WEIGHT * (min(seconds, _MOST * estimate) - estimate)
            else:
                fresh = min(estimate, seconds) if number else seconds
                self._num_measured[unit] = number + 1
            self._seconds[unit] = fresh
            self.total += (fresh - estimate) * self._repeats.get(unit, 1)

    def __len__(self) -> int:
        return sum(self._repeats.get(unit, 1) for unit in self._seconds)


def update_guess(nbytes: int) -> float:
    """Guess the seconds of an update, from the bytes touched."""
    return nbytes / _UPDATE_BYTES_PER_SECOND


def step_guess(state_bytes: int) -> float:
    """Guess the seconds of a step of the user's own code before the first step, from the bytes of the state."""
    return update_guess(_STEP_BYTES * state_bytes)


class TrialProgressCounts:
    """Counts of steps and evaluations, done and to come; totals are None until known."""

    def __init__(
        self, *, epochs: int, accumulate: int, report_every: int | None, batches: int | None, validation: int | None
    ) -> None:
        self._epochs = epochs
        self._accumulate = accumulate
        self._report_every = report_every
        self.batches_per_epoch = batches
        self.validation_batches = validation
        self.epoch = 0
        self.steps = 0
        self.evaluated_batches = 0

    def state(self) -> dict[str, int | None]:
        """Return all counts, for `restore`."""
        return {name: getattr(self, name) for name in _COUNTED}

    def restore(self, state: Mapping[str, int | None]) -> None:
        """Continue from earlier counts."""
        for name in _COUNTED:
            setattr(self, name, state[name])

    @property
    def num_steps(self) -> int | None:
        """Optimizer steps of the whole run."""
        if self.batches_per_epoch is None:
            return None
        return -(-self.batches_per_epoch // self._accumulate) * self._epochs

    @property
    def num_evaluated_batches(self) -> int | None:
        """Validation batches of the whole run."""
        if self.validation_batches is None or self.num_steps is None:
            return None
        reports = self._epochs if self._report_every is None else self.num_steps // self._report_every
        return self.validation_batches * reports

    @property
    def steps_left(self) -> int:
        """Optimizer steps to come; where the total is unknown, as many as so far, and at least one."""
        total = self.num_steps
        return max(1, self.steps) if total is None else max(0, total - self.steps)

    @property
    def evaluated_batches_left(self) -> int:
        """Validation batches to come, where known."""
        total = self.num_evaluated_batches
        return 0 if total is None else max(0, total - self.evaluated_batches)
