"""How long a trial's units take and how much is left: what the scheduler plans by.

Starts from the pilot's run and follows what is measured.
"""

import threading
from collections.abc import Hashable, Mapping

_WEIGHT = 0.1  # of a new measurement against what was known
_MOST = 2.0  # times what was known: a unit that took longer was held up by something else
_COUNTED = ("batches_per_epoch", "validation_batches", "epoch", "steps", "evaluations", "evaluated_batches")
_STEP_BYTES = 4  # touched by a step for each byte of the state, as a first guess
_UPDATE_BYTES_PER_SECOND = 2e9  # a first guess for updates, which the pilot does not run


class UnitTimes:
    """Seconds of the units of one step, and their sum. Several trials may measure the same ones, each on its own thread.

    Args:
        seconds: first estimates by unit.
        repeats: how often a unit runs in a step; once unless named.
        name: what they are known by where several trials measure them; None for one that measures alone.
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
        self._num_measured: dict[Hashable, int] = {}  # up to two, from when on all measurements count alike
        self._lock = threading.Lock()
        self.total = sum(value * self._repeats.get(unit, 1) for unit, value in seconds.items())

    def of(self, unit: Hashable) -> float:
        """Seconds a unit is expected to take."""
        return self._seconds.get(unit, 0.0)

    def measured(self, unit: Hashable, seconds: float) -> None:
        """A unit took so long; one that is not part of every step does not count.

        What is left is many times a unit's seconds, and jobs whose rest seems to jump are sent from device to device. So one
        measurement changes little, and of the first two, which pay for whatever is done once, the shorter one counts.
        """
        if unit not in self._seconds:
            return
        with self._lock:
            known = self._seconds[unit]
            number = self._num_measured.get(unit, 0)
            if number > 1:
                fresh = known + _WEIGHT * (min(seconds, _MOST * known) - known)
            else:
                fresh = min(known, seconds) if number else seconds
                self._num_measured[unit] = number + 1
            self._seconds[unit] = fresh
            self.total += (fresh - known) * self._repeats.get(unit, 1)

    def __len__(self) -> int:
        return sum(self._repeats.get(unit, 1) for unit in self._seconds)


def update_guess(nbytes: int) -> float:
    """Seconds an update may take, from the bytes it touches."""
    return nbytes / _UPDATE_BYTES_PER_SECOND


def step_guess(state_bytes: int) -> float:
    """Seconds that a step of the user's own code may take, before one has run, from the bytes of its parameters."""
    return update_guess(_STEP_BYTES * state_bytes)


class Progress:
    """Counts of steps and evaluations, done and to come; the totals are None until they are known."""

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
        self.evaluations = 0
        self.evaluated_batches = 0

    def state(self) -> dict[str, int | None]:
        """What has been counted, for `restore`."""
        return {name: getattr(self, name) for name in _COUNTED}

    def restore(self, state: Mapping[str, int | None]) -> None:
        """Go on counting from there."""
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
        """Optimizer steps to come; at least one more epoch's worth of those seen where the total is unknown."""
        total = self.num_steps
        return max(1, self.steps) if total is None else max(0, total - self.steps)

    @property
    def evaluated_batches_left(self) -> int:
        """Validation batches to come, where known."""
        total = self.num_evaluated_batches
        return 0 if total is None else max(0, total - self.evaluated_batches)
