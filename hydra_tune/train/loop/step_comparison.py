"""`StepComparisons`: comparisons of captured steps with eager steps before reports, in about a hundredth of the time.

A graph repeats what no guard can see: a clock, an answer of another process, the inside of an object of an extension
module. `SingleTrial` (`train/single_trial.py`) compares its latest captured step, and `MemberComparison`
(`fusion/group/member_comparison.py`) one member of a group at a time. The comparison must leave parameters and random
streams unchanged.
"""

import time
from collections.abc import Callable

from hydra_tune.errors import CaptureError, TaskError
from hydra_tune.shard.partition.plan_cache import PreparedPlan

SHARE = 0.01  # of the time of a trial or a group


class StepComparisons:
    """The comparisons of a trial or a group, and their seconds."""

    def __init__(self) -> None:
        self._latest_seconds = self._all_seconds = 0.0

    def run(self, prepared: PreparedPlan, spent_seconds: float, compare: Callable[[], bool]) -> None:
        """Compare a plan with the eager step, if there is time by the last comparison's seconds, or else by the plan's.

        Args:
            prepared: the plan of the trial or of a member.
            spent_seconds: computing time of the trial or the group so far.
            compare: compares, and returns whether there was anything to compare.

        Raises:
            TaskError: the plan gives other numbers than the eager step.
        """
        if not self._latest_seconds and prepared.seconds is not None:
            # The eager step twice, and the plan's units.
            self._latest_seconds = 3 * sum((*prepared.seconds.forward, *prepared.seconds.backward))
        if self._all_seconds + self._latest_seconds > SHARE * spent_seconds:
            return
        began = time.perf_counter()
        try:
            is_compared = compare()
        except CaptureError as error:
            raise TaskError(
                f"the captured step of this trial is no longer the step that the Python code makes: {error}. The code "
                "reads something that cannot be followed, such as a database or another process's answer, and its value has "
                "changed; give it with the batches, keep it in a variable or an attribute, or let the trial run as it is, "
                'with a larger device_memory or fusion="off"'
            ) from error
        if is_compared:
            self._latest_seconds = time.perf_counter() - began
            self._all_seconds += self._latest_seconds
