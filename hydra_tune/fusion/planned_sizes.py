"""`PlannedSizes`: how many trials are one group where a device has room for fewer at once, if their steps are planned."""

import logging
import threading
import time
from collections.abc import Hashable, Sequence

from hydra_tune.errors import BudgetError, HydraTuneError, UnfusableError
from hydra_tune.fusion.chooser import steps_of
from hydra_tune.fusion.likeness import Likeness
from hydra_tune.fusion.member import Member, Wanted
from hydra_tune.fusion.planned import CLIPS, PlannedStep, Stack, StepPlanner, stack_of
from hydra_tune.fusion.plans import GroupPlans, layout_of
from hydra_tune.shard.library import Prepared

_LOGGER = logging.getLogger("hydra_tune.fusion")
_MAX_TRIED = 3
_COST_SHARE = 0.1  # of the work to come, that planning may be expected to take
_PLANNING = 10  # how many times as long as to trace and profile a step it takes to plan it


class PlannedSizes:
    """Compares planned groups with smaller ones that fit as they are, and remembers what came of it.

    Args:
        plans: makes the groups' plans.
        planner: plans their steps.
        insists: whether as many as can be planned are one group; else as many as are fastest.
    """

    def __init__(self, plans: GroupPlans, planner: StepPlanner, *, insists: bool) -> None:
        self._plans, self._planner, self._insists = plans, planner, insists
        self._lock = threading.Lock()
        self._known: dict[Hashable, int] = {}

    def best(
        self, kind: Hashable, members: Sequence[Member], wanted: Wanted, room: int, least_gain: float = 1.0
    ) -> int:
        """How many of some trials are to be one group.

        Args:
            kind: what their steps have in common.
            members: they, built; only read.
            wanted: the first batch of the first of them.
            room: how many fit as they are.
            least_gain: how many times as fast the planned step has to be, for each of them.

        Returns:
            More than fit, if planned steps are to be preferred; else `room`. The log says why.
        """
        key = kind, len(members), room
        with self._lock:
            if key not in self._known:
                try:
                    self._known[key] = self._best(members, wanted, room, least_gain)
                except Exception as error:  # whatever there is to it comes up again where the trials run
                    is_known = isinstance(error, HydraTuneError)
                    what = "no more than %d of %d trials are computed together: %s"
                    _LOGGER.info(what, room, len(members), error, exc_info=not is_known)
                    self._known[key] = room
            return self._known[key]

    def _best(self, members: Sequence[Member], wanted: Wanted, room: int, least_gain: float) -> int:
        own, found = self._plans.of_members(members, wanted)
        if found.rows is not None:
            raise UnfusableError("their losses are not the same, for which no steps are planned")
        if any(member.task.max_grad_norm is not None for member in members):
            raise UnfusableError(CLIPS)
        most = min(len(members), self._most_evaluated(members[0], own))
        began = time.thread_time()
        alone = self._planner.kept_seconds(self._stack(own, found, members[:room], wanted)) / room
        work = alone * sum(steps_of(member) for member in members)
        if not self._insists and _COST_SHARE * work < _PLANNING * (time.thread_time() - began):
            raise UnfusableError(f"their steps, {work:.3g} s in all, are too few to plan them")
        best, least = room, alone / least_gain
        for size in _sizes(most, room):
            try:
                step = self._planner.planned(self._stack(own, found, members[:size], wanted))
            except (BudgetError, UnfusableError) as error:
                _LOGGER.info("%d trials are not computed together: %s", size, error)
                continue
            seconds = step.part.times.seconds / size
            self._tell(step, seconds, room, alone)
            if self._insists:
                return size
            if seconds < least:
                best, least = size, seconds
        return best

    @staticmethod
    def _tell(step: PlannedStep, seconds: float, room: int, alone: float) -> None:
        _LOGGER.info(
            "predicted: %s: %.3g ms for each; %d together, which fit as they are, %.3g ms for each",
            step,
            seconds * 1e3,
            room,
            alone * 1e3,
        )

    def _stack(self, own: Prepared, found: Likeness, members: Sequence[Member], wanted: Wanted) -> Stack:
        stacked = self._plans.stacked(own, len(members), slots=found.drops)
        return stack_of(stacked, [member.built() for member in members], wanted.leaves.tensors)

    def _most_evaluated(self, member: Member, own: Prepared) -> int:
        """How many can be evaluated at once, which is not planned."""
        wanted = member.peek().get("evaluate")
        if wanted is None:
            return 1 << 30
        evaluated = self._plans.of_member(member, wanted, layout_of(own))
        return self._planner.budget_bytes // evaluated.plan.peak_bytes


def _sizes(most: int, room: int) -> list[int]:
    """Sizes to try, the largest first: as many as there are, and the powers of two below."""
    powers = [1 << power for power in range(most.bit_length() - 1, 0, -1)]
    return [size for size in dict.fromkeys([most, *powers]) if size > room][:_MAX_TRIED]
