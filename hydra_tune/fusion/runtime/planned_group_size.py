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
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

from hydra_tune.errors import BudgetError, HydraTuneError, UnfusableError
from hydra_tune.fusion.compile.batched_plan_cache import GroupPlanFactory, layout_of, most_evaluated
from hydra_tune.fusion.group.member import MemberBatchRequest, MemberTrial
from hydra_tune.fusion.matching.group_size_chooser import steps_of
from hydra_tune.fusion.matching.plan_diff import MemberDifferences
from hydra_tune.fusion.runtime import planned_size_search
from hydra_tune.fusion.runtime.plan_report import KEPT, PAIR, WHOLE, PlannedSizeChoice, PlannedSizeOption, chosen_of
from hydra_tune.fusion.runtime.planned_size_search import PlannedSizeSearch, PlanningBudget
from hydra_tune.fusion.runtime.step_planner import OWN_LOSSES, StackedStepSpec, StepPlanner, stack_of
from hydra_tune.shard.partition.plan_cache import PreparedPlan

_LOGGER = logging.getLogger("hydra_tune.fusion")
# First guess of the seconds for tracing and profiling a step: for any step, and for each operator of a trial's forward.
_LOOK_SECONDS, _OPERATOR_SECONDS = 0.3, 0.01


class PlannedSizeChooser:
    """Compares planned groups with smaller unplanned groups, and caches the choice.

    Args:
        plans: makes the groups' plans.
        planner: plans the groups' steps.
        insists: whether a job takes as many trials as can be planned, as a group or as two groups in turn; otherwise as
            many as are fastest.
        num_devices: number of devices that share the steps, while tracing a step halts all of them.

    Attributes:
        insists: as given.
    """

    def __init__(self, plans: GroupPlanFactory, planner: StepPlanner, *, insists: bool, num_devices: int = 1) -> None:
        self._plans, self._planner, self.insists, self._num_devices = plans, planner, insists, num_devices
        self._pace = 1.0  # seconds for tracing and profiling over their first guess, the most so far
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

    def check_worth(self, own: PreparedPlan, num_steps: float) -> None:
        """Refuse trials whose steps would take too little time to find out whether planned steps are faster.

        Args:
            own: a trial's plan.
            num_steps: remaining optimizer steps of all trials together, or an upper bound.

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
    """Guess the seconds for tracing and profiling a step."""
    return _LOOK_SECONDS + _OPERATOR_SECONDS * len(own.plan.operators)


def _too_few(work_seconds: float) -> str:
    return f"their steps, {work_seconds:.3g} s on each device, are too few to plan them"


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
    budget: PlanningBudget | None = None,
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
        budget: limits the time of planning; None: no limit.
    """
    ways, chosen = [kept], kept
    most_trials = min(num_trials, 2 * most)
    if num_trials > most_trials:
        ways.append(_not_evaluated(num_trials, most))
    first = most_trials if insists or budget is None else 2 * kept.trials
    search = PlannedSizeSearch(kept.trials, most_trials, first, is_for_largest=insists)
    while (size := search.next) is not None:
        half, shares = (size + 1) // 2, [0.0]
        for edges in [(0, size)] * (size <= most) + [(0, half, size)]:
            gain = None if chosen is kept else kept.seconds_each / chosen.seconds_each
            if budget is not None and not budget.allows(gain):
                return chosen_of(ways, chosen)
            with nullcontext() if budget is None else budget.spending():
                way = _tried(planner, [stack(begin, end) for begin, end in pairwise(edges)])
            ways.append(way)
            shares.append(_share(way, planner.budget_bytes))
            is_larger = insists and way.seconds is not None and size > chosen.trials
            least = chosen.seconds_each if insists else min(chosen.seconds_each, kept.seconds_each / least_gain)
            if is_larger or way.seconds_each < least:
                chosen = way
        search.tried(size, max(shares))
    return chosen_of(ways, chosen)


def _share(way: PlannedSizeOption, budget_bytes: int) -> float:
    """Return the memory that there is over the memory that a way needs; 1 if there is a plan, 0 if the need is unknown."""
    if way.seconds is not None:
        return 1.0
    return 0.0 if way.enough_bytes is None else min(budget_bytes / way.enough_bytes, 0.999)


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
        return replace(way, why_not=str(error), enough_bytes=getattr(error, "enough_bytes", None))
    return replace(way, how=step.part.way, seconds=step.part.times.seconds, peak_bytes=step.peak_bytes)


def _not_evaluated(num_trials: int, most: int) -> PlannedSizeOption:
    """Return a refused way in which a group has too many members to evaluate."""
    why = f"a device has room for the state of {most} of them beside the evaluation of one"
    return PlannedSizeOption(name=WHOLE, sizes=(num_trials,), why_not=why)
