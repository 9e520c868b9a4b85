"""`MemberComparison`: compares the captured steps of a group's members with their eager steps before reports.

`MemberCoordinator` (`membership.py`) asks before each report, through `GroupTrial` (`group_trial.py`), which also notes a
training step of each unit.

Note: turns. A single member is compared for the reports of a step, another member the next time, within a hundredth of
the group's time. The comparison must leave parameters and random streams unchanged. A comparison copies the slot to the
member's own module and optimizer. A difference concerns all members that share the plan, so each is compared at its own
report from then on, whatever the time. The thread that advances the group makes all calls, so there is no lock.
"""

import math
from functools import partial

from hydra_tune.errors import HydraTuneError, TaskError
from hydra_tune.fusion.compile.group_plan_cache import GroupPlanCache
from hydra_tune.fusion.group.member import MemberBatchRequest
from hydra_tune.fusion.group.slot import GroupSlot
from hydra_tune.fusion.group.slot_table import SlotTable
from hydra_tune.shard.partition.plan_cache import PlanLibrary, PreparedPlan
from hydra_tune.train.loop.step_comparison import StepComparisons


class MemberComparison:
    """The comparisons of a group.

    Args:
        is_exact: whether plans are made for bits of the host, as in a pool with a CPU device; otherwise nothing is compared.
    """

    def __init__(self, places: SlotTable, kinds: GroupPlanCache, library: PlanLibrary, *, is_exact: bool) -> None:
        self._places, self._kinds, self._library, self._is_exact = places, kinds, library, is_exact
        self._comparisons = StepComparisons()
        self._num_compared, self._is_doubted = 0, False
        self._latest: tuple[PreparedPlan, MemberBatchRequest] | None = None

    def note(self, own: PreparedPlan, request: MemberBatchRequest) -> None:
        """Note the training step that the group makes next: the plan and the request of any of its members."""
        self._latest = own, request

    def check(self, seat: GroupSlot, step_seconds: float) -> None:
        """Compare the member whose turn it is, if there is time, where a member is about to report.

        Raises:
            TaskError: the captured step of the member that is about to report gives other numbers.
        """
        if self._latest is None or not self._is_exact:
            return
        own, request = self._latest
        if not self._is_doubted:
            self._latest = None  # one comparison for the reports of a step
            live = self._places.live
            compare = partial(self._compare, live[self._num_compared % len(live)], own, request)
            try:
                self._comparisons.run(own, seat.member.progress.steps * step_seconds, compare)
            except TaskError:
                self._is_doubted, self._latest = True, (own, request)
        if self._is_doubted:
            self._comparisons.run(own, math.inf, partial(self._compare, seat, own, request))

    def _compare(self, seat: GroupSlot, own: PreparedPlan, request: MemberBatchRequest) -> bool:
        """Compare a member; return whether there was a comparison.

        Raises:
            CaptureError: the plan gives other numbers than the eager step.
        """
        self._num_compared += 1
        try:
            prepared = self._kinds.of_member(own, seat.member, request)
        except HydraTuneError:
            return False  # without a plan there is nothing to compare, and the next step tells the error
        self._places.hand_out(seat)
        return prepared.is_checked and seat.member.compare(self._library, prepared, request)
