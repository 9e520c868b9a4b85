"""`SharedTimes`: the unit times of plans, measured together by all trials that run them.

Note: why together. What is left of a trial is many times a unit's seconds, so that an error of a hundredth is more than half a
step for a trial with sixty steps to go. Measured trial by trial, equal trials seem to differ by several steps, and are sent
from device to device for it. Trials of one plan run the same units; measured together, only the steps that they have done tell
them apart.
"""

import itertools
import threading
from weakref import WeakKeyDictionary

from hydra_tune.shard.library import Prepared
from hydra_tune.train.clock import UnitTimes
from hydra_tune.train.step import unit_times


class SharedTimes:
    """Unit times by plan, for the trials of one pool. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._times: WeakKeyDictionary[Prepared, dict[int, UnitTimes]] = WeakKeyDictionary()  # by batches of a step

    def of(self, prepared: Prepared, accumulate: int = 1) -> UnitTimes:
        """The times of a plan's units in a step of so many batches: those that others have measured, or first estimates.

        Args:
            prepared: the very object that other trials of the same plan have; its times go with it. A plan that runs whole is
                each trial's own.
            accumulate: batches of a step.
        """
        if prepared.plan.eager:
            return unit_times(prepared, accumulate)
        with self._lock:
            known = self._times.setdefault(prepared, {})
            if accumulate not in known:
                known[accumulate] = unit_times(prepared, accumulate, f"plan {next(self._numbers)}")
            return known[accumulate]
