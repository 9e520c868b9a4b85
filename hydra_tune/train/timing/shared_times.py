"""`SharedUnitTimes`: the unit times of plans, measured together by all trials that run the plans.

`JobPreparer` (`pool/runtime/preparer.py`) hands the pool's `SharedUnitTimes` to each trial; `TrialPlanCache`
(`train/loop/plan_cache.py`) and `GroupTrial` (`fusion/group/group_trial.py`) look up a plan's times when the trial first needs
the plan. A forecast's trial has a `SharedUnitTimes` to itself.

Note: the reason. A trial's remaining time is many times a unit's seconds, so for a trial with sixty steps to go an error of
a hundredth is more than half a step. Measured trial by trial, equal trials seem to differ by several steps, and the
scheduler moves the trials between devices for that reason. Trials of one plan run the same units; measured together, only
their numbers of finished steps differ.
"""

import itertools
import threading
from dataclasses import replace
from weakref import WeakKeyDictionary

from hydra_tune.shard.partition.plan_cache import PreparedPlan
from hydra_tune.shard.verify.step_outcome import UnitSeconds
from hydra_tune.train.loop.batch_units import unit_times
from hydra_tune.train.timing.unit_times import UnitTimes


class SharedUnitTimes:
    """Unit times by plan, for the trials of one pool. May be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        # By plan, then by batches of a step.
        self._times: WeakKeyDictionary[PreparedPlan, dict[int, UnitTimes]] = WeakKeyDictionary()
        # By the plan with which its trials begin.
        self._settled: WeakKeyDictionary[PreparedPlan, PreparedPlan] = WeakKeyDictionary()

    def settled(self, prepared: PreparedPlan, accumulate: int) -> PreparedPlan:
        """Return a training plan with the activations chosen by measured times; the same plan while a time is missing."""
        choice, plan = prepared.activation_choice, prepared.plan
        if choice is None:
            return prepared
        times = self.of(prepared, accumulate)
        indices = range(len(plan.shards))
        with self._lock:
            if prepared not in self._settled and times.are_measured(("forward", "backward")):
                seconds = UnitSeconds(
                    forward=tuple(times.of(("forward", index)) for index in indices),
                    backward=tuple(times.of(("backward", index)) for index in indices),
                )
                chosen, seconds = choice.made(plan, seconds)
                self._settled[prepared] = replace(prepared, plan=chosen, seconds=seconds, activation_choice=None)
            return self._settled.get(prepared, prepared)

    def of(self, prepared: PreparedPlan, accumulate: int = 1) -> UnitTimes:
        """Return the unit times of a plan in a step of `accumulate` batches: measured times, or first estimates.

        Args:
            prepared: the same object as in other trials of the plan; the times live as long as the object. A plan that
                runs whole belongs to a single trial.
            accumulate: batches of a step.
        """
        if prepared.plan.eager:
            return unit_times(prepared, accumulate)
        with self._lock:
            times = self._times.setdefault(prepared, {})
            if accumulate not in times:
                times[accumulate] = unit_times(prepared, accumulate, f"plan {next(self._numbers)}")
            return times[accumulate]
