"""`PlannedSizes`: how many trials are one group where a device has room for fewer at once, if their steps are planned."""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from hydra_tune.errors import BudgetError, HydraTuneError, UnfusableError
from hydra_tune.fusion.chooser import steps_of
from hydra_tune.fusion.likeness import Likeness
from hydra_tune.fusion.member import Member, Wanted
from hydra_tune.fusion.planned import OWN_LOSSES, Stack, StepPlanner, stack_of
from hydra_tune.fusion.planned_choice import KEPT, PAIR, WHOLE, PlannedChoice, PlannedWay, chosen_of
from hydra_tune.fusion.plans import GroupPlans, layout_of
from hydra_tune.shard.library import Prepared

_LOGGER = logging.getLogger("hydra_tune.fusion")
_MAX_TRIED = 3
_COST_SHARE = 0.1  # of the work to come, that planning may be expected to take
_PLANNING = 5  # times as long as to trace and profile one step it takes to try all sizes; 3.7 for small CNNs


class PlannedSizes:
    """Compares planned groups with smaller ones that fit as they are, and remembers what came of it.

    Args:
        plans: makes the groups' plans.
        planner: plans their steps.
        insists: whether as many as can be planned are one job, as one group or two in turn; else as many as are fastest.

    Attributes:
        insists: as given.
    """

    def __init__(self, plans: GroupPlans, planner: StepPlanner, *, insists: bool) -> None:
        self._plans, self._planner, self.insists = plans, planner, insists
        self._lock = threading.Lock()
        self._known: dict[Hashable, dict[int, PlannedChoice | None]] = {}
        self._looked: dict[Hashable, float] = {}  # seconds that it took to trace and profile a group that fits

    def keeps(self, kind: Hashable, num_trials: int, room: int, *, clips: bool) -> bool:
        """Whether so many trials, or more, have been looked at already, and no more than fit were to be preferred.

        Args:
            kind: what their steps have in common.
            num_trials: the most that could be one job.
            room: how many fit as they are.
            clips: whether they clip their gradients by the norm of all.
        """
        with self._lock:
            known = self._known.get((kind, room, clips), {})
            return any(count >= num_trials and (one is None or one.size <= room) for count, one in known.items())

    def best(
        self, kind: Hashable, members: Sequence[Member], wanted: Wanted, room: int, least_gain: float = 1.0
    ) -> PlannedChoice | None:
        """How many of some trials are to be one job, and whether as one group or as two in turn.

        Args:
            kind: what their steps have in common.
            members: they, built; only read.
            wanted: the first batch of the first of them.
            room: how many fit as they are.
            least_gain: how many times as fast the planned steps have to be, for each of them.

        Returns:
            What was compared, and what is to be preferred; None where nothing was. The log says why.
        """
        try:
            own, found = self._plans.of_members(members, wanted)
            if found.rows is not None:
                raise UnfusableError(OWN_LOSSES)  # noqa: TRY301 - told as whatever else there is
            clips = tuple(member.task.max_grad_norm is not None for member in members)
            alike = clips[0] if len(set(clips)) == 1 else clips
            with self._lock:
                return self._remembered((kind, room, alike), own, found, members, wanted, room, least_gain)
        except Exception as error:  # whatever there is to it comes up again where the trials run
            is_known = isinstance(error, HydraTuneError)
            what = "no more than %d of %d trials are computed together: %s"
            _LOGGER.info(what, room, len(members), error, exc_info=not is_known)
            return None

    def _remembered(
        self,
        key: Hashable,
        own: Prepared,
        likeness: Likeness,
        members: Sequence[Member],
        wanted: Wanted,
        room: int,
        least_gain: float,
    ) -> PlannedChoice | None:
        """What was chosen for so many, or for more of whom these may be the rest; else what is chosen now."""
        known = self._known.setdefault(key, {})
        earlier = (one for count, one in known.items() if count > len(members) and one is not None)
        found = next((one for one in earlier if one.size <= len(members)), None)
        if found is not None or len(members) in known:
            return found or known[len(members)]
        known[len(members)] = None  # unless it can be told
        known[len(members)] = self._best(key, own, likeness, members, wanted, room, least_gain)
        return known[len(members)]

    def _best(
        self,
        key: Hashable,
        own: Prepared,
        found: Likeness,
        members: Sequence[Member],
        wanted: Wanted,
        room: int,
        least_gain: float,
    ) -> PlannedChoice:
        began = time.thread_time()

        def stack(begin: int, end: int) -> Stack:
            return self._stack(own, found, members[begin:end], wanted)

        kept = kept_way(self._planner, stack(0, room))
        work = kept.seconds_each * sum(steps_of(member) for member in members)
        looked = self._looked.setdefault(key, time.thread_time() - began)  # which is known the next time
        if not self.insists and _COST_SHARE * work < _PLANNING * looked:
            raise UnfusableError(f"their steps, {work:.3g} s in all, are too few to plan them")
        evaluated = self._most_evaluated(members[0], own)
        choice = compared(
            self._planner, stack, len(members), kept, evaluated, insists=self.insists, least_gain=least_gain
        )
        for told in choice.told:
            _LOGGER.info("predicted: %s", told)
        return choice

    def _stack(self, own: Prepared, found: Likeness, members: Sequence[Member], wanted: Wanted) -> Stack:
        stacked = self._plans.stacked(own, len(members), slots=found.drops)
        is_clipped = any(member.task.max_grad_norm is not None for member in members)
        built = [member.built() for member in members]
        return stack_of(stacked, built, wanted.leaves.tensors, is_clipped=is_clipped)

    def _most_evaluated(self, member: Member, own: Prepared) -> int:
        """How many can be evaluated at once, which is not planned."""
        wanted = member.peek().get("evaluate")
        if wanted is None:
            return 1 << 30
        evaluated = self._plans.of_member(member, wanted, layout_of(own))
        return self._planner.budget_bytes // evaluated.plan.peak_bytes


def kept_way(planner: StepPlanner, stack: Stack) -> PlannedWay:
    """A group that fits as it is.

    Args:
        planner: of the devices.
        stack: the group.

    Raises:
        UnfusableError: it cannot be traced as planned steps are.
    """
    seconds, peak_bytes = planner.kept_seconds(stack), stack.prepared.plan.peak_bytes
    return PlannedWay(name=KEPT, sizes=(stack.updates.count,), seconds=seconds, peak_bytes=peak_bytes)


def compared(
    planner: StepPlanner,
    stack: Callable[[int, int], Stack],
    num_trials: int,
    kept: PlannedWay,
    most: int,
    *,
    insists: bool,
    least_gain: float,
) -> PlannedChoice:
    """Ways to compute more trials together than a device has room for, and the one to be preferred.

    Args:
        planner: of the devices.
        stack: gives a group of some of the trials, from one number to another.
        num_trials: how many there are.
        kept: as many as fit as they are.
        most: members of one group, as far as other things than steps count.
        insists: as of `PlannedSizes`.
        least_gain: how many times as fast as `kept` planned steps have to be, for each trial.
    """
    ways, chosen = [kept], kept
    for size in _sizes(num_trials, kept.trials):
        half = (size + 1) // 2
        tried = [
            _tried(planner, [stack(0, size)]) if size <= most else _not_evaluated(WHOLE, (size,), most),
            _tried(planner, [stack(0, half), stack(half, size)])
            if half <= most
            else _not_evaluated(PAIR, (half, size - half), most),
        ]
        ways += tried
        fastest = min(tried, key=lambda way: way.seconds_each)
        if insists and fastest.seconds is not None:
            chosen = fastest
            break
        if fastest.seconds_each < min(kept.seconds_each / least_gain, chosen.seconds_each):
            chosen = fastest
    return chosen_of(ways, chosen)


def _tried(planner: StepPlanner, stacks: Sequence[Stack]) -> PlannedWay:
    """One group, or two in turn, planned."""
    way = PlannedWay(name=WHOLE if len(stacks) == 1 else PAIR, sizes=tuple(one.updates.count for one in stacks))
    try:
        step = planner.planned(*stacks)
        for stack in stacks if len(stacks) > 1 else ():  # each of two goes on by itself where the other has ended
            if not planner.fits(stack.prepared):
                planner.planned(stack)
    except (BudgetError, UnfusableError) as error:
        return replace(way, why_not=str(error))
    return replace(way, how=step.part.way, seconds=step.part.times.seconds, peak_bytes=step.peak_bytes)


def _not_evaluated(name: str, sizes: tuple[int, ...], most: int) -> PlannedWay:
    """One group, or two in turn, of which one has too many members."""
    why = f"a device has room for {most} of them when they are evaluated, which is not planned"
    return PlannedWay(name=name, sizes=sizes, why_not=why)


def _sizes(most: int, room: int) -> list[int]:
    """Sizes to try, the largest first: as many as there are, and the powers of two below."""
    powers = [1 << power for power in range(most.bit_length() - 1, 0, -1)]
    return [size for size in dict.fromkeys([most, *powers]) if size > room][:_MAX_TRIED]
