"""`PlannedSizeChooser`: decide how many trials form a job if a device holds only fewer at once, by planning their steps.

The class compares planned groups, and pairs of groups in turn, with smaller groups that fit unplanned. A planned group
wins only if the time per trial falls, unless the user insists on large groups (`fusion_planner="on"`).
`GroupJobLauncher` (`pool/fusion/group_jobs.py`) makes a pool's chooser, and `GroupMatcher`
(`pool/fusion/group_matcher.py`) asks the chooser before a group is formed, if more trials wait than fit a device;
`pool/dry_run/fusion_report.py` calls `kept_way` and `compared` for `HydraExecutor.plan(probe=True)`. The module must not
decide on swaps: `StepPlanner` (`step_planner.py`) plans each size.

Note: a lock is held while steps are planned, for seconds, and `keeps` waits for the lock too, so no caller may hold the pool's
lock. Members are only read.
"""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate, pairwise
from math import inf

from hydra_tune.errors import BudgetError, HydraTuneError, UnfusableError
from hydra_tune.fusion.compile.batched_plan_cache import GroupPlanFactory, layout_of, most_evaluated
from hydra_tune.fusion.group.member import MemberBatchRequest, MemberTrial
from hydra_tune.fusion.matching.group_size_chooser import steps_of
from hydra_tune.fusion.matching.plan_diff import MemberDifferences
from hydra_tune.fusion.runtime import planned_size_search
from hydra_tune.fusion.runtime.plan_report import KEPT, PAIR, WHOLE, PlannedSizeChoice, PlannedSizeOption, chosen_of
from hydra_tune.fusion.runtime.planned_size_search import LEAST_SAVING, PlannedSizeSearch, PlanningBudget
from hydra_tune.fusion.runtime.step_planner import OWN_LOSSES, StackedStepSpec, StepPlanner, stack_of
from hydra_tune.planner.search.partitions import Part, PartitionSearch
from hydra_tune.shard.partition.plan_cache import PreparedPlan

_LOGGER = logging.getLogger("hydra_tune.fusion")
# First guess of the seconds for tracing and profiling a step: for any step, and for each operator of a trial's forward.
_LOOK_SECONDS, _OPERATOR_SECONDS = 0.3, 0.01
_MOST_TRIES = 40  # parts of a partition that are planned


class PlannedSizeChooser:
    """Compares planned groups with smaller unplanned groups, and caches the choice.

    Args:
        insists: whether a job takes as many trials as can be planned, as a group or as two groups in turn; otherwise as
            many as are fastest.
        num_devices: number of devices that share the steps, while tracing a step halts all of them.
    """

    def __init__(self, plans: GroupPlanFactory, planner: StepPlanner, *, insists: bool, num_devices: int = 1) -> None:
        self._plans, self._planner, self.insists, self._num_devices = plans, planner, insists, num_devices
        self._pace = 1.0  # seconds for tracing and profiling over their first guess, the most so far
        self._lock = threading.Lock()
        self._known: dict[Hashable, dict[int, PlannedSizeChoice | None]] = {}
        self._looked: dict[Hashable, float] = {}  # seconds for tracing and profiling a group that fits

    def keeps(self, kind: Hashable, num_trials: int, room: int, *, clips: bool) -> bool:
        """Return whether at least `num_trials` were compared before, and no more than fit unplanned turned out best."""
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

        Else choose now, also for the trials that the first job of a partition leaves over.
        """
        choices = self._known.setdefault(key, {})
        earlier = (
            earlier_choice
            for count, earlier_choice in choices.items()
            if count > len(members) and earlier_choice is not None
        )
        if len(members) not in choices:
            choice = next((earlier_choice for earlier_choice in earlier if earlier_choice.size <= len(members)), None)
            if choice is not None:
                return choice
            choices[len(members)] = None  # stays if `_best` raises, so a failed comparison is not repeated
            choice = self._best(key, own, likeness, members, wanted, room, least_gain)
            choices |= {count: rest for count, rest in choice.rests(len(members)).items() if count not in choices}
            choices[len(members)] = choice
        return choices[len(members)]

    def check_worth(self, own: PreparedPlan, num_steps: float) -> None:
        """Refuse trials whose steps would take too little time to find out whether planned steps are faster.

        Raises:
            UnfusableError: the trials are refused.
        """
        if self.insists or own.seconds is None:
            return
        work_seconds = (sum(own.seconds.forward) + sum(own.seconds.backward)) * num_steps / self._num_devices
        if planned_size_search.COST_SHARE * work_seconds < self._pace * _look_seconds(own):
            raise UnfusableError(_too_few(work_seconds))

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
        num_steps = sum(steps_of(member) for member in members)
        self.check_worth(own, num_steps)
        began = time.thread_time()

        def stack(begin: int, end: int) -> StackedStepSpec:
            return self._stack(own, found, members[begin:end], wanted)

        unplanned_way = kept_way(self._planner, stack(0, room))
        # Tracing and profiling are cached, so only the first call measures their time; remember it.
        look_seconds = self._looked.setdefault(key, time.thread_time() - began)
        self._pace = max(self._pace, look_seconds / _look_seconds(own))
        work_seconds = unplanned_way.seconds_each * num_steps / self._num_devices
        budget = PlanningBudget(work_seconds, look_seconds, insists=self.insists)
        if not budget.allows(None):
            raise UnfusableError(_too_few(work_seconds))
        choice = compared(
            self._planner,
            stack,
            len(members),
            unplanned_way,
            self._most_evaluated(members[0], own),
            insists=self.insists,
            least_gain=least_gain,
            budget=budget,
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
        return stack_of(stacked_plan, built, wanted.tensors, is_clipped=is_clipped)

    def _most_evaluated(self, member: MemberTrial, own: PreparedPlan) -> int:
        """Return how many trials may be in a group whose members are evaluated one part after the other."""
        with member.peek() as first_batches:
            request = first_batches.get("evaluate")
            if request is None:
                # Without a validation nothing else limits the size.
                return 1 << 30
            evaluation_plan = self._plans.of_member(member, request, layout_of(own))
        return most_evaluated(evaluation_plan, self._planner.budget_bytes)


def _look_seconds(own: PreparedPlan) -> float:
    return _LOOK_SECONDS + _OPERATOR_SECONDS * len(own.plan.operators)


def _too_few(work_seconds: float) -> str:
    return f"their steps, {work_seconds:.3g} s on each device, are too few to plan them"


def kept_way(planner: StepPlanner, stack: StackedStepSpec) -> PlannedSizeOption:
    """Return the way of a group that fits unplanned.

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
    budget: PlanningBudget | None = None,
) -> PlannedSizeChoice:
    """Compare ways to compute more trials together than fit unplanned, and mark the preferred ways.

    Args:
        planner: plans for the devices.
        stack: returns the stack of the trials from a first index to a last index (exclusive).
        num_trials: number of trials.
        kept: the way of as many trials as fit unplanned.
        most: limit on the members of a group, apart from the memory of steps.
        insists: as of `PlannedSizeChooser`.
        least_gain: required speedup per trial of planned steps over `kept`.
        budget: limits the time of planning; None: the number of plans is limited.
    """
    plans = _PartPlans(planner, stack, kept, budget)
    if insists:
        return _of_most(plans, num_trials, most)
    return _fastest(plans, num_trials, most, least_gain)


class _PartPlans:
    """Plans of parts, as many as the budget allows.

    Attributes:
        ways: `kept`, and all planned ways in the order of planning.
    """

    def __init__(
        self,
        planner: StepPlanner,
        stack: Callable[[int, int], StackedStepSpec],
        kept: PlannedSizeOption,
        budget: PlanningBudget | None,
    ) -> None:
        self._planner, self._stack, self._budget = planner, stack, budget
        self.kept = kept
        self.ways = [kept]
        self._seconds = {kept.trials: kept.seconds or 0.0}  # of the operators of groups that have been profiled

    def tried(self, part: Part, gain: float | None) -> PlannedSizeOption | None:
        """Plan a part, and return the way; None if planning has taken long enough."""
        if self._budget is not None and not self._budget.allows(gain):
            return None
        with nullcontext() if self._budget is None else self._budget.spending():
            edges = [0, *accumulate(part)]
            way = _tried(self._planner, [self._stack(begin, end) for begin, end in pairwise(edges)])
        self.ways.append(way)
        self._seconds.update(zip(part, way.operator_seconds, strict=False))
        return way

    def share(self, way: PlannedSizeOption) -> float:
        """Return the memory that there is over the memory that a way needs; 1 if there is a plan, 0 if the need is unknown."""
        if way.seconds is not None:
            return 1.0
        return 0.0 if way.enough_bytes is None else min(self._planner.budget_bytes / way.enough_bytes, 0.999)

    def at_least(self, size: int) -> float:
        """Estimate the seconds of a group's operators: on lines between the sizes that have been profiled, and beyond."""
        sizes = sorted(self._seconds)
        if size in self._seconds or len(sizes) == 1 or size < sizes[0]:
            return self._seconds.get(size, size * self._seconds[sizes[0]] / sizes[0])
        above = next((place for place, known in enumerate(sizes) if known > size), len(sizes) - 1)
        first, second = sizes[above - 1], sizes[above]
        slope = (self._seconds[second] - self._seconds[first]) / (second - first)
        if size > second:  # more trials never take less, whatever noise is in the profiles
            slope = max(slope, 0.0)
        return self._seconds[second] + slope * (size - second)


def _of_most(plans: _PartPlans, num_trials: int, most: int) -> PlannedSizeChoice:
    """Choose the way of as many trials as can be planned, as a group or as two groups in turn."""
    chosen, most_trials = plans.kept, min(num_trials, 2 * most)
    if num_trials > most_trials:
        plans.ways.append(_not_evaluated(num_trials, most))
    search = PlannedSizeSearch(plans.kept.trials, most_trials)
    while (size := search.next) is not None:
        shares = [0.0]
        for part in [(size,)] * (size <= most) + [_halves(size)]:
            gain = None if chosen is plans.kept else plans.kept.seconds_each / chosen.seconds_each
            way = plans.tried(part, gain)
            if way is None:
                return chosen_of(plans.ways, chosen)
            shares.append(plans.share(way))
            is_larger = way.seconds is not None and size > chosen.trials
            if is_larger or way.seconds_each < chosen.seconds_each:
                chosen = way
        search.tried(size, max(shares))
    return chosen_of(plans.ways, chosen)


def _fastest(plans: _PartPlans, num_trials: int, most: int, least_gain: float) -> PlannedSizeChoice:
    """Choose the fastest partition of all trials into groups that fit, planned groups, and pairs of planned groups."""
    kept, room = plans.kept, plans.kept.trials
    search = PartitionSearch(
        num_trials, lambda size: plans.at_least(size) if size <= most else inf, least_saving=LEAST_SAVING
    )
    for size in range(1, room + 1):
        search.planned((size,), kept.seconds_each * size)
    planned_ways: dict[Part, PlannedSizeOption] = {}
    # The first sizes to look at: others are estimated by what these take.
    size = min(2 * room, num_trials, 2 * most)
    first_parts = [(size,)] * (size <= most) + [_halves(size)] * (size > room)
    is_complete, tries = True, 0
    while (part := first_parts.pop(0) if first_parts else search.next) is not None:
        gain = kept.seconds_each * num_trials / search.seconds
        way = plans.tried(part, gain if gain > 1 else None)
        tries += 1
        if way is None or tries > _MOST_TRIES:
            is_complete = False
            break
        if way.seconds is None:
            search.refused(part, plans.share(way) or 1.0)
        else:
            search.planned(part, way.seconds * least_gain)
            planned_ways[part] = way
    parts = [planned_ways[part] for part in search.best if part in planned_ways]
    if parts and is_complete:
        parts += [
            replace(kept, sizes=part, seconds=kept.seconds_each * sum(part))
            for part in search.best
            if part not in planned_ways
        ]
    return chosen_of(plans.ways, *(parts or [kept]))


def _halves(size: int) -> Part:
    return (size + 1) // 2, size // 2


def _tried(planner: StepPlanner, stacks: Sequence[StackedStepSpec]) -> PlannedSizeOption:
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
        all_seconds = [planner.profiled_seconds(stack) for stack in stacks]
        operator_seconds = tuple(seconds for seconds in all_seconds if seconds is not None)
        enough_bytes = getattr(error, "enough_bytes", None)
        return replace(way, why_not=str(error), enough_bytes=enough_bytes, operator_seconds=operator_seconds)
    return replace(
        way,
        how=step.part.way,
        seconds=step.part.times.seconds,
        peak_bytes=step.peak_bytes,
        operator_seconds=tuple(array.seconds for array in step.part.schedule.arrays),
    )


def _not_evaluated(num_trials: int, most: int) -> PlannedSizeOption:
    why = f"a device has room for the state of {most} of them beside the evaluation of one"
    return PlannedSizeOption(name=WHOLE, sizes=(num_trials,), why_not=why)
