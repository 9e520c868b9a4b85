"""`SharedTimes`: the unit times of plans, measured together by all trials that run them.

Note: why together. What is left of a trial is many times a unit's seconds, so that an error of a hundredth is more than half a
step for a trial with sixty steps to go. Measured trial by trial, equal trials seem to differ by several steps, and are sent
from device to device for it. Trials of one plan run the same units; measured together, only the steps that they have done tell
them apart.
"""

import threading
from collections import OrderedDict

from hydra_tune.shard.library import Prepared
from hydra_tune.train.clock import UnitTimes
from hydra_tune.train.step import unit_times

_MAX_PLANS = 128  # whose times are kept for trials to come; those under way hold their own

_Key = tuple[int, int]  # of the plan, and the batches of a step


class SharedTimes:
    """Unit times by plan, for the trials of one pool. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times: OrderedDict[_Key, tuple[Prepared, UnitTimes]] = OrderedDict()  # least recently used first

    def of(self, prepared: Prepared, accumulate: int = 1) -> UnitTimes:
        """The times of a plan's units in a step of so many batches: those that others have measured, or first estimates.

        Args:
            prepared: the very object that other trials of the same plan have. A plan that runs whole is each trial's own.
            accumulate: batches of a step.
        """
        if prepared.plan.eager:
            return unit_times(prepared, accumulate)
        key = (id(prepared), accumulate)
        with self._lock:
            known = self._times.get(key)
            if known is None:
                known = self._times[key] = (
                    prepared,
                    unit_times(prepared, accumulate),
                )  # holds it, so that its id stays its own
            self._times.move_to_end(key)
            while len(self._times) > _MAX_PLANS:
                self._times.popitem(last=False)
        return known[1]
