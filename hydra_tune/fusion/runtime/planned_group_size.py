"""`PlannedSizeChooser`: decide how many trials form a job if a device holds only fewer at once, by planning their steps.

The class compares planned groups, and pairs of groups in turn, with smaller groups that fit unplanned. A planned group
wins only if the time per trial falls, unless the user insists on large groups. `GroupMatcher`
(`pool/fusion/group_matcher.py`) asks `PlannedSizeChooser` before a group is formed, if more trials wait than fit a
device; `pool/dry_run/fusion_report.py` calls `compared` for `HydraExecutor.plan(probe=True)`.
"""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from hydra_tune.errors import BudgetError, HydraTuneError, UnfusableError
from hydra_tune.fusion.compile.batched_plan_cache import GroupPlanFactory, layout_of, most_evaluated
from hydra_tune.fusion.group.member import MemberBatchRequest, MemberTrial
from hydra_tune.fusion.matching.group_size_chooser import steps_of
from hydra_tune.fusion.matching.plan_diff import MemberDifferences
from hydra_tune.fusion.runtime.plan_report import KEPT, PAIR, WHOLE, PlannedSizeChoice, PlannedSizeOption, chosen_of
from hydra_tune.fusion.runtime.step_planner import OWN_LOSSES, StackedStepSpec, StepPlanner, stack_of
from hydra_tune.shard.partition.plan_cache import PreparedPlan

_LOGGER = logging.getLogger("hydra_tune.fusion")
_MAX_TRIED = 3
_COST_SHARE = 0.1  # share of the remaining work that planning may take
_PLANNING = 5  # time to try all sizes over the time to trace and profile a step; 3.7 for small CNNs


class PlannedSizeChooser:
    """Compares planned groups with smaller unplanned groups, and caches the choice.

    Args:
        plans: makes the groups' plans.
        planner: plans the groups' steps.
        insists: whether a job takes as many trials as can be planned, as a group or as two groups in turn; otherwise as
            many as are fastest.

    Attributes:
        insists: as given.
    """

    def __init__(self, plans: GroupPlanFactory, planner: StepPlanner, *, insists: bool) -> None:
        self._plans, self._planner, self.insists = plans, planner, insists
        self._lock = threading.Lock()
        self._known: dict[Hashable, dict[int, PlannedSizeChoice | None]] = {}
        self._looked: dict[Hashable, float] = {}  # seconds for tracing and profiling a group that fits

    def keeps(self, kind: Hashable, num_trials: int, room: int, *, clips: bool) -> bool:
        """Return whether at least `num_trials` were compared before, and no more than fit unplanned turned out best.

        Args:
            kind: key of trials with equal steps.
            num_trials: largest number of trials in a job.
            room: number of trials that fit unplanned.
            clips: whether the trials clip gradients by their global norm.
        """
        with self._lock:
            choices = self._known.get((kind, room, clips), {})
            return any(
                count >= num_trials and (choice is None or choice.size <= room) for count, choice in choices.items()
            )

    def best(
        self,
        kind: Hashable,
        members: Sequence[MemberTrial],
        wanted: MemberBatchRequest,
        room: int,
        least_gain: float = 1.0,
    ) -> PlannedSizeChoice | None:
        """Return how many of some trials form a job, and whether as a group or as two groups in turn.

        Args:
            kind: key of trials with equal steps.
            members: the built trials; only read.
            wanted: first batch of the first trial.
            room: number of trials that fit unplanned.
            least_gain: required speedup per trial of planned steps.

        Returns:
            The compared ways with the preferred way marked; None where no comparison was possible (the log gives the
                reason).
        """
        try:
            plan, differences = self._plans.of_members(members, wanted)
            if differences.rows is not None:
                raise UnfusableError(OWN_LOSSES)  # noqa: TRY301 - logged below like any other reason
            clips = tuple(member.task.max_grad_norm is not None for member in members)
            clips_key = clips[0] if len(set(clips)) == 1 else clips
            with self._lock:
                return self._remembered((kind, room, clips_key), plan, differences, members, wanted, room, least_gain)
        except Exception as error:  # a genuine error comes up again where the trials run
            is_known = isinstance(error, HydraTuneError)
            message = "no more than %d of %d trials are computed together: %s"
            _LOGGER.info(message, room, len(members), error, exc_info=not is_known)
            return None

    def _remembered(
        self,
        key: Hashable,
        own: PreparedPlan,
        likeness: MemberDifferences,
        members: Sequence[MemberTrial],
        wanted: MemberBatchRequest,
        room: int,
        least_gain: float,
    ) -> PlannedSizeChoice | None:
        """Return the choice for the same number of trials, or for a larger number that left these trials over.

        Else choose now.
        """
        choices = self._known.setdefault(key, {})
        earlier = (
            earlier_choice
            for count, earlier_choice in choices.items()
            if count > len(members) and earlier_choice is not None
        )
        choice = next((earlier_choice for earlier_choice in earlier if earlier_choice.size <= len(members)), None)
        if choice is not None or len(members) in choices:
            return choice or choices[len(members)]
        choices[len(members)] = None  # stays if `_best` raises, so a failed comparison is not repeated
        choices[len(members)] = self._best(key, own, likeness, members, wanted, room, least_gain)
        return choices[len(members)]

    def _best(
        self,
        key: Hashable,
        own: PreparedPlan,
        found: MemberDifferences,
        members: Sequence[MemberTrial],
        wanted: MemberBatchRequest,
        room: int,
        least_gain: float,
    ) -> PlannedSizeChoice:
        began = time.thread_time()

        def stack(begin: int, end: int) -> StackedStepSpec:
            return self._stack(own, found, members[begin:end], wanted)

        unplanned_way = kept_way(self._planner, stack(0, room))
        work = unplanned_way.seconds_each * sum(steps_of(member) for member in members)
        # Tracing and profiling are cached, so only the first call measures their time; remember it.
        profiling_seconds = self._looked.setdefault(key, time.thread_time() - began)
        if not self.insists and _COST_SHARE * work < _PLANNING * profiling_seconds:
            raise UnfusableError(f"their steps, {work:.3g} s in all, are too few to plan them")
        evaluated = self._most_evaluated(members[0], own)
        choice = compared(
            self._planner, stack, len(members), unplanned_way, evaluated, insists=self.insists, least_gain=least_gain
        )
        for line in choice.told:
            _LOGGER.info("predicted: %s", line)
        return choice

    def _stack(
        self, own: PreparedPlan, found: MemberDifferences, members: Sequence[MemberTrial], wanted: MemberBatchRequest
    ) -> StackedStepSpec:
        stacked_plan = self._plans.stacked(own, len(members), slots=found.drops)
        is_clipped = any(member.task.max_grad_norm is not None for member in members)
        built = [member.built() for member in members]
        return stack_of(stacked_plan, built, wanted.leaves.tensors, is_clipped=is_clipped)

    def _most_evaluated(self, member: MemberTrial, own: PreparedPlan) -> int:
        """Return how many trials may be in a group whose members are evaluated one part after the other."""
        with member.peek() as first_batches:
            request = first_batches.get("evaluate")
            if request is None:
                # Without a validation nothing else limits the size.
                return 1 << 30
            evaluation_plan = self._plans.of_member(member, request, layout_of(own))
        return most_evaluated(evaluation_plan, self._planner.budget_bytes)


def kept_way(planner: StepPlanner, stack: StackedStepSpec) -> PlannedSizeOption:
    """Return the way of a group that fits unplanned.

    Args:
        planner: plans for the devices.
        stack: the group.

    Raises:
        UnfusableError: the step cannot be traced the way planned steps are.
    """
    seconds, peak_bytes = planner.kept_seconds(stack), stack.prepared.plan.peak_bytes
    return PlannedSizeOption(name=KEPT, sizes=(stack.updates.count,), seconds=seconds, peak_bytes=peak_bytes)


def compared(
    planner: StepPlanner,
    stack: Callable[[int, int], StackedStepSpec],
    num_trials: int,
    kept: PlannedSizeOption,
    most: int,
    *,
    insists: bool,
    least_gain: float,
) -> PlannedSizeChoice:
    """Compare ways to compute more trials together than fit unplanned, and mark the preferred way.

    Args:
        planner: plans for the devices.
        stack: returns the stack of the trials from a first index to a last index (exclusive).
        num_trials: number of trials.
        kept: the way of as many trials as fit unplanned.
        most: limit on the members of a group, apart from the memory of steps.
        insists: as of `PlannedSizeChooser`.
        least_gain: required speedup per trial of planned steps over `kept`.
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
        # Sizes fall, so the first size with a plan is the largest.
        if insists and fastest.seconds is not None:
            chosen = fastest
            break
        if fastest.seconds_each < min(kept.seconds_each / least_gain, chosen.seconds_each):
            chosen = fastest
    return chosen_of(ways, chosen)


def _tried(planner: StepPlanner, stacks: Sequence[StackedStepSpec]) -> PlannedSizeOption:
    """Plan a group, or two groups in turn, and return the way."""
    way = PlannedSizeOption(
        name=WHOLE if len(stacks) == 1 else PAIR, sizes=tuple(spec.updates.count for spec in stacks)
    )
    try:
        # A refused plan is a result, too: the choice reports why a way is impossible.
        step = planner.planned(*stacks)
        for stack in stacks if len(stacks) > 1 else ():  # a group continues alone once the other has ended
            if not planner.fits(stack.prepared):
                planner.planned(stack)
    except (BudgetError, UnfusableError) as error:
        return replace(way, why_not=str(error))
    return replace(way, how=step.part.way, seconds=step.part.times.seconds, peak_bytes=step.peak_bytes)


def _not_evaluated(name: str, sizes: tuple[int, ...], most: int) -> PlannedSizeOption:
    """Return a refused way in which a group has too many members to evaluate."""
    why = f"a device has room for {most} of them when they are evaluated, which is not planned"
    return PlannedSizeOption(name=name, sizes=sizes, why_not=why)


def _sizes(most: int, room: int) -> list[int]:
    """Return the sizes to try, largest first: all trials, and smaller powers of two."""
    powers = [1 << power for power in range(most.bit_length() - 1, 0, -1)]
    return [size for size in dict.fromkeys([most, *powers]) if size > room][:_MAX_TRIED]
